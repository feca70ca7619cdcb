"""Claim: the simulator is fast, its memory does not grow, and it is near the live graph (`experiments/fidelity`).

It also simulates the paper's two fleets at batches of 8.
"""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from experiments.fidelity import run as fidelity
from experiments.heterogeneous.run import FIGURE as MIXED
from experiments.homogeneous.run import FIGURE as ONE_KIND
from experiments.shared import gains
from experiments.shared.gains import PaperFigure, baseline_plan
from isobatch.cluster.load.workloads import Floats, Ints, arrivals, exit_blocks
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS
from isobatch.profiles.exits import ExitProfile

BATCH = 8
LOAD = 0.9  # of what the plan promises
REQUESTS, PIECES = 10_000_000, 100


def measure(parts: str = "speed,ratios,fidelity", requests: int = REQUESTS) -> dict[str, float]:
    """`requests`: of the part that measures the simulator's own speed."""
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "speed": lambda: speed(ONE_KIND, requests),
        "ratios": ratios,
        "fidelity": fidelity.measure,
    }
    return {name: value for part in parts.split(",") for name, value in measures[part]().items()}


def ratios() -> dict[str, float]:
    """What the paper's two fleets sustain at one batch size, beside the baselines."""
    one, mixed = (gains.measure(replace(claim, batches=(BATCH,))) for claim in (ONE_KIND, MIXED))
    return {
        "ratio_naive_homogeneous": gains.ratio(one, BATCH, "early exit"),
        "ratio_stock_homogeneous": gains.ratio(one, BATCH, "no exits"),
        "ratio_best_heterogeneous": min(gains.ratio(mixed, BATCH, each) for each in ("early exit", "no exits")),
        "share_of_oracle": next(row.share_of_oracle for row in one if row.system == "isobatch"),
    }


def speed(claim: PaperFigure, requests: int) -> dict[str, float]:
    """The plain case: one split without ramps on 16 devices, Poisson arrivals at 90 % of its capacity."""
    facts = claim.network.facts(claim.devices, claim.dtype)
    world = World(baseline_plan(NO_EXITS, facts, Objective(fixed_batch=BATCH)), facts, claim.slo_s)
    rate = LOAD * evaluate(world.plan, facts).goodput_per_s
    peaks: list[int] = []
    wall_s, core_s = time.perf_counter(), time.process_time()
    report = simulate(world, _inputs(rate, requests, ExitProfile(facts.survival), peaks), requests / rate)
    wall_s, core_s = time.perf_counter() - wall_s, time.process_time() - core_s
    return {
        "requests_per_s": report.arrived / wall_s,
        "requests_per_core_s": report.arrived / core_s,
        "peak_mb": peaks[-1] / 1024,
        "peak_mb_grown": (peaks[-1] - peaks[1]) / 1024,  # once all kinds of things have been allocated once
    }


def _inputs(rate: float, requests: int, profile: ExitProfile, peaks: list[int]) -> Iterator[tuple[Floats, Ints]]:
    """Poisson arrivals piece by piece, so that they are never in memory all at once."""
    seconds = requests / PIECES / rate
    for piece in range(PIECES):
        times_s = piece * seconds + arrivals("poisson", rate, seconds, seed=piece)
        yield times_s, exit_blocks(profile, len(times_s), np.random.default_rng([piece, 1]))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
