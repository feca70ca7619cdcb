"""Plans that are one move away from a plan."""

import pytest

from experiments.planner.random_problems import random_problem
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.moves import neighbours
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Placement, Plan, Split
from tests.helpers.simulated_fleet import BLOCKS, FAST, SLO_S

POOR = Plan((Placement("fast", 4, (Split(0, BLOCKS, 1),)),))


@pytest.mark.parametrize("seed", range(11))
def test_every_neighbour_is_another_plan_that_the_devices_bear(seed: int) -> None:
    facts, objective = random_problem(seed), Objective(slo_s=SLO_S, max_batch=4)
    kind = max(facts.devices, key=lambda each: each.memory_bytes).kind
    middle = facts.num_blocks // 2
    splits = (Split(0, middle, 1), Split(middle, facts.num_blocks, 1)) if middle else (Split(0, facts.num_blocks, 1),)
    plan = Plan((Placement(kind, 1, splits, local=True),))
    moves = list(neighbours(plan, facts, objective))
    assert plan not in moves
    for each in moves:
        assert not evaluate(each, facts).broken
        assert all(1 <= split.batch_size <= 4 for split in each.splits)


def test_one_ramp_of_several_is_a_neighbour_and_given_cuts_stay() -> None:
    plan = Plan((Placement("fast", 4, (Split(0, 4, 8, (0, 1, 2)),)),))
    ramps = {each.ramps for each in neighbours(plan, FAST, Objective(slo_s=SLO_S, cuts=()))}
    assert {(0, 1), (0, 2), (1, 2)} <= ramps
    cut = {tuple(split.start for split in each.splits) for each in neighbours(POOR, FAST, Objective(cuts=()))}
    assert cut == {(0,)}
