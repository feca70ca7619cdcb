"""Measures E3's section 5.4 live: the mix of easy to hard inputs goes from 80:20 over 50:50 to 20:80.

Launches are stretched, so that two cores suffice for the devices, and the controller's windows last seconds. The
controls are plans that stay on the same application with the same inputs: the best for each mix, early exit, no exits.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from experiments.replan.mixes import SUITE
from experiments.shared.gains import baseline_plan
from experiments.shared.live import NAME, Live, application, controller
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.controller.record import Event, Events
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import Floats, arrivals, exit_blocks
from isobatch.deployments.planning import summary
from isobatch.optimizer import Plan, Problem
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.problem import problem
from isobatch.profiles.devices import links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable, Rows

SHARES = SUITE.easy_shares
STRETCH = 8.0
SLO_MS = 1e3 * SUITE.slo_s * STRETCH
OBJECTIVE = replace(SUITE.question.objective, slo_s=SLO_MS / 1e3)
INPUT_BYTES = 4096  # of a moving input: a real one of 400 KB takes the same time on a real network
WINDOW_S, LOOK_S, WINDOWS = 8.0, 0.5, 4  # the controller's times, and the windows of each mix
STAY_S, SETTLE_S = 5, 2  # seconds for which a plan that stays is measured, and seconds before
AFTER_WINDOWS = 2
COLOURS = {"best plan": "#333333", "first plan": "#7fb3d5", "early exit": "#d98c3f", "no exits": "#999999"}
console = Console(stderr=True)


@dataclass(frozen=True)
class Switch:
    """The goodput of a switch: for each second under the controller; for each mix with plans that stay."""

    controlled_per_s: Sequence[float]
    staying_per_s: Mapping[str, Sequence[float]]
    changes_s: Sequence[float]

    @property
    def phase_s(self) -> int:
        """The seconds of each mix."""
        return len(self.controlled_per_s) // len(SHARES)


def profile(easy: float) -> Profile:
    known = SUITE.question.profile
    return Profile("BERT-base, stretched", tuple(map(_stretched, known.tables)), ExitProfile(SUITE.survival(easy)))


def _stretched(table: LatencyTable) -> LatencyTable:
    def times(rows: Rows) -> Rows:
        return tuple(tuple(STRETCH * seconds for seconds in row) for row in rows)

    sizes = (INPUT_BYTES,) * table.num_blocks
    return replace(
        table, block_s=times(table.block_s), ramp_s=times(table.ramp_s), block_p95_s=(), launch_p95_s=None,
        launch_s=STRETCH * table.launch_s, hidden_bytes=sizes,
    )  # fmt: skip


def facts(easy: float) -> Problem:
    fleet = SUITE.question.fleet
    return problem(profile(easy), fleet, links_between(fleet))


def best(easy: float) -> Plan:
    plan = side_by_side(facts(easy), OBJECTIVE, SUITE.gap)
    assert plan, "This is a bug: the stretched network has no plan."
    return plan


def devices() -> dict[str, int]:
    return {each.kind: each.count for each in SUITE.question.fleet}


async def measure(here: Live, folder: Path, windows: int = WINDOWS) -> Switch:
    """Measure on one event loop, since a handle of Serve belongs to the loop of its first use."""
    front = application(best(SHARES[0]), profile(SHARES[0]), folder, slo_ms=SLO_MS, devices=devices())
    await asyncio.to_thread(here.deploy, front)
    staying = await _staying(here)
    beside = controller(
        folder, replan_every_s=WINDOW_S, look_every_s=LOOK_S, start_s=1.0, max_batch=SUITE.max_batch, devices=devices()
    )
    await asyncio.to_thread(here.deploy, front, beside)
    return await _controlled(here, folder, staying, int(windows * WINDOW_S))


async def _staying(here: Live) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {name: [] for name in COLOURS}
    for easy in SHARES:
        known = facts(easy)
        others = [baseline_plan(name, known, OBJECTIVE) for name in (EARLY_EXIT, NO_EXITS)]
        plans = (best(easy), best(SHARES[0]), *others)
        for name, plan in zip(result, plans, strict=True):
            await RunningApplication(NAME).roll_out(plan)
            record = await _load(here, _bodies(easy, 1000)).at(_arrivals(easy, STAY_S, plan), patience_s=SLO_MS / 1e3)
            result[name].append(float(_good(record, STAY_S)[SETTLE_S:].mean()))
            console.print(f"{easy:.0%} easy, {name}: {result[name][-1]:.0f} in time per second")
    await RunningApplication(NAME).roll_out(best(SHARES[0]))
    return result


async def _controlled(here: Live, folder: Path, staying: dict[str, list[float]], phase_s: int) -> Switch:
    began_s = time.time()
    console.print(f"with the controller: {phase_s * len(SHARES)} s")
    due_s = [number * phase_s + _arrivals(easy, phase_s) for number, easy in enumerate(SHARES)]
    bodies = [_bodies(easy, len(each)) for easy, each in zip(SHARES, due_s, strict=True)]
    record = await _load(here, [*chain(*bodies)]).at(np.concatenate(due_s), patience_s=SLO_MS / 1e3)
    controlled = _good(record, phase_s * len(SHARES)).tolist()
    changes_s = [event.at_s - began_s for event in _decisions(folder, began_s)]
    return Switch(controlled, staying, changes_s)


def _decisions(folder: Path, began_s: float) -> list[Event]:
    """The controller's decisions for another plan since this time, by its record."""
    (path,) = (folder / "memory").glob("*/*/events.jsonl")
    events = [
        event for event in Events(path).all if event.at_s >= began_s and event.what in ("rolled out", "rolled back")
    ]
    for event in events:
        gains = f"promised {event.gain_promised or 0:+.0%}, seen " + (
            f"{event.gain_seen:+.0%}" if event.gain_seen is not None else "?"
        )
        console.print(
            f"{event.at_s - began_s:.0f} s, {event.what}: {summary(event.after or event.before)}: {event.why} ({gains})"
        )
    return events


