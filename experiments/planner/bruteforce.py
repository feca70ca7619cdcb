"""Tries every plan of a small problem, to test that the planner finds the best one.

It tries every set of cuts, every kind and batch size of every split, ramps inside splits open or closed, every way to
share placements among splits of one kind, every number of replicas, local placements of the whole network on one kind,
and the network with and without exits. With the search it shares only the cost of one split (optimizer/model/work.py)
and the value that a goal gives a plan. Plans with the same cuts on the same kinds are rows of one array.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, pairwise, product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isobatch.optimizer.model.limits import memory_bytes, waiting_bytes
from isobatch.optimizer.model.work import work
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Split
from isobatch.optimizer.problem import Problem

Floats = NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]
SAME = 1e-9


class SplitWays(NamedTuple):
    """All ways to run splits, each on one kind, after a split on a given kind."""

    load_s: Floats
    work_s: Floats
    fill: Floats
    wait: Floats
    memory: Floats
    quiet: Floats  # 1 if the batch keeps its size
    batch: Floats


def best_value(facts: Problem, objective: Objective) -> float:
    """The smallest value of any plan, in the units of the goal; infinite if there is no plan."""
    graphs = [facts, facts.without_exits] if min(facts.survival) < 1 else [facts]
    return min((value for graph in graphs for value in _of_every_way(graph, objective)), default=inf)


def most_side_by_side(facts: Problem, objective: Objective) -> float:
    """The best goodput of any pipelines side by side, each with any number of devices of every kind."""

    @cache
    def alone(counts: tuple[int, ...]) -> float:
        # Kinds without devices stay, since only their tables may have a time for a ramp.
        devices = [replace(each, count=count) for each, count in zip(facts.devices, counts, strict=True)]
        return 1 / best_value(facts.with_devices(devices), replace(objective, goal="goodput"))

    @cache
    def most(counts: tuple[int, ...]) -> float:
        parts = (part for part in product(*(range(count + 1) for count in counts)) if any(part))
        rests = ((part, tuple(count - used for count, used in zip(counts, part, strict=True))) for part in parts)
        return max((alone(part) + most(rest) for part, rest in rests), default=0.0)

    return most(tuple(each.count for each in facts.devices))


def _of_every_way(facts: Problem, objective: Objective) -> Iterator[float]:
    """The best value for every set of cuts and every kind of every split."""
    parts = cache(partial(_parts, facts, objective))
    present = [kind for kind, device in enumerate(facts.devices) if device.count]
    for count in range(facts.num_blocks):
        for cuts in combinations(range(1, facts.num_blocks), count):
            needed = {*facts.edges, *(objective.cuts or ())}
            if not needed <= {*cuts} or (objective.cuts is not None and len(needed) < len(cuts)):
                continue
            edges = tuple(pairwise((0, *cuts, facts.num_blocks)))
            for kinds in product(present, repeat=count + 1):
                ways = zip((None, *kinds), kinds, strict=False)
                here = [parts(*edge, *way) for edge, way in zip(edges, ways, strict=True)]
                if all(each is not None for each in here):
                    yield _handed_over(_combined(here), kinds, facts, objective)  # type: ignore[arg-type]
            for kind in present if count else ():
                still = [parts(*edge, None, kind) for edge in edges]
                yield _local(_combined(still), kind, edges, facts, objective)  # type: ignore[arg-type]


def _parts(facts: Problem, objective: Objective, start: int, stop: int, source: int | None, kind: int) -> Floats | None:
    """The ways to run a split with all useful ramps open, or only its last one, as columns; None if there is no link.

    Rows: as the fields of `SplitWays`.
    """
    f, table, names = facts.survival, facts.tables[kind], [device.kind for device in facts.devices]
    came = None if source is None else names[source]
    if came and (came, names[kind]) not in facts.links:
        return None
    inside = tuple(k for k in range(start, stop) if k + 1 < facts.num_blocks and f[k + 1] < f[k])
    end = () if stop == facts.num_blocks or f[stop] == f[start] else (stop - 1,)
    ramps = {inside} | ({end} if not end or stop - 1 in facts.ramp_blocks else set())
    rows = []
    for batch, here in product(range(objective.batches[0], min(objective.batches[1], table.largest) + 1), ramps):
        split = Split(start, stop, batch, here)
        done = work(split, facts, names[kind], came, f[start])
        memory = memory_bytes(split, facts, names[kind]) + waiting_bytes(split, facts, names[kind], local=False)
        quiet = all(ramp == stop - 1 for ramp in here)
        rows.append((done.load_s, done.felt_s + done.transfer_s, done.fill, done.wait, memory, quiet, batch))
    return np.array(rows, float).T


def _combined(parts: list[Floats]) -> SplitWays:
    """Every combination of the ways of all splits: arrays of combinations x splits."""
    index = np.indices([part.shape[1] for part in parts]).reshape(len(parts), -1)
    return SplitWays(*np.stack([part[:, rows] for part, rows in zip(parts, index, strict=True)], axis=2))


def _handed_over(parts: SplitWays, kinds: tuple[int, ...], facts: Problem, objective: Objective) -> float:
    """The best value with every way to share placements, and every number of replicas."""
    has = tuple(device.count for device in facts.devices)
    memory = np.array([device.memory_bytes for device in facts.devices])
    prices = np.array([device.price_per_hour for device in facts.devices])
    times = (parts.work_s.sum(axis=1), parts.fill.sum(axis=1), parts.wait.sum(axis=1))
    best = inf
    for shares, on, counts in _sharings(kinds, has):
        fits = (parts.memory @ shares <= memory[on]).all(axis=1)
        if fits.any():
            loads, (work_s, fill, wait) = (parts.load_s @ shares)[fits], (each[fits] for each in times)
            goodputs = (counts[:, None] / loads).min(axis=2)
            values = _values(goodputs, (counts @ prices[on])[:, None], work_s, fill, wait, objective)
            best = min(best, float(values.min()))
    return best


def _local(
    parts: SplitWays, kind: int, edges: tuple[tuple[int, int], ...], facts: Problem, objective: Objective
) -> float:
    """The best value of a local placement, where survivors stay on their replica."""
    device, hidden = facts.devices[kind], facts.tables[kind].hidden_bytes
    kept = sum(2 * parts.batch[:, i] * hidden[edges[i][1] - 1] for i in range(len(edges) - 1))  # beyond the last launch
    fits = parts.quiet.all(axis=1) & (parts.memory.sum(axis=1) + kept <= device.memory_bytes)
    reach = np.array([facts.survival[start] for start, _ in edges])
    if not fits.any():
        return inf
    batch, turns_s = parts.batch[fits], facts.turn_s(device.kind) * reach / parts.batch[fits]
    load, first = np.maximum(parts.load_s[fits], turns_s).sum(axis=1), batch[:, 0]
    round_s = (batch[:, reach > 0] / reach[reach > 0]).max(axis=1) * load
    counts = np.arange(1.0, device.count + 1)[:, None]
    values = _values(counts / load, counts * device.price_per_hour, round_s, first - 1, first, objective)
    return float(values.min())


@cache
def _sharings(kinds: tuple[int, ...], has: tuple[int, ...]) -> list[tuple[Floats, list[int], Floats]]:
    """For every way to share: splits x placements, the kind of each placement, and every number of replicas."""
    sharings = []
    for groups in _groupings(kinds, has):
        on = [kinds[group[0]] for group in groups]
        shares = np.array([[split in group for group in groups] for split in range(len(kinds))], float)
        sharings.append((shares, on, np.array(_counts(tuple(on), has), float)))
    return sharings


@cache
def _counts(kinds: tuple[int, ...], has: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every number of replicas for placements of these kinds, as far as the devices go."""
    ranges = (range(1, has[kind] + 1) for kind in kinds)
    return [
        counts
        for counts in product(*ranges)
        if all(sum(c for c, k in zip(counts, kinds, strict=True) if k == kind) <= has[kind] for kind in set(kinds))
    ]


