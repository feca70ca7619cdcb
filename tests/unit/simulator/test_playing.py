"""Plans that are chosen, and promised, by what the simulator sustains of them."""

from dataclasses import replace
from functools import partial

import pytest

from cluster.simulator.playing import CARE, is_playable, played
from cluster.simulator.simulation import World
from cluster.simulator.sustained import kept_run, run, settled
from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.plan import Plan
from optimizer.problem import Problem
from tests.helpers.simulated_fleet import FAST, TWO, facts

HASTY = replace(CARE, inputs=500, slos=10, last_inputs=2000, last_slos=10, most=12_000)
FIND = partial(side_by_side, gap=0.03)
TIGHT = Objective(slo_s=0.02, max_batch=8)


def planned(problem: Problem, objective: Objective) -> Plan:
    plan = side_by_side(problem, objective)
    assert plan is not None
    return plan


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 1.3])
def test_a_run_that_is_broken_off_would_not_have_been_kept(share: float) -> None:
    world, rate = World(TWO, FAST, 0.05), share * evaluate(TWO, FAST).goodput_per_s
    kept, whole = kept_run(world, rate, 2000, 3), run(world, rate, 2000, 3)
    assert (kept is not None) == (whole.good_share >= 0.99)
    assert kept is None or kept.good == whole.good


def test_the_promise_is_what_other_inputs_show_and_the_same_question_has_the_same_answer() -> None:
    plan = planned(FAST, TIGHT)
    found = played(plan, FAST, TIGHT, FIND, HASTY)
    assert found == played(plan, FAST, TIGHT, FIND, HASTY)
    assert found.plan.promise is not None
    assert found.plan.promise.goodput_per_s == found.after_per_s
    kept = settled(World(found.plan, FAST, 0.02), found.after_per_s, 8000, 5, 20)
    assert kept == pytest.approx(found.after_per_s, rel=0.08)
    assert found.after_per_s > 1.05 * found.before_per_s


def test_who_must_be_in_time_is_told() -> None:
    """More is sustained where a tenth may be late."""
    plan = planned(FAST, TIGHT)
    strict, lax = (
        played(plan, FAST, TIGHT, FIND, replace(HASTY, in_time=share, most=0)).after_per_s for share in (0.99, 0.9)
    )
    assert lax > 1.03 * strict


def test_a_path_that_hardly_anybody_takes_need_not_fit() -> None:
    """One in 500 goes to the end, where the planner believes that there is no time for larger batches."""
    rare = replace(FAST, survival=(1.0, 0.002, 0.002, 0.002))
    objective = Objective(slo_s=0.008, max_batch=8)
    found = played(planned(rare, objective), rare, objective, FIND, HASTY)
    assert found.gain > 0.1


def test_a_kind_that_the_slack_leaves_idle_works() -> None:
    """A lone input takes the slow kind 16.5 ms, which is less than the SLO and more than the SLO less its slack."""
    both = facts(fast=1, slow=6)
    objective = Objective(slo_s=0.02, max_batch=8)
    plan = planned(both, objective)
    assert "slow" not in plan.devices()
    found = played(plan, both, objective, FIND, HASTY)
    assert "slow" in found.plan.devices()
    assert found.gain > 0.1


def test_cuts_that_were_asked_for_are_kept_and_pipelines_that_were_not_are_none() -> None:
    both, objective = facts(fast=2, slow=2), Objective(slo_s=0.03, max_batch=8, cuts=(2,))
    cut = played(planned(FAST, objective), FAST, objective, FIND, replace(HASTY, most=3_000)).plan
    assert {split.start for split in cut.splits} == {0, 2}
    one = played(planned(FAST, TIGHT), both, TIGHT, lambda *_: None, replace(HASTY, most=3_000), apart=False)
    assert not one.plan.beside


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        (Objective(), FAST),
        (replace(TIGHT, goal="latency"), FAST),
        (replace(TIGHT, goodput_per_s=10.0), FAST),
        (replace(TIGHT, cost_per_hour=100.0), FAST),
        (TIGHT, replace(FAST, pessimistic=FAST.survival)),
        (replace(TIGHT, slo_s=60.0), FAST),
    ],
)
def test_what_playing_does_not_tell_or_what_would_take_long_is_not_played(
    objective: Objective, problem: Problem
) -> None:
    assert is_playable(TWO, FAST, TIGHT)
    assert not is_playable(TWO, problem, objective)
