"""Claim: the simulator is fast, its memory does not grow, and it predicts the live server (`experiments/fidelity`).

The first part simulates ten million requests to one split on 16 devices, on one core. The second part compares six
plans on virtual devices, live and simulated, with the same arrivals.
"""

import resource
import time
from collections.abc import Callable, Iterator

import numpy as np

from experiments.fidelity import run as fidelity
from experiments.shared.gains import ONE_KIND, baseline_plan
from isobatch.cluster.load.workloads import Floats, Ints, arrivals, exit_blocks
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS
from isobatch.profiles.exits import ExitProfile

BATCH = 8
LOAD = 0.9  # of what the plan promises
REQUESTS, PIECES = 10_000_000, 100


def measure(parts: str = "speed,fidelity", requests: int = REQUESTS) -> dict[str, float]:
    """`requests`: those of the part `speed`."""
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "speed": lambda: speed(requests),
        "fidelity": fidelity.measure,
    }
    return {name: value for part in parts.split(",") for name, value in measures[part]().items()}


def speed(requests: int) -> dict[str, float]:
    """A simple case: one split without ramps on 16 devices, Poisson arrivals at 90 % of its goodput."""
    facts = ONE_KIND.facts
    world = World(baseline_plan(NO_EXITS, facts, Objective(fixed_batch=BATCH)), facts, ONE_KIND.slo_s)
    rate = LOAD * evaluate(world.plan, facts).goodput_per_s
    peaks: list[int] = []
    wall_s, core_s = time.perf_counter(), time.process_time()
    report = simulate(world, _inputs(rate, requests, ExitProfile(facts.survival), peaks), requests / rate)
    wall_s, core_s = time.perf_counter() - wall_s, time.process_time() - core_s
    return {
        "requests_per_s": report.arrived / wall_s,
        "requests_per_core_s": report.arrived / core_s,
        "peak_mb": peaks[-1] / 1024,
        "peak_mb_grown": (peaks[-1] - peaks[1]) / 1024,  # after the first pieces have allocated their memory
    }


def _inputs(rate: float, requests: int, profile: ExitProfile, peaks: list[int]) -> Iterator[tuple[Floats, Ints]]:
    """Poisson arrivals in pieces, so that memory never holds all of them."""
    seconds = requests / PIECES / rate
    for piece in range(PIECES):
        times_s = piece * seconds + arrivals("poisson", rate, seconds, seed=piece)
        yield times_s, exit_blocks(profile, len(times_s), np.random.default_rng([piece, 1]))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
