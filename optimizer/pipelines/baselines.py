"""Plans without a planner: baselines, over which every plan reports its gain, and simple plans to begin a search with.

Every baseline is an ordinary plan: kinds side by side, each with the whole network at its best batch size, or at the
batch size that the objective fixes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from isobatch.optimizer.effort import SAME, Floats, never
from isobatch.optimizer.model.evaluate import Score, evaluate
from isobatch.optimizer.model.valuation import Valuation
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.spread import Planner, best_of, spread
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem, split_with_ramps
from isobatch.optimizer.search.exact import search
from isobatch.optimizer.search.options import Builder
from isobatch.profiles.errors import UserError

MOST_CUTS = 12  # blocks before which one cut is tried, evenly spaced
GAP = 0.03  # of the plans with one cut


@dataclass(frozen=True)
class Baseline:
    """A baseline by its name. `plan` is None where no batch size keeps the limits."""

    name: str
    plan: Plan | None
    score: Score | None


def baselines(facts: Problem, objective: Objective) -> tuple[Baseline, ...]:
    """The network without exits, with all its ramps at shrinking batches, and E3 without model parallelism."""
    return tuple(baseline(name, facts, objective) for name in PLANNERS)


def baseline(name: str, facts: Problem, objective: Objective) -> Baseline:
    """One baseline. It need not reach the goodput of the objective, unless the goal is to reach it."""
    if not objective.aim.at_given_goodput:
        objective = replace(objective, goodput_per_s=0.0)
    plan = spread(facts, objective, PLANNERS[name])
    return Baseline(name, plan, evaluate(plan, facts, objective) if plan else None)


def no_later(facts: Problem, objective: Objective) -> Objective:
    """The same objective with an SLO at which no answer takes longer than without exits (PAME, 2024)."""
    stock = baseline(NO_EXITS, facts, objective).score
    if stock is None:
        raise UserError("--no-later: without exits these devices cannot keep the limits, so there is no time to keep")
    return replace(objective, slo_s=stock.latency_s * (1 + SAME), slack=0.0)  # within the SLO and slack of `objective`


@dataclass(frozen=True)
class Ways:
    """Ways to run the whole network on one kind, as arrays; `splits(i)` gives those of way i."""

    load_s: Floats
    work_s: Floats
    first: Floats  # the batch that fills from outside
    splits: Callable[[int], tuple[Split, ...]]
    local: bool


def _best_of(ways: Callable[[Problem, Objective], Ways]) -> Planner:
    """A planner that takes the best of the ways that `ways` returns."""

    def planner(facts: Problem, objective: Objective) -> Plan | None:
        choices, valuation = ways(facts, objective), Valuation(facts, objective, (0,))
        arrivals = 2 * choices.first - 1  # to fill a batch, and between two launches
        values = valuation.of_one_placement(0, choices.load_s, choices.work_s, arrivals)
        if not np.isfinite(values).any():
            return None
        best = int(values.argmin())
        staffing = valuation.staffed(choices.load_s[[best]], choices.work_s[best], arrivals[best])
        if staffing is None:
            return None
        return Plan((Placement(facts.devices[0].kind, staffing.replicas[0], choices.splits(best), choices.local),))

    return planner


def _naive(facts: Problem, objective: Objective) -> Ways:
    shares = pairwise(facts.survival)
    return _whole(facts, objective, tuple(block for block, (share, behind) in enumerate(shares) if behind < share))


def _without_exits(facts: Problem, objective: Objective) -> Ways:
    return _whole(facts.without_exits, objective, ())


def _whole(facts: Problem, objective: Objective, ramps: tuple[int, ...]) -> Ways:
    """The network as one split at every batch size, even across the edges of a cascade."""
    options = Builder(replace(facts, edges=()), objective.batches, np.inf, pruned=False).starting(0)
    options = options.only((options.stop == facts.num_blocks) & (options.inner == bool(ramps)))
    return Ways(
        options.load_s[0], options.work_s[0], options.batch.astype(float),
        lambda i: (Split(0, facts.num_blocks, int(options.batch[i]), ramps),), local=False,
    )  # fmt: skip


def _serial(facts: Problem, objective: Objective) -> Ways:
    """Splits of one size that take turns on every device, with survivors staying there, where they fit into memory.

    For every batch and every block at which the last split may start: the lightest splits up to that block.
    """
    builder, blocks = Builder(facts, objective.batches, np.inf), facts.num_blocks
    loads, arrivals = zip(*(builder.still(start) for start in range(blocks)), strict=True)
    before = np.full((blocks + 1, len(arrivals[0])), np.inf)  # by block and batch
    came, waited = np.zeros(before.shape, int), np.zeros_like(before)  # `waited`: for the most arrivals of any split
    memory = builder.memory.of_any_cut(np.arange(1, before.shape[1] + 1)[:, None])[:, 0]
    before[0] = np.where(memory <= builder.memory.capacity[0], 0.0, np.inf)
    for start in range(blocks):
        grown, behind = before[start] + loads[start][0].T, before[start + 1 :]
        lighter = grown < behind
        came[start + 1 :][lighter] = start
        waited[start + 1 :] = np.where(lighter, np.maximum(waited[start], arrivals[start]), waited[start + 1 :])
        np.minimum(behind, grown, out=behind)
    ends = np.stack([before[start] + loads[start][0][:, -1] for start in range(blocks)])
    last, batch = np.nonzero(np.isfinite(ends))

    def splits(i: int) -> tuple[Split, ...]:
        edges, size = [blocks, int(last[i])], int(batch[i])
        while edges[-1]:
            edges.append(int(came[edges[-1], size]))
        return tuple(split_with_ramps(facts, a, b, size + 1, inner=False) for b, a in pairwise(edges))[::-1]

    most = np.maximum(waited[:-1], np.stack(arrivals))
    work = most[last, batch] * ends[last, batch]
    return Ways(ends[last, batch], work, (batch + 1).astype(float), splits, local=True)


NO_EXITS = "no exits"
EARLY_EXIT = "early exit, shrinking batches"
SERIAL = "serial E3, one device at a time"
PLANNERS: dict[str, Planner] = {
    NO_EXITS: _best_of(_without_exits),
    EARLY_EXIT: _best_of(_naive),
    SERIAL: _best_of(_serial),
}


def starts(
    facts: Problem, objective: Objective, limits: Sequence[float], out_of_time: Callable[[], bool] = never
) -> Iterator[Plan]:
    """Simple plans, without promises: a search by small changes leaves no plateau, so it begins at many places.

    They are the baselines at their best batch sizes, the baselines at sizes 1, 2, 4, ..., and
    every kind of devices apart with one cut. `limits`: of the estimated latency, as shares of the SLO.
    """
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
    step = max(1, -(-(facts.num_blocks - 1) // MOST_CUTS))
    cuts = range(1, facts.num_blocks, step)
    plans = [search(facts, replace(objective, cuts=(cut,)), GAP) for cut in cuts]
    return best_of(plans, facts, objective)
