"""A small fleet of made-up devices for the simulator."""

from dataclasses import replace

import numpy as np

from isobatch.cluster.simulator.plan_choice import DEFAULT_EFFORT
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.latency import LatencyTable

BLOCKS = 4
SLO_S = 0.2
HASTY = replace(DEFAULT_EFFORT, inputs=500, slos=10, last_inputs=1000, last_slos=10, most=6_000)  # of choosing plans
HASTIER = replace(HASTY, slos=2, last_inputs=500, last_slos=2, most=2_000, cell=20)  # however many come within an SLO


def table(kind: str, slowness: float = 1.0) -> LatencyTable:
    """A batch of 8 takes twice as long as a lone input."""
    rows, sizes = ((0.001 * slowness,) * BLOCKS, (0.002 * slowness,) * BLOCKS), (1000,) * BLOCKS
    ramps = ((0.0001,) * (BLOCKS - 1) + (0.0,),) * 2
    return LatencyTable(kind, (1, 8), rows, ramps, 0.0005, sizes, sizes, "test", stop_s=0.0002)


def facts(**counts: int) -> Problem:
    devices = tuple(Device(kind, count, 10**9, 1.0) for kind, count in counts.items())
    links = {(a, b): Link(a, b, bytes_per_s=1e9, latency_s=0.001) for a in counts for b in counts}
    tables = tuple(table(kind, slowness=1.0 if kind == "fast" else 4.0) for kind in counts)
    return Problem((1.0, 0.7, 0.5, 0.2), tables, devices, links)


FAST = facts(fast=4)
TWO = Plan((Placement("fast", 3, (Split(0, 2, 8, (0, 1)),)), Placement("fast", 1, (Split(2, 4, 8),))))


def one_by_one(world: World, depths: list[int], gap_s: float = 1.0) -> Report:
    times_s = gap_s * np.arange(len(depths), dtype=float)
    return simulate(world, [(times_s, np.array(depths))], seconds=gap_s * len(depths))
