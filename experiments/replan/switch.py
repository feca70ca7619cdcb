"""E3's section 5.4 on a live application: easy to hard inputs from 80:20 over 50:50 to 20:80, and who follows.

The controller's windows are shortened to seconds. Plans that stay (the best for each mix, early exit with shrinking
batches, no exits) are put onto the very same application, one after the other, and meet the same inputs.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from cluster.rollout import RunningApplication
from experiments.live import NAME, Live, application
from experiments.load import Load, Record
from experiments.replan.suite import BATCH, BLOCKS
from experiments.workloads import arrivals, exit_blocks
from optimizer import Objective, Plan, Problem, evaluate, optimize
from optimizer.baselines import baselines
from optimizer.problem import problem
from profiles.devices import Device, links_between
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.latency import LatencyTable

EASY = ExitProfile((1.0, 1.0, 0.35, 0.3, 0.25, 0.2, 0.2, 0.2))
HARD = ExitProfile((1.0, 1.0, 1.0, 0.95, 0.95, 0.9, 0.35, 0.3))
SHARES = (0.8, 0.5, 0.2)  # of easy inputs
# Launches and ramps cost enough that easy inputs want other cuts than hard ones: in the last mix the first plan does
# 15 % less than the best, by the cost model.
BLOCK_S, LAUNCH_S, RAMP_S = 0.025, 0.050, 0.006
DEVICES = {"v100": 4}
SLO_MS = 1500.0
WINDOW_S, LOOK_S, WINDOWS = 6.0, 1.0, 5  # of the controller, and how many each mix lasts
STAY_S = 10.0  # what a plan that stays is watched for
LOAD = 0.95  # of what the best plan for each mix promises
AFTER_WINDOWS = 2
console = Console(stderr=True)


@dataclass(frozen=True)
class Switch:
    """What came in time: second by second under the controller; per second, mix by mix, of plans that stay."""

    steered_per_s: Sequence[float]
    staying_per_s: Mapping[str, Sequence[float]]
    changes_s: Sequence[float]
    cpu_share: float


def survival(easy: float) -> tuple[float, ...]:
    return tuple(easy * one + (1 - easy) * other for one, other in zip(EASY.survival, HARD.survival, strict=True))


def profile(easy: float) -> Profile:
    sizes = (4096,) * BLOCKS
    blocks, ramps = ((BLOCK_S,) * BLOCKS,) * 2, ((RAMP_S,) * (BLOCKS - 1) + (0.0,),) * 2
    table = LatencyTable("v100", (1, BATCH), blocks, ramps, LAUNCH_S, sizes, sizes, "made up")
    return Profile("virtual", (table,), ExitProfile(survival(easy)))


def facts(easy: float) -> Problem:
    devices = [Device(kind, count, 10**12, 1.0) for kind, count in DEVICES.items()]
    return problem(profile(easy), devices, links_between(devices))


def objective() -> Objective:
    return Objective(slo_s=SLO_MS / 1e3, max_batch=BATCH)


def best(easy: float) -> Plan:
    known = facts(easy)
    return optimize(profile(easy), known.devices, links_between(known.devices), objective())


async def measure(here: Live, folder: Path) -> Switch:
    """All on one event loop: Serve's handles stay with the one that they were first used on."""
    front = application(best(SHARES[0]), profile(SHARES[0]), folder, slo_ms=SLO_MS, devices=DEVICES)
    await asyncio.to_thread(here.deploy, front)
    staying = await _staying(here)
    await asyncio.to_thread(here.deploy, front, _controller(folder))
    return await _steered(here, staying)


def _controller(folder: Path) -> dict[str, Any]:
    patience = {"replan_every_s": WINDOW_S, "look_every_s": LOOK_S, "start_s": 1.0, "max_batch": BATCH}
    arguments = {"application": NAME, "memory": str(folder / "memory"), "devices": DEVICES, **patience}
    path = "cluster.controller.app:build"
    return {"name": "controller", "import_path": path, "route_prefix": "/controller", "args": arguments}


async def _staying(here: Live) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"best plan": [], "early exit": [], "no exits": []}
    for easy in SHARES:
        stock, naive, _ = baselines(facts(easy), objective())
        for name, plan in {"best plan": best(easy), "early exit": naive.plan, "no exits": stock.plan}.items():
            assert plan, f"This is a bug: {name} has no plan for {easy:.0%} easy inputs."
            await RunningApplication(NAME).roll_out(plan)
            record = await _load(here, easy).at(_arrivals(easy, STAY_S))
            found[name].append(float(_good(record, STAY_S)[2:].mean()))
            console.print(f"{easy:.0%} easy, {name}: {found[name][-1]:.0f} in time per second")
    await RunningApplication(NAME).roll_out(best(SHARES[0]))
    return found