def _arrivals(easy: float, seconds: float, plan: Plan | None = None) -> Floats:
    """Arrivals at the rate of the best plan, or of this plan if that is lower."""
    known = facts(easy)
    rates = [SUITE.offered_per_s(each, known) for each in (plan, best(easy)) if each]
    return arrivals("uniform", min(rates), seconds, 0)


def _bodies(easy: float, count: int) -> list[bytes]:
    depths = exit_blocks(ExitProfile(SUITE.survival(easy)), count, np.random.default_rng(1)).tolist()
    return [json.dumps({"inputs": {"exit_block": depth}}).encode() for depth in depths]


def _load(here: Live, bodies: Sequence[bytes]) -> LoadGenerator:
    return LoadGenerator(here.url, bodies, headers=f"X-Deadline-Ms: {SLO_MS:g}\r\n")


def _good(record: LoadRecord, seconds: float) -> NDArray[np.int64]:
    """Answers in time, by the second in which their requests were due."""
    good = (record.status == 200) & (1e3 * (record.ended_s - record.due_s) <= SLO_MS)
    counts, _ = np.histogram(record.due_s[good], np.arange(0, seconds + 1))
    return counts


def figures(switch: Switch) -> dict[str, float]:
    """The least goodput over that of the best plan, in the last windows of each mix but the first."""
    phase, settled_s = switch.phase_s, int(AFTER_WINDOWS * WINDOW_S)
    ours = [np.mean(switch.controlled_per_s[n * phase + settled_s : (n + 1) * phase]) for n in range(len(SHARES))]
    shares = [float(mine / known) for mine, known in zip(ours, switch.staying_per_s["best plan"], strict=True)]
    return {"adapt_share_after_2_windows": min(shares[1:])}


def draw(switch: Switch, path: Path) -> None:
    """Draw E3's figure 16: goodput over time, and that of the plans that stay for each mix."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    edges = [number * switch.phase_s for number in range(len(SHARES) + 1)]
    for name, colour in COLOURS.items():
        per_s = switch.staying_per_s[name]
        axes.step(edges, [per_s[0], *per_s], color=colour, label=name, linestyle=":" if name == "best plan" else "-")
    axes.plot(
        np.arange(len(switch.controlled_per_s)) + 0.5,
        switch.controlled_per_s,
        color="#1b6ca8",
        label="with the controller",
    )
    for at_s in switch.changes_s:
        axes.axvline(at_s, color="#bb3333", linewidth=0.7, alpha=0.6)
    for begins_s, easy in zip(edges, SHARES, strict=False):
        axes.text(begins_s + switch.phase_s / 2, 0, f"{easy:.0%} easy", ha="center", va="bottom", fontsize=8)
    axes.set(xlabel=f"seconds (a window: {WINDOW_S:g} s; red: another plan)", ylabel="answered in time per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
