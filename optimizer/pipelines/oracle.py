"""The goodput that no system exceeds, and a problem without the costs of hand-overs, for upper bounds."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog

from isobatch.optimizer.problem import Problem

MANY = 100  # times the devices: as many as lift the restriction of few devices
FREE_BYTES_PER_S = 1e18  # bytes per second of a link that costs nothing


def without_hand_overs(facts: Problem) -> Problem:
    """The same problem with links that cost nothing."""
    links = {
        ends: replace(link, bytes_per_s=FREE_BYTES_PER_S, latency_s=0.0, turn_s=0.0)
        for ends, link in facts.links.items()
    }
    return replace(facts, links=links)


def oracle_per_s(facts: Problem, slo_s: float, max_batch: int) -> float:
    """The goodput that no system exceeds: every input pays for its blocks only, in the best batch that the SLO allows.

    Ramps, launches, links, queues and the arrival of inputs cost nothing, and any block runs on any device. A linear
    program assigns blocks to kinds: rate * survival[k] inputs reach block k, and no kind exceeds its time.
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
    """By block: the time of one input in the best batch that ends within the SLO after the fastest way to the block."""
    sizes = np.arange(1, min(max_batch, facts.tables[kind].largest) + 1)
    times_s = facts.tables[kind].block_times_s(sizes)
    fastest_s = np.min([table.block_times_s(1) for table in facts.tables], axis=0)
    for block in range(facts.num_blocks):
        fits = times_s[:, block] + fastest_s[:block].sum() <= slo_s
        yield float((times_s[:, block] / sizes)[fits].min(initial=np.inf))
