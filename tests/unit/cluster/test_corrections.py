"""What the controller learns of devices from how long launches took."""

from dataclasses import replace

import pytest

from isobatch.cluster.controller.corrections import Corrections
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer.model.work import work
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
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
