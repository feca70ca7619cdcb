"""Simple plans to begin a search with: a search by small changes leaves no plateau, so it begins at many places.

They are the baselines at their best batch sizes, the baselines at one batch size after the other (1, 2, 4, ...), and
every kind of devices apart with one cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from isobatch.optimizer.effort import never
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import baselines
from isobatch.optimizer.pipelines.spread import best_of, spread
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search

MOST_CUTS = 12  # blocks before which one cut is tried, evenly spaced
GAP = 0.03  # of the plans with one cut


def starts(
    facts: Problem, objective: Objective, limits: Sequence[float], out_of_time: Callable[[], bool] = never
) -> Iterator[Plan]:
    """Different simple plans, without promises. `limits`: of the estimated latency, as shares of the SLO."""
    known = set[Plan]()
    for plan in _all(facts, objective, limits, out_of_time):
        if plan and (bare := replace(plan, promise=None)) not in known:
            known.add(bare)
            yield bare


def _all(
    facts: Problem, objective: Objective, limits: Sequence[float], out_of_time: Callable[[], bool]
) -> Iterator[Plan | None]:
    loosest = objective.within(max(limits))
    fixed = [replace(loosest, fixed_batch=size) for size in batch_sizes(facts, objective)]
    for limited in (objective, *map(objective.within, limits), *fixed):
        yield from (each.plan for each in baselines(facts, limited))
    if not out_of_time():
        yield spread(facts, objective, _cut_once)


def batch_sizes(facts: Problem, objective: Objective) -> Iterator[int]:
    """Batch sizes that double, up to the largest that every kind runs."""
    least, most = objective.batches
    size, largest = least, min(most, *(table.largest for table in facts.tables))
    while size <= largest:
        yield size
        size *= 2


def _cut_once(facts: Problem, objective: Objective) -> Plan | None:
    """The best plan of one kind with one cut."""
    step = max(1, -(-(facts.num_blocks - 1) // MOST_CUTS))
    cuts = range(1, facts.num_blocks, step)
    plans = [search(facts, replace(objective, cuts=(cut,)), GAP) for cut in cuts]
    return best_of(plans, facts, objective)
