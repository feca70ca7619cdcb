"""optimize(): the best plan, by dynamic programming over cuts, with every other choice inside.

    best = min over whole plans x of value(loads(x), latency(x)),   whole plans = labels(L) of optimizer/labels.py

where a plan is a path 0 = b0 < b1 < ... = L of options (kind, batch size, ramps inside or not), `loads` sums seconds of
device per arriving input by placement, and a placement of m replicas sustains m / load. Two graphs are searched: the
network with its exits, and without any. Cuts (optimizer/bounds.py) rule out partial plans that cannot beat the best
plan found so far; nothing else is ruled out, so what remains at the end is the best, up to the ninth digit.
"""

from dataclasses import replace

import numpy as np

from optimizer.bounds import Cut
from optimizer.evaluate import evaluate
from optimizer.graph import CLOSE, Found, Graph
from optimizer.objective import Objective
from optimizer.plan import Plan, Promise
from optimizer.problem import Problem


def search(
    facts: Problem, objective: Objective, gap: float = 0.0, below: float = np.inf, prove: bool = True
) -> Plan | None:
    """The best plan, or None when no plan keeps what the objective asks, at a value below `below`."""
    graph = Graph(facts, objective)
    best, bound = _best(graph, below, gap, prove)
    bounds = [bound]
    if prove and min(map(min, facts.survivals)) < 1:
        value = best.value if best else below
        bounds.append(least_without_exits(facts, objective, graph.cuts[-1]))
        if best is None or bounds[-1] < value / (1 + gap):
            better, bounds[-1] = _best(Graph(facts.without_exits, objective), value, gap, prove)
            best = better or best
    if best is None:
        return None
    score = evaluate(best.plan, facts, objective)
    loss = max(0.0, float(best.value / min(*bounds, best.value)) - 1) if best.value else 0.0
    promise = Promise(score.goodput_per_s, score.latency_s, score.cost_per_hour, loss if loss > 2 * CLOSE else 0.0)
    return replace(best.plan, promise=promise)


def _best(graph: Graph, below: float, gap: float, prove: bool) -> tuple[Found | None, float]:
    """Of rounds and of pipelines, and a bound on both. On one kind rounds come first: they are soon known, and good."""
    if not prove:
        return graph.best(below, gap, prove)
    first = graph.local(below) if len(graph.facts.devices) == 1 else None
    found, bound = graph.best(first.value if first else below, gap)
    found = found or first
    last = graph.local(found.value if found else below) if first is None else None
    return last or found, min(bound, last.value if last else bound, first.value if first else bound)


def least_without_exits(facts: Problem, objective: Objective, prices: Cut) -> float:
    """A bound on plans without exits at these prices: every block by itself, where and as it is cheapest."""
    cheapest = []
    for mu, table in zip(prices.mu, facts.tables, strict=True):
        batches = np.arange(1, min(objective.max_batch, table.batch_sizes[-1]) + 1)
        cheapest.append(mu * (table.block_times_s(batches) / batches[:, None]).min(axis=0))
    return float(np.min(cheapest, axis=0).sum()) - prices.offset
