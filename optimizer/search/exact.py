"""search(): the best single pipeline, or a good one with a bound on how much better a plan could be.

The network is searched with its exits, and without any. For each, local placements (search/local_placements.py) and
pipelines with hand-overs (search/sweeps.py) compete. Cuts (search/bounds.py) rule out only partial plans that cannot
beat the best plan so far, so the last plan is the best, up to the ninth digit.
"""

from dataclasses import replace

import numpy as np

from isobatch.optimizer.effort import EFFORT, MOST_GAP, SAME, Effort, Floats
from isobatch.optimizer.goals.relaxation import Cut
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.sweeps import Search, ValuedPlan


def search(
    facts: Problem, objective: Objective, gap: float = 0.0, below: float = np.inf, prove: bool = True,
    effort: Effort = EFFORT,
) -> Plan | None:  # fmt: skip
    """The best plan; None when no plan with a value below `below` satisfies the objective."""
    pipelines = Search(facts, objective, effort)
    best, bound = _best(pipelines, below, gap, prove)
    bounds = [bound]
    if min(facts.survival) < 1:
        value = best.value if best else below
        bounds.append(least_without_exits(facts, objective, pipelines.cuts[-1]))
        if best is None or (bounds[-1] < value / (1 + gap) and not effort.out_of_time()):
            better, bounds[-1] = _best(Search(facts.without_exits, objective, effort), value, gap, prove)
            best = better or best
    if best is None:
        return None
    score = evaluate(best.plan, facts, objective)
    least = max(min(*bounds, best.value), 1e-300)
    loss = min(float(best.value / least) - 1, MOST_GAP) if best.value else 0.0
    return replace(best.plan, promise=score.promise(loss if loss > 2 * SAME else 0.0))


def _best(pipelines: Search, below: float, gap: float, prove: bool) -> tuple[ValuedPlan | None, float]:
    """The better of local placements and pipelines with hand-overs, and a bound on both.

    On a single kind, local placements come first, because they are searched quickly and are usually good. Among several
    devices a pipeline with hand-overs wins within `gap`: any device fills its batches, where a local placement fills
    those of each device by itself, which the estimates do not count.
    """
    if not prove:
        return pipelines.best(below, gap, prove)
    devices = pipelines.facts.devices
    nearly = 1 + max(gap, 2 * SAME) if sum(device.count for device in devices) > 1 else 1.0
    first = pipelines.local(below) if len(devices) == 1 else None
    best, bound = pipelines.best(min(below, nearly * first.value) if first else below, gap)
    best = best or first
    last = pipelines.local(best.value / nearly if best else below) if first is None else None
    if best and first is None and last is None and gap > 2 * SAME:
        bound = min(bound, best.value / nearly)  # only much better local placements were sought
    return last or best, min(bound, last.value if last else bound, first.value if first else bound)


def least_without_exits(facts: Problem, objective: Objective, at: Cut) -> float:
    """A bound on plans without exits at these multipliers: every block by itself, on its cheapest kind and batch."""
    cheapest_s = at.mu[:, None] * cheapest_blocks_s(facts, objective)
    return float(cheapest_s.min(axis=0).sum()) - at.offset


def cheapest_blocks_s(facts: Problem, objective: Objective) -> Floats:
    """Kinds x blocks: the least device seconds of a block per input, at its best batch."""
    sizes = [np.arange(1, min(objective.batches[1], table.largest) + 1) for table in facts.tables]
    times_s = [table.block_times_s(size) / size[:, None] for table, size in zip(facts.tables, sizes, strict=True)]
    return np.array([each_s.min(axis=0) for each_s in times_s])
