"""A search begins at simple plans (baselines, one cut), and goes on to plans that are one change away."""

from dataclasses import replace

import pytest

from experiments.planner.random_problems import random_problem
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.moves import neighbours
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import baselines, batch_sizes, starts
from isobatch.optimizer.plan import Placement, Plan, Split
from tests.helpers.simulated_fleet import BLOCKS, FAST, SLO_S, facts

BOTH = facts(fast=2, slow=3)
OBJECTIVE = Objective(slo_s=0.05, max_batch=8)


def test_all_baselines_are_among_the_starts_whatever_limits_they_have() -> None:
    found = list(starts(BOTH, OBJECTIVE, (1.0, 2.2)))
    assert len(found) == len(set(found))
    for limited in (OBJECTIVE, OBJECTIVE.within(1.0)):
        for each in baselines(BOTH, limited):
            assert each.plan is not None
            assert replace(each.plan, promise=None) in found


def test_every_coarse_batch_size_is_among_the_starts_without_exits_too() -> None:
    assert list(batch_sizes(BOTH, OBJECTIVE)) == [1, 2, 4, 8]
    assert list(batch_sizes(BOTH, Objective(slo_s=0.05, max_batch=64))) == [1, 2, 4, 8], "as far as was measured"
    plain = {sizes_of(plan) for plan in starts(BOTH, OBJECTIVE, (2.2,)) if not any(p.ramps for p in plan.pipelines)}
    assert {(1,), (2,), (4,), (8,)} <= plain


def test_one_cut_is_among_the_starts() -> None:
    cut = [plan for plan in starts(BOTH, OBJECTIVE, (1.0,)) if any(len(each.splits) == 2 for each in plan.pipelines)]
    assert cut
    assert all(plan.num_blocks == BLOCKS for plan in cut)


def sizes_of(plan: Plan) -> tuple[int, ...]:
    return tuple(sorted({split.batch_size for each in plan.pipelines for split in each.splits}))


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
