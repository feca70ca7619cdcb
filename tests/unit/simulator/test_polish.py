"""Plans that the simulator betters."""

from dataclasses import replace

import pytest

from cluster.simulator.playing import CARE
from cluster.simulator.polish import polished
from cluster.simulator.sustained import sustained
from experiments.planner.random_problems import random_problem
from optimizer.model.evaluate import evaluate
from optimizer.moves import neighbours
from optimizer.objective import Objective
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.plan import Placement, Plan, Split
from profiles.errors import UserError
from tests.helpers.simulated_fleet import BLOCKS, FAST, SLO_S

HASTY = replace(CARE, inputs=300, slos=3, last_inputs=600, last_slos=3, most=30_000)
POOR = Plan((Placement("fast", 4, (Split(0, BLOCKS, 1),)),))


class Few:
    """Time for so many looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_poor_plan_gets_better_and_its_promise_is_what_is_sustained() -> None:
    found = polished(POOR, FAST, Objective(slo_s=0.05, max_batch=8), Few(9), side_by_side, HASTY)
    assert found.after_per_s > 1.2 * found.before_per_s
    assert found.plan.promise is not None
    assert found.plan.promise.goodput_per_s == found.after_per_s
    assert found.plan.promise.gap >= 0
    assert not evaluate(found.plan, FAST).broken


def test_without_time_the_plan_stays_and_is_told_what_it_sustains() -> None:
    found = polished(POOR, FAST, Objective(slo_s=0.05), lambda: True, side_by_side, HASTY)
    assert replace(found.plan, promise=None) == POOR
    assert (found.tried, found.gain) == (0, 0.0)
    assert found.before_per_s == pytest.approx(sustained(POOR, FAST, 0.05, 600, 1, slos=3).goodput_per_s, rel=0.2)


def test_what_has_no_deadline_cannot_be_polished() -> None:
    with pytest.raises(UserError, match="--slo-ms"):
        polished(POOR, FAST, Objective(), lambda: True, side_by_side)


@pytest.mark.parametrize("seed", range(11))
def test_every_neighbour_is_another_plan_that_the_devices_bear(seed: int) -> None:
    facts, objective = random_problem(seed), Objective(slo_s=SLO_S, max_batch=4)
    kind = max(facts.devices, key=lambda each: each.memory_bytes).kind
    middle = facts.num_blocks // 2
    splits = (Split(0, middle, 1), Split(middle, facts.num_blocks, 1)) if middle else (Split(0, facts.num_blocks, 1),)
    plan = Plan((Placement(kind, 1, splits, local=True),))
    found = list(neighbours(plan, facts, objective))
    assert plan not in found
    for each in found:
        assert not evaluate(each, facts).broken
        assert all(1 <= split.batch_size <= 4 for split in each.splits)


def test_one_ramp_of_several_is_a_neighbour_and_given_cuts_stay() -> None:
    plan = Plan((Placement("fast", 4, (Split(0, 4, 8, (0, 1, 2)),)),))
    ramps = {each.ramps for each in neighbours(plan, FAST, Objective(slo_s=SLO_S, cuts=()))}
    assert {(0, 1), (0, 2), (1, 2)} <= ramps
    cut = {tuple(split.start for split in each.splits) for each in neighbours(POOR, FAST, Objective(cuts=()))}
    assert cut == {(0,)}
