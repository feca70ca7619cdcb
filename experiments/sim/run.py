"""How fast the simulator is, whether its memory grows, what it says of the paper's two fleets at batches of 8, and how
far it is from the live graph (`experiments/fidelity`)."""

import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from experiments import gains
from experiments.baselines import stock
from experiments.fidelity import run as fidelity
from experiments.gains import Suite
from experiments.heterogeneous.suite import SUITE as MIXED
from experiments.homogeneous.suite import SUITE as ONE_KIND
from experiments.simulator import World, simulate
from experiments.workloads import Floats, Ints, arrivals, exit_blocks
from optimizer.evaluate import evaluate
from profiles.exits import ExitProfile

BATCH = 8
LOAD = 0.9  # of what the plan promises
REQUESTS, PIECES = 10_000_000, 100


def measure() -> dict[str, float]:
    one, mixed = (gains.measure(replace(suite, batches=(BATCH,))) for suite in (ONE_KIND, MIXED))
    return {
        **speed(ONE_KIND),
        "ratio_naive_homogeneous": gains.ratio(one, BATCH, "early exit"),
        "ratio_stock_homogeneous": gains.ratio(one, BATCH, "no exits"),
        "ratio_best_heterogeneous": min(gains.ratio(mixed, BATCH, each) for each in ("early exit", "no exits")),
        "share_of_oracle": next(row.share_of_oracle for row in one if row.system == "isobatch"),
        **fidelity.measure(),
    }


def speed(suite: Suite) -> dict[str, float]:
    """The plain case: one split without ramps on 16 devices, Poisson arrivals at 90 % of its capacity."""
    facts = suite.network.facts(suite.devices, suite.dtype)
    world = World(stock(facts, BATCH), facts, suite.slo_s)
    rate = LOAD * evaluate(world.plan, facts).goodput_per_s
    peaks: list[int] = []
    wall_s, core_s = time.perf_counter(), time.process_time()
    report = simulate(world, _inputs(rate, ExitProfile(facts.survival), peaks), REQUESTS / rate)
    wall_s, core_s = time.perf_counter() - wall_s, time.process_time() - core_s
    return {
        "requests_per_s": report.arrived / wall_s,
        "requests_per_core_s": report.arrived / core_s,
        "peak_mb": peaks[-1] / 1024,
        "peak_mb_grown": (peaks[-1] - peaks[1]) / 1024,  # once all kinds of things have been allocated once
    }


def _inputs(rate: float, profile: ExitProfile, peaks: list[int]) -> Iterator[tuple[Floats, Ints]]:
    """Poisson arrivals piece by piece, so that they are never in memory all at once."""
    seconds = REQUESTS / PIECES / rate
    for piece in range(PIECES):
        times_s = piece * seconds + arrivals("poisson", rate, seconds, seed=piece)
        yield times_s, exit_blocks(profile, len(times_s), np.random.default_rng([piece, 1]))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