async def _steered(here: Live, staying: dict[str, list[float]]) -> Switch:
    phase_s = WINDOWS * WINDOW_S
    changes = asyncio.create_task(_changes())
    (process,) = here.processes("controller").values()
    cpu_s, began_s = _cpu_s(process), time.monotonic()
    steered: list[float] = []
    for easy in SHARES:
        record = await _load(here, easy).at(_arrivals(easy, phase_s), patience_s=SLO_MS / 1e3)
        steered += _good(record, phase_s).tolist()
        console.print(f"{easy:.0%} easy, with the controller: {np.mean(steered[-int(WINDOW_S) :]):.0f} per second")
    share = (_cpu_s(process) - cpu_s) / (time.monotonic() - began_s)
    changes.cancel()
    return Switch(steered, staying, await _ended(changes), share)


async def _changes() -> list[float]:
    """When the application was seen to follow another plan."""
    running, began_s, seen = RunningApplication(NAME), time.monotonic(), list[float]()
    before = await running.plan()
    try:
        while True:
            await asyncio.sleep(0.5)
            if (now := await running.plan()) != before:
                seen.append(time.monotonic() - began_s)
                before = now
    except asyncio.CancelledError:
        return seen


async def _ended(changes: "asyncio.Task[list[float]]") -> list[float]:
    return await changes


def _arrivals(easy: float, seconds: float) -> Any:
    return arrivals("uniform", LOAD * evaluate(best(easy), facts(easy)).goodput_per_s, seconds, 0)


def _load(here: Live, easy: float) -> Load:
    depths = exit_blocks(ExitProfile(survival(easy)), 1000, np.random.default_rng(1)).tolist()
    bodies = [json.dumps({"inputs": {"exit_block": depth}}).encode() for depth in depths]
    return Load(here.url, bodies, headers=f"X-Deadline-Ms: {SLO_MS:g}\r\n")


def _good(record: Record, seconds: float) -> Any:
    """Answers in time, by the second in which they were asked for."""
    good = (record.status == 200) & (1e3 * (record.ended_s - record.due_s) <= SLO_MS)
    counts, _ = np.histogram(record.due_s[good], np.arange(0, seconds + 1))
    return counts


def _cpu_s(process: int) -> float:
    """Processor time that a process has taken (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def figures(switch: Switch) -> dict[str, float]:
    phase, settled = int(WINDOWS * WINDOW_S), int(AFTER_WINDOWS * WINDOW_S)
    ours = [float(np.mean(switch.steered_per_s[n * phase + settled : (n + 1) * phase])) for n in range(len(SHARES))]
    shares = [mine / known for mine, known in zip(ours, switch.staying_per_s["best plan"], strict=True)]
    return {
        "adapt_share_after_2_windows": min(shares[1:]),
        "adapt_changes": float(len(switch.changes_s)),
        "adapt_over_early_exit": ours[-1] / switch.staying_per_s["early exit"][-1],
        "adapt_over_no_exits": ours[-1] / switch.staying_per_s["no exits"][-1],
        "controller_cpu_share": switch.cpu_share,
    }


def draw(switch: Switch, path: Path) -> None:
    """As E3's figure 16: goodput over time, and what plans make of each mix that stay."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    edges = [number * WINDOWS * WINDOW_S for number in range(len(SHARES) + 1)]
    for name, colour in {"best plan": "#333333", "early exit": "#d98c3f", "no exits": "#999999"}.items():
        per_s = switch.staying_per_s[name]
        axes.step(edges, [per_s[0], *per_s], color=colour, label=name, linestyle=":" if name == "best plan" else "-")
    axes.plot(
        np.arange(len(switch.steered_per_s)) + 0.5, switch.steered_per_s, color="#1b6ca8", label="with the controller"
    )
    for at_s in switch.changes_s:
        axes.axvline(at_s, color="#bb3333", linewidth=0.7, alpha=0.6)
    for begins_s, easy in zip(edges, SHARES, strict=False):
        axes.text(begins_s + WINDOWS * WINDOW_S / 2, 0, f"{easy:.0%} easy", ha="center", va="bottom", fontsize=8)
    axes.set(xlabel=f"seconds (a window: {WINDOW_S:g} s; red: another plan)", ylabel="answered in time per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
