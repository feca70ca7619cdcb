"""What one would run without isobatch, as plans for the same simulator, and the bound that nothing can beat.

Kinds of devices work side by side: each runs the whole network and takes a share of the inputs (`Plan.beside`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
from scipy.optimize import linprog

from optimizer.evaluate import evaluate
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem


def stock(facts: Problem, batch: int) -> Plan:
    """The network without exits."""
    return _side_by_side(facts, lambda alone: _whole(alone, batch, ()))


def naive(facts: Problem, batch: int) -> Plan:
    """Early exit as it is: one split, whose batch shrinks at every ramp."""
    ramps = tuple(sorted(ramp for ramp in facts.ramp_blocks if _leave(facts, ramp)))
    return _side_by_side(facts, lambda alone: _whole(alone, batch, ramps))


def serial(facts: Problem, batch: int, cuts: int = 2) -> Plan:
    """Constant batches without model parallelism: splits take turns on every device; the best of up to `cuts` cuts."""
    at = [ramp + 1 for ramp in sorted(facts.ramp_blocks) if _leave(facts, ramp)]
    ways = [way for count in range(cuts + 1) for way in combinations(at, count)]

    def best(alone: Problem) -> Plan:
        return max((_in_turns(alone, batch, way) for way in ways), key=lambda plan: evaluate(plan, alone).goodput_per_s)

    return _side_by_side(facts, best)


def oracle_per_s(facts: Problem, slo_s: float, max_batch: int) -> float:
    """No system serves more: every input pays for the blocks it needs, always in the best batch that the SLO allows.

    Ramps, launches, links, queues and the arrival of inputs cost nothing; any block runs on any device. How much of
    which block runs where is a linear program: rate * survival[k] inputs come to block k, and no kind is over its time.
    """
    cost_s = np.array([list(_each_s(facts, kind, slo_s, max_batch)) for kind in range(len(facts.devices))])
    kinds, blocks = cost_s.shape
    rate = np.append(np.zeros(kinds * blocks), -1.0)  # variables: inputs per second by kind and block, then the rate
    reach = np.hstack([np.tile(np.eye(blocks), kinds), -np.array(facts.survival)[:, None]])
    busy = np.zeros((kinds, kinds * blocks + 1))
    for kind in range(kinds):
        busy[kind, kind * blocks : (kind + 1) * blocks] = np.where(np.isfinite(cost_s[kind]), cost_s[kind], 1e6)
    counts = [device.count for device in facts.devices]
    return float(-linprog(rate, busy, counts, reach, np.zeros(blocks)).fun)


def _each_s(facts: Problem, kind: int, slo_s: float, max_batch: int) -> Iterator[float]:
    """By block: what one input costs in the best batch that ends within the SLO after the fastest way there."""
    sizes = np.arange(1, min(max_batch, facts.tables[kind].batch_sizes[-1]) + 1)
    times_s = facts.tables[kind].block_times_s(sizes)
    fastest_s = np.min([table.block_times_s(1) for table in facts.tables], axis=0)
    for block in range(facts.num_blocks):
        fits = times_s[:, block] + fastest_s[:block].sum() <= slo_s
        yield float((times_s[:, block] / sizes)[fits].min(initial=np.inf))


def _leave(facts: Problem, ramp: int) -> bool:
    return facts.survival[ramp + 1] < facts.survival[ramp]


def _side_by_side(facts: Problem, plan: Callable[[Problem], Plan]) -> Plan:
    first, *others = (plan(facts.with_devices((device,))) for device in facts.devices)
    return replace(first, beside=tuple(others))


def _whole(alone: Problem, batch: int, ramps: tuple[int, ...]) -> Plan:
    (device,) = alone.devices
    return Plan((Placement(device.kind, device.count, (Split(0, alone.num_blocks, batch, ramps),)),))


def _in_turns(alone: Problem, batch: int, cuts: tuple[int, ...]) -> Plan:
    (device,) = alone.devices
    edges = zip((0, *cuts), (*cuts, alone.num_blocks), strict=True)
    splits = tuple(Split(a, b, batch, (b - 1,) if b < alone.num_blocks else ()) for a, b in edges)
    return Plan((Placement(device.kind, device.count, splits, local=True),))
