"""Claim: the simulator is fast, its memory does not grow, and it is near the live graph (`experiments/fidelity`).

It also simulates the paper's two fleets at batches of 8.
"""

import resource
import time
from collections.abc import Callable, Iterator

import numpy as np

from experiments.fidelity import run as fidelity
from experiments.shared.gains import GAP, MIXED, ONE_KIND, PaperFleet, baseline_plan
from isobatch.cluster.load.workloads import Floats, Ints, arrivals, exit_blocks
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.cluster.simulator.sustained import sustained_per_s
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS
from isobatch.optimizer.pipelines.batch_gain import oracle_per_s
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.exits import ExitProfile

BATCH = 8
LOAD = 0.9  # of what the plan promises
REQUESTS, PIECES = 10_000_000, 100


def measure(parts: str = "speed,ratios,fidelity", requests: int = REQUESTS) -> dict[str, float]:
    """`requests`: of the part that measures the simulator's own speed."""
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "speed": lambda: speed(requests),
        "ratios": ratios,
        "fidelity": fidelity.measure,
    }
    return {name: value for part in parts.split(",") for name, value in measures[part]().items()}


def ratios() -> dict[str, float]:
    """What our plans sustain on E3's two fleets at one batch size, over the baselines."""
    one, mixed = _sustained(ONE_KIND), _sustained(MIXED)
    return {
        "ratio_naive_homogeneous": one[""] / one[EARLY_EXIT],
        "ratio_stock_homogeneous": one[""] / one[NO_EXITS],
        "ratio_best_heterogeneous": mixed[""] / max(mixed[EARLY_EXIT], mixed[NO_EXITS]),
        "share_of_oracle": one[""] / oracle_per_s(ONE_KIND.facts, ONE_KIND.slo_s, BATCH),
    }


def _sustained(fleet: PaperFleet) -> dict[str, float]:
    """Inputs a second by the name of each baseline, and ours by none."""
    facts, objective = fleet.facts, Objective(slo_s=fleet.slo_s, max_batch=BATCH)
    ours = side_by_side(facts, objective, GAP)
    assert ours, "This is a bug: these fleets have a plan."
    plans = {"": ours} | {name: baseline_plan(name, facts, objective) for name in (EARLY_EXIT, NO_EXITS)}
    return {name: sustained_per_s(plan, facts, fleet.slo_s) for name, plan in plans.items()}


def speed(requests: int) -> dict[str, float]:
    """The plain case: one split without ramps on 16 devices, Poisson arrivals at 90 % of its capacity."""
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
        "peak_mb_grown": (peaks[-1] - peaks[1]) / 1024,  # once all kinds of things have been allocated once
    }


def _inputs(rate: float, requests: int, profile: ExitProfile, peaks: list[int]) -> Iterator[tuple[Floats, Ints]]:
    """Poisson arrivals piece by piece, so that they are never in memory all at once."""
    seconds = requests / PIECES / rate
    for piece in range(PIECES):
        times_s = piece * seconds + arrivals("poisson", rate, seconds, seed=piece)
        yield times_s, exit_blocks(profile, len(times_s), np.random.default_rng([piece, 1]))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
