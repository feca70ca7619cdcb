"""What the controller learns of devices from how long launches took, and of inputs from where they leave."""

from dataclasses import replace
from itertools import combinations

import pytest

from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.survival import SurvivalEstimate
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer import Objective
from isobatch.optimizer.model.work import work
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.windows import History
from tests.helpers.simulated_fleet import FAST

HALVES = (Split(0, 2, 8, (0, 1)), Split(2, 4, 8))


def test_a_launch_that_may_be_of_either_of_two_pipelines_corrects_nothing() -> None:
    """One stops at the first ramp and one does not, and which one launched is not told."""
    plan = Plan((Placement("fast", 2, HALVES),))
    other = replace(plan, placements=(Placement("fast", 2, (replace(HALVES[0], ramps=(1,)), HALVES[1])),))
    took_s = 2 * work(HALVES[0], FAST, "fast", None, 1.0).launch_s
    seen = Observed(0.0, 100 * took_s / 2, 0, 0, (), {LaunchShape("fast", 0, 2, 8): LaunchTimes(100, 100 * took_s)})
    alone, alike = plan, replace(plan, beside=(replace(plan, placements=(Placement("fast", 1, HALVES),)),))
    for sure in (alone, alike):
        assert Corrections().learned(seen, sure, FAST, 1.0).factors["fast"][:2] == pytest.approx((1.83, 1.83), abs=0.01)
    assert Corrections().learned(seen, replace(plan, beside=(other,)), FAST, 1.0).factors == {}


def test_time_between_launches_is_no_price_of_a_stop() -> None:
    """It passes once for a launch, however often that stops."""
    table = replace(FAST.table("fast"), launch_s=0.002, stop_s=0.0005)
    profile = Profile("toy", (table,), ExitProfile((1.0, 0.5, 0.25, 0.25)))
    (corrected,) = Corrections(between_s={"fast": 0.003}).applied(profile).tables
    assert (corrected.launch_s, corrected.stop_s) == pytest.approx((0.005, 0.0005))
    unknown = replace(profile, tables=(replace(table, stop_s=None),))
    (corrected,) = Corrections(between_s={"fast": 0.003}).applied(unknown).tables
    assert (corrected.launch_s, corrected.stop_s) == pytest.approx((0.005, 0.002))


def test_inputs_that_leave_by_chance_at_each_ramp_are_expected_behind_closed_ramps() -> None:
    """Half of those that come to a ramp leave there, whatever they did before."""
    sets = tuple((ramps, 1 / 8) for count in range(4) for ramps in combinations(range(3), count))
    by_chance = ExitProfile((1.0, 0.5, 0.25, 0.125), sets)
    fast = replace(FAST.device("fast"), count=1)
    problem = ClassifierPlanningProblem(Profile("toy", (FAST.table("fast"),), by_chance), (fast,), Objective(slo_s=1.0))
    closed = Plan((Placement("fast", 1, (Split(0, 3, 8, (2,)), Split(3, 4, 8))),))
    estimate = SurvivalEstimate(History(None), problem.prior, (0, 1, 2))
    estimate.close(Observed(0.0, 60.0, 8000, 8000, (0, 0, 4000, 4000)), closed.ramps)
    assert estimate.survival == pytest.approx(by_chance.survival, abs=1e-3), "nothing has changed"
    scored = problem.cost_model(estimate.survival, Corrections()).score(closed)
    assert [split.reach for split in scored.splits] == pytest.approx([1.0, 0.5], abs=1e-3)
