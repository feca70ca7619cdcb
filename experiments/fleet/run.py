"""Claim: applications answer more inputs in time if an arbiter moves devices between them than if devices stay.

In virtual time, six applications with recorded bursts share 24 devices, each with the real controller and with replicas
on every device, so that a device changes hands within `HANDOVER_S`. The control has the same inputs and controllers,
and the best division of the devices for these mean loads, but no arbiter. `fluid_over_divided` is an upper bound by
arithmetic, with devices that move at once. Other parts compare decisions and divisions with all divisions, time the
planner, and move a device live.

A neighbour of a flooded application must keep the answers of its own devices (`flooded_neighbour_kept`). The figures
of a part are kept when it ends, so that an interrupted run continues with the next part.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import numpy as np
from rich.console import Console
from rich.progress import track

from experiments.fleet.bruteforce import agrees
from experiments.fleet.divisions import GOALS, LARGE, divides_best, large_fleet
from experiments.fleet.suite import APPLICATIONS, FleetLoad, arbiter_config, fluid_over_divided, member
from experiments.planner.run import timed
from experiments.shared.kept_parts import kept_part
from isobatch.cluster.controller.arbiter import Arbiter
from isobatch.cluster.controller.rehearsal import replan_fleet
from isobatch.optimizer.fleets.division import divide

PERCENTS = (50, 100)  # mean loads, of the rate that an application's own devices sustain
FLOOD, FLOOD_TIMES = "base_azure", 10.0
FLOOD_PERCENT = 50
PROBLEMS = 200
FLEETS = 60  # fleets to divide, each for every goal
LIVE = "tests.integration.test_fleet"  # times how a device changes hands
Figures = dict[str, float]
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class FleetRun:
    """The answers in time, and the inputs, of each application; the arbiter's decisions and their time."""

    good: Mapping[str, int]
    arrived: Mapping[str, int]
    decisions: int
    decide_s: float


def measure(
    parts: str = "shared,brute,plans,move", hours: float = 0.25, percents: str = ",".join(map(str, PERCENTS)),
    problems: int = PROBLEMS, again: int = 0,
) -> Figures:  # fmt: skip
    """`percents`: mean loads, of the rate that each application's devices sustain. `problems`: against brute force.

    `again=1`: measure parts again that the same code has measured on this machine.
    """
    wanted, loads = str(parts).split(","), [FleetLoad(int(each), float(hours)) for each in str(percents).split(",")]
    measures: dict[str, Callable[[], Figures]] = {}
    if "shared" in wanted:
        measures |= {f"shared_{load.percent}": partial(_shared, load) for load in loads}
    others: dict[str, Callable[[], Figures]] = {"brute": partial(_brute, problems), "plans": _plans, "move": _move}
    measures |= {name: part for name, part in others.items() if name in wanted}
    figures = Figures()
    for name, part in measures.items():
        figures |= kept_part("fleet", name, f"{hours} {problems}", bool(again), part, console)
    return _means(figures, ("shared_over_divided", "fluid_over_divided")) | figures


def _means(figures: Figures, names: tuple[str, ...]) -> Figures:
    """The means over all loads."""
    each = {name: [value for figure, value in figures.items() if figure.startswith(f"{name}_")] for name in names}
    return {name: float(np.mean(values)) for name, values in each.items() if values}


def _shared(load: FleetLoad) -> Figures:
    divided, shared = played_fleet(load, arbitrated=False), played_fleet(load, arbitrated=True)
    gains = {name: shared.good[name] / max(1, divided.good[name]) for name in APPLICATIONS}
    members = {name: member(name, load) for name in APPLICATIONS}
    figures = {
        "shared_over_divided": sum(shared.good.values()) / sum(divided.good.values()),
        "fluid_over_divided": fluid_over_divided(members, load.seconds),
        "in_time_divided": sum(divided.good.values()) / sum(divided.arrived.values()),
        "in_time_shared": sum(shared.good.values()) / sum(shared.arrived.values()),
        "worst_application": min(gains.values()),
        "s_per_division": shared.decide_s / max(1, shared.decisions),
    }
    named = {f"{name}_{load.percent}": value for name, value in figures.items()}
    return named | (_flooded(load, divided) if load.percent == FLOOD_PERCENT else {})


def _flooded(load: FleetLoad, divided: FleetRun) -> Figures:
    """The least share of its own devices' answers that a neighbour of a flood keeps."""
    flooded = played_fleet(replace(load, flooded=FLOOD, times=FLOOD_TIMES), arbitrated=True)
    kept = [flooded.good[name] / max(1, divided.good[name]) for name in APPLICATIONS if name != FLOOD]
    return {"flooded_neighbour_kept": min(kept)}


def _brute(problems: int) -> Figures:
    wrong = sum(not agrees(seed) for seed in track(range(problems), "against all divisions"))
    return {"brute_force_mismatches": wrong}


def _plans() -> Figures:
    """Times and gaps of divisions of large fleets; divisions of small fleets against all divisions."""
    figures = Figures()
    for name in LARGE:
        for goal in GOALS:
            applications, devices = large_fleet(name, rated=goal != "fairness")
            seconds, division = timed(partial(divide, applications, devices, goal), repeat=1)
            figures |= {f"s_{goal}_{name}": seconds, f"gap_{goal}_{name}": division.gap}
    seeds = track(range(FLEETS), "against all divisions")
    wrong = sum(not divides_best(seed, goal) for seed in seeds for goal in GOALS)
    return figures | {"divisions_mismatches": wrong}


def _move() -> Figures:
    """The times that the live test of a fleet records."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        file = f"{LIVE.replace('.', '/')}.py"
        subprocess.run([sys.executable, "-m", "pytest", "-q", file, f"--junit-xml={report}"], check=True)
        noted = ElementTree.parse(report).iter("property")
        return {each.attrib["name"]: float(each.attrib["value"]) for each in noted}


def played_fleet(load: FleetLoad, arbitrated: bool) -> FleetRun:
    """One run of the fleet. Without an arbiter, each application keeps its own devices."""
    arbiter = Arbiter(arbiter_config()) if arbitrated else None
    members = {name: member(name, load) for name in APPLICATIONS}
    fleet = replan_fleet(members, load.seconds, arbiter, progress=_progress(load))
    reports = {name: run.report for name, run in fleet.applications.items()}
    good, arrived = ({name: getattr(each, field) for name, each in reports.items()} for field in ("good", "arrived"))
    for decision in fleet.moves:
        console.print(f"{load}, {decision.at_s:.0f} s: {decision.why}")
    return FleetRun(good, arrived, len(fleet.decisions), fleet.decide_s)


def _progress(load: FleetLoad) -> Callable[[float], None]:
    """Print the progress at every tenth of a run."""

    def say(at_s: float) -> None:
        if round(at_s) % max(1, round(load.seconds / 10)) == 0:
            console.print(f"{load}: {at_s:.0f} of {load.seconds:.0f} s")

    return say
