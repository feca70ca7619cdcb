"""Claim: an arbiter that moves devices between applications answers more in time than devices that are divided once.

In virtual time, six applications with real arrivals on 24 devices, each with the real controller.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.progress import track

from experiments.fleet.bruteforce import agrees
from experiments.fleet.suite import APPLICATIONS, FleetLoad, arbiter_config, member
from isobatch.cluster.controller.arbiter import Arbiter, Budget, FleetDecision, Grant, Standing
from isobatch.cluster.controller.config import ArbiterConfig, Patience
from isobatch.cluster.controller.rehearsal import replan_fleet

PERCENTS = (50, 75, 100)  # of what the devices of each application sustain, on average
FLOOD, FLOOD_TIMES = "base_azure", 10.0
FLOOD_PERCENT = 50
PROBLEMS = 200
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class FleetRun:
    """The answers in time, and the inputs, of each application; the decisions that moved devices."""

    good: Mapping[str, int]
    arrived: Mapping[str, int]
    moves: int
    decisions: int
    decide_s: float


def measure(
    parts: str = "shared,flood,brute", hours: float = 1.0, percents: str = ",".join(map(str, PERCENTS)),
    problems: int = PROBLEMS,
) -> dict[str, float]:  # fmt: skip
    """`percents`: the mean load, of what each application's devices sustain. `problems`: against brute force."""
    loads = [FleetLoad(int(each), float(hours)) for each in str(percents).split(",")]
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "shared": lambda: _shared(loads),
        "flood": lambda: _flooded(FleetLoad(FLOOD_PERCENT, float(hours))),
        "brute": lambda: _brute(problems),
    }
    return {name: value for part in parts.split(",") for name, value in measures[part]().items()}


def _shared(loads: list[FleetLoad]) -> dict[str, float]:
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        asked = [(load, arbitrated) for load in loads for arbitrated in (False, True)]
        runs = dict(zip(asked, cores.map(played_fleet, *zip(*asked, strict=True)), strict=True))
    figures = dict[str, float]()
    for load in loads:
        divided, shared = runs[load, False], runs[load, True]
        gains = {name: shared.good[name] / max(1, divided.good[name]) for name in APPLICATIONS}
        figures |= {
            f"shared_over_divided_{load.percent}": sum(shared.good.values()) / sum(divided.good.values()),
            f"in_time_divided_{load.percent}": sum(divided.good.values()) / sum(divided.arrived.values()),
            f"in_time_shared_{load.percent}": sum(shared.good.values()) / sum(shared.arrived.values()),
            f"worst_application_{load.percent}": min(gains.values()),
            f"moves_{load.percent}": shared.moves,
            f"s_per_division_{load.percent}": shared.decide_s / max(1, shared.decisions),
        }
    ratios = [figures[f"shared_over_divided_{load.percent}"] for load in loads]
    return {"shared_over_divided": float(np.mean(ratios)), **figures}


def _flooded(load: FleetLoad) -> dict[str, float]:
    """The least that a neighbour keeps of its answers in time while another application is flooded."""
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        flood = replace(load, flooded=FLOOD, times=FLOOD_TIMES)
        calm, flooded = cores.map(played_fleet, (load, flood), (True, True))
    kept = {name: flooded.good[name] / max(1, calm.good[name]) for name in APPLICATIONS if name != FLOOD}
    return {
        "flooded_neighbour_kept": min(kept.values()),
        "flooded_neighbours_kept_mean": float(np.mean([*kept.values()])),
    }


def _brute(problems: int) -> dict[str, float]:
    wrong = sum(not agrees(seed) for seed in track(range(problems), "against all divisions"))
    return {"brute_force_problems": problems, "brute_force_mismatches": wrong}


class TimedArbiter(Arbiter):
    """An arbiter that measures its own processor time, and keeps every decision."""

    def __init__(self, config: ArbiterConfig) -> None:
        super().__init__(config)
        self.every, self.took_s = list[FleetDecision](), 0.0

    def look(self, standings: Mapping[str, Standing], present: Budget, now_s: float) -> dict[str, Grant]:
        before, began_s = self.decisions[-1:], time.process_time()
        grants = super().look(standings, present, now_s)
        if self.decisions[-1:] != before:
            self.took_s += time.process_time() - began_s
            self.every.append(self.decisions[-1])
        return grants


def played_fleet(load: FleetLoad, arbitrated: bool) -> FleetRun:
    """One run of the fleet. Without an arbiter, each application keeps its own devices."""
    arbiter = TimedArbiter(arbiter_config()) if arbitrated else None
    members = {name: member(name, load) for name in APPLICATIONS}
    runs = replan_fleet(members, load.seconds, arbiter, patience=Patience(), progress=_progress(load))
    good, arrived = ({name: getattr(run.report, field) for name, run in runs.items()} for field in ("good", "arrived"))
    every = arbiter.every if arbiter else []
    moves = [decision for decision in every if decision.budgets is not None]
    for decision in moves:
        console.print(f"{load}, {decision.at_s:.0f} s: {decision.why}")
    return FleetRun(good, arrived, len(moves), len(every), arbiter.took_s if arbiter else 0.0)


def _progress(load: FleetLoad) -> Callable[[float], None]:
    """Says every tenth of a run how far it is."""

    def say(at_s: float) -> None:
        if round(at_s) % max(1, round(load.seconds / 10)) == 0:
            console.print(f"{load}: {at_s:.0f} of {load.seconds:.0f} s")

    return say
