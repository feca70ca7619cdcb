"""A search begins at simple plans: baselines at several batch sizes, and one cut."""

from dataclasses import replace

from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import baselines, batch_sizes, starts
from isobatch.optimizer.plan import Plan
from tests.helpers.simulated_fleet import BLOCKS, facts

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