@cache
def _groupings(kinds: tuple[int, ...], has: tuple[int, ...]) -> list[Groups]:
    """Every way to share placements among splits of one kind, as far as the devices go."""
    result: list[Groups] = [()]
    for split, kind in enumerate(kinds):
        result = [
            grown
            for groups in result
            for grown in (
                (*groups, (split,)),
                *((*groups[:i], (*groups[i], split), *groups[i + 1 :]) for i in range(len(groups))),
            )
            if all(kinds[each] == kind for group in grown if split in group for each in group)
        ]
    return [g for g in result if all(sum(kinds[each[0]] == kind for each in g) <= has[kind] for kind in set(kinds))]


def _values(goodput: Floats, price: Floats, work_s: Floats, fill: Floats, wait: Floats, objective: Objective) -> Floats:
    """The values of plans for the goal, the smaller the better; infinite where a limit is broken."""
    latency_s = work_s + (fill + wait) / goodput
    kept = latency_s <= objective.budget_s * (1 + SAME)
    if objective.goodput_per_s:
        kept &= goodput * (1 + SAME) >= objective.goodput_per_s
    if objective.cost_per_hour is not None:
        kept &= price <= objective.cost_per_hour * (1 + SAME)
    return np.where(kept, objective.aim.value(goodput, price, latency_s), inf)
