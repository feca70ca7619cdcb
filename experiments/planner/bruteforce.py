"""Every plan of a small problem, one after the other: what "exact" is measured against.

Every set of cuts, every kind and batch size of every split, ramps inside active or not, every way to share placements
among splits of one kind, every number of replicas; with exits and without any. Nothing here is shared with the search
but the cost of one split (optimizer/evaluate.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf

from optimizer import cost
from optimizer.evaluate import Work, work
from optimizer.limits import memory_bytes
from optimizer.objective import Objective
from optimizer.plan import Split
from optimizer.problem import Problem
from profiles.devices import Device

Groups = tuple[tuple[int, ...], ...]


def best_value(facts: Problem, objective: Objective) -> float:
    """The smallest value of any plan, in the units of the goal (see `_value`); infinite when there is none."""
    graphs = [facts, facts.without_exits] if min(facts.survival) < 1 else [facts]
    return min(min(_best_of(graph, objective), _best_local(graph, objective)) for graph in graphs)


def _best_of(facts: Problem, objective: Objective) -> float:
    @cache
    def done(split: Split, kind: str, source: str | None, reach: float) -> Work:
        return work(split, facts, kind, source, reach)

    best = inf
    for path in _paths(facts, objective):
        works, source, reach = [], None, 1.0
        for split, kind in path:
            if source and (source, kind) not in facts.links:
                break
            works.append(done(split, kind, source, reach))
            source, reach = kind, works[-1].survivors
        else:
            best = min(best, _best_replicas(works, facts, objective))
    return best


def _paths(facts: Problem, objective: Objective) -> Iterator[tuple[tuple[Split, str], ...]]:
    blocks = range(1, facts.num_blocks)
    for count in range(facts.num_blocks):
        for cuts in combinations(blocks, count):
            edges = (0, *cuts, facts.num_blocks)
            choices = [list(_choices(a, b, facts, objective)) for a, b in pairwise(edges)]
            yield from product(*choices)


def _best_local(facts: Problem, objective: Objective) -> float:
    """The whole network on one kind, survivors staying where they are, batches of one size inside every split."""
    best = inf
    for path in _paths(facts, objective):
        kinds = {kind for _, kind in path}
        if len(path) > 1 and len(kinds) == 1 and not any(_shrinks(split, facts) for split, _ in path):
            best = min(best, _best_count([split for split, _ in path], facts.device(path[0][1]), facts, objective))
    return best


def _shrinks(split: Split, facts: Problem) -> bool:
    return any(ramp < split.stop - 1 for ramp in split.ramps)


def _best_count(splits: list[Split], device: Device, facts: Problem, objective: Objective) -> float:
    reach, load, longest, held = 1.0, 0.0, 0.0, 0
    for before, split in zip([None, *splits], splits, strict=False):
        here = work(split, facts, device.kind, None, reach)
        held += memory_bytes(split, facts, device.kind)
        if before:
            waiting = before.batch_size + split.batch_size
            held += waiting * facts.table(device.kind).hidden_bytes[split.start - 1]
        load += here.load_s
        longest = max(longest, split.batch_size / reach if reach else 0.0)
        reach = here.survivors
    if held > device.memory_bytes:
        return inf
    best, first = inf, splits[0].batch_size
    for count in range(1, device.count + 1):
        pace = count / load
        latency_s = cost.latency_s(longest * load, first - 1, first, objective.rate_at(pace), pace)
        best = min(best, _value(pace, count * device.price_per_hour, latency_s, objective))
    return best


def _choices(start: int, stop: int, facts: Problem, objective: Objective) -> Iterator[tuple[Split, str]]:
    """A split with its ramps: those at which somebody leaves, all of them or only the one at its end."""
    f, last = facts.survival, stop == facts.num_blocks
    inside = tuple(k for k in range(start, stop) if k + 1 < facts.num_blocks and f[k + 1] < f[k])
    end = () if last or f[stop] == f[start] else (stop - 1,)
    ways = {inside} | ({end} if not end or stop - 1 in facts.ramp_blocks else set())
    for ramps, table in product(ways, facts.tables):
        for batch in range(1, min(objective.max_batch, table.batch_sizes[-1]) + 1):
            yield Split(start, stop, batch, ramps), table.kind


def _best_replicas(works: list[Work], facts: Problem, objective: Objective) -> float:
    work_s = sum(each.felt_s + each.transfer_s for each in works)
    if work_s > objective.budget_s * (1 + 1e-9):
        return inf
    fill, wait = sum(each.fill for each in works), sum(each.wait for each in works)
    best = inf
    for groups in _groupings(works, facts):
        devices = [facts.device(works[group[0]].kind) for group in groups]
        if any(
            _memory(works, group, facts) > device.memory_bytes for group, device in zip(groups, devices, strict=True)
        ):
            continue
        loads = [sum(works[i].load_s for i in group) for group in groups]
        for counts in _counts(devices):
            pace = min(count / load for count, load in zip(counts, loads, strict=True))
            price = sum(count * device.price_per_hour for count, device in zip(counts, devices, strict=True))
            latency_s = cost.latency_s(work_s, fill, wait, objective.rate_at(pace), pace)
            best = min(best, _value(pace, price, latency_s, objective))
    return best


def _counts(devices: list[Device]) -> Iterator[tuple[int, ...]]:
    """Every number of replicas for placements on these devices, as far as the devices go."""
    if not devices:
        yield ()
        return
    first, *rest = devices
    for count in range(1, first.count - sum(device == first for device in rest) + 1):
        left = [replace(device, count=device.count - count) if device == first else device for device in rest]
        for others in _counts(left):
            yield (count, *others)


def _groupings(works: list[Work], facts: Problem) -> Iterator[Groups]:
    """Every way to share placements among splits of one kind."""

    def grow(at: int, groups: Groups) -> Iterator[Groups]:
        if at == len(works):
            yield groups
            return
        if sum(works[group[0]].kind == works[at].kind for group in groups) < facts.device(works[at].kind).count:
            yield from grow(at + 1, (*groups, (at,)))
        for i, group in enumerate(groups):
            if works[group[0]].kind == works[at].kind:
                yield from grow(at + 1, (*groups[:i], (*group, at), *groups[i + 1 :]))

    yield from grow(0, ())


def _memory(works: list[Work], group: tuple[int, ...], facts: Problem) -> int:
    return sum(memory_bytes(works[i].split, facts, works[i].kind) for i in group)


def _value(pace: float, price: float, latency_s: float, objective: Objective) -> float:
    """Seconds per input, dollars per hour, dollars per hour and input per second, or seconds: small is good."""
    allowed = inf if objective.cost_per_hour is None else objective.cost_per_hour
    if pace * (1 + 1e-9) < objective.goodput_per_s or price > allowed * (1 + 1e-9):
        return inf
    if latency_s > objective.budget_s * (1 + 1e-9):
        return inf
    return {"goodput": 1 / pace, "cost": price, "goodput-per-dollar": price / pace, "latency": latency_s}[
        objective.goal
    ]
