"""search(): the best single pipeline, or the best plan found, with a bound on how much better one could be.

Two networks are searched: one with its exits, and one without any. For each, local placements (search/local.py)
and pipelines with hand-overs (search/sweeps.py) compete. Cuts (search/bounds.py) rule out partial plans that cannot
beat the best plan found so far, and nothing else is ruled out, so the last plan is the best, up to the ninth digit.
"""

from dataclasses import replace

import numpy as np

from optimizer.effort import EFFORT, MOST_GAP, SAME, Effort
from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.plan import Plan, Promise
from optimizer.problem import Problem
from optimizer.search.bounds import Cut, Floats
from optimizer.search.sweeps import Found, Search


def search(
    facts: Problem, objective: Objective, gap: float = 0.0, below: float = np.inf, prove: bool = True,
    effort: Effort = EFFORT,
) -> Plan | None:  # fmt: skip
    """The best plan, or None when no plan of a value below `below` satisfies the objective."""
    pipelines = Search(facts, objective, effort)
    best, bound = _best(pipelines, below, gap, prove)
    bounds = [bound]
    if min(map(min, facts.survivals)) < 1:
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
    promise = Promise(score.goodput_per_s, score.latency_s, score.cost_per_hour, loss if loss > 2 * SAME else 0.0)
    return replace(best.plan, promise=promise)


def _best(pipelines: Search, below: float, gap: float, prove: bool) -> tuple[Found | None, float]:
    """The better of local placements and hand-overs, and a bound on both.

    On one kind local placements come first, because they are found quickly and are usually good.
    """
    if not prove:
        return pipelines.best(below, gap, prove)
    first = pipelines.local(below) if len(pipelines.facts.devices) == 1 else None
    found, bound = pipelines.best(first.value if first else below, gap)
    found = found or first
    last = pipelines.local(found.value if found else below) if first is None else None
    return last or found, min(bound, last.value if last else bound, first.value if first else bound)


def least_without_exits(facts: Problem, objective: Objective, at: Cut) -> float:
    """A bound on plans without exits at these multipliers: every block by itself, where and as it is cheapest."""
    cheapest_s = at.mu[:, None] * cheapest_blocks_s(facts, objective)
    return float(cheapest_s.min(axis=0).sum()) - at.offset


def cheapest_blocks_s(facts: Problem, objective: Objective) -> Floats:
    """Kinds x blocks: the least device seconds that a block takes of an input, at the batch that suits it best."""
    sizes = [np.arange(1, min(objective.batches[1], table.largest) + 1) for table in facts.tables]
    times_s = [table.block_times_s(size) / size[:, None] for table, size in zip(facts.tables, sizes, strict=True)]
    return np.array([each_s.min(axis=0) for each_s in times_s])
