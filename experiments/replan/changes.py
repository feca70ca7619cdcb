"""Changes the plan of a live application under load, and measures the time and cost of each change."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.replan.suite import NO_ROOM, offered_per_s, steps
from experiments.replan.timeline import Timeline, load, timeline
from experiments.shared.live import NAME
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.load.generator import WRONG, LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import Floats, arrivals
from isobatch.optimizer.plan import Plan

SLO_MS = 1000.0
SHARE = 0.6  # of the rate of the weakest plan
CALM_S = 2.2  # seconds between changes
AFTER_S = 1.0  # seconds after a change in which its effects count
LONGEST_S = 1800.0
console = Console(stderr=True)


@dataclass(frozen=True)
class Change:
    """A change of plan: its begin and end, and the time in which devices served neither plan."""

    what: str
    began_s: float
    ended_s: float
    missing_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    @property
    def stretch(self) -> tuple[float, float]:
        return self.began_s, self.ended_s + AFTER_S


async def under_load(url: str, changes: int) -> tuple[LoadRecord, list[Change]]:
    requests, rate = load(url, SLO_MS), offered_per_s(SHARE)
    console.print(f"{rate:.0f} requests a second, {len(steps(changes))} changes")
    await load(url, SLO_MS).at(arrivals("uniform", rate, CALM_S, 0))  # warms up
    running = asyncio.create_task(requests.at(arrivals("uniform", rate, LONGEST_S, 0)))
    await asyncio.sleep(CALM_S)
    try:
        made = [await _change(requests, *step) for step in steps(changes)]
    finally:
        requests.stop()
    return await running, made


async def _change(requests: LoadGenerator, what: str, plan: Plan) -> Change:
    began_s = requests.now_s()
    moved = await RunningApplication(NAME).roll_out(plan)
    change = Change(what, began_s, requests.now_s(), moved.missing_s)
    console.print(f"{what}: {change.seconds:.2f} s")
    await asyncio.sleep(CALM_S)
    return change


@dataclass(frozen=True)
class Kind:
    """The costs of one kind of change. Shares are of the steady goodput, in the worst window of a second."""

    what: str
    times: int
    seconds: float  # the median
    worst_s: float
    missing_s: float
    share: float
    p99_ms: float  # of the requests that were due around these changes


def kinds(record: LoadRecord, changes: Sequence[Change]) -> list[Kind]:
    times = timeline(record, SLO_MS)
    steady_per_s = float(times.outside(*(change.stretch for change in changes)).mean())
    return [
        _kind(record, times, steady_per_s, [change for change in changes if change.what == what])
        for what in dict.fromkeys(change.what for change in changes)
    ]


def _kind(record: LoadRecord, times: Timeline, steady_per_s: float, same: Sequence[Change]) -> Kind:
    seconds = [change.seconds for change in same]
    least = min(times.during(change.stretch).min(initial=np.inf) for change in same)
    missing_s = max(change.missing_s for change in same)
    p99_ms = _p99_ms(record, [change.stretch for change in same])
    return Kind(
        same[0].what, len(same), float(np.median(seconds)), max(seconds), missing_s, least / steady_per_s, p99_ms
    )


def figures(record: LoadRecord, changes: Sequence[Change]) -> dict[str, float]:
    """The figures of each kind of change; changes that must free devices first are a kind of their own."""
    result = kinds(record, changes)
    return {
        "changes": float(len(changes)),
        "failed": float((~np.isin(record.status, (200, WRONG))).sum()),
        "wrong": float((record.status == WRONG).sum()),
        "min_goodput_share": min(kind.share for kind in result if kind.what != NO_ROOM),
        **{f"{kind.what.replace(' ', '_')}_min_goodput_share": kind.share for kind in result},
    }


def table(result: Sequence[Kind]) -> Table:
    columns = ("change", "times", "s", "s, worst", "devices missing, s", "least goodput in any second", "p99, ms")
    rows = Table(*columns, title=f"changes under load, SLO {SLO_MS:g} ms")
    for kind in result:
        numbers = (f"{kind.seconds:.2f}", f"{kind.worst_s:.2f}", f"{kind.missing_s:.1f}")
        rows.add_row(kind.what, str(kind.times), *numbers, f"{kind.share:.0%}", f"{kind.p99_ms:.0f}")
    return rows


def _p99_ms(record: LoadRecord, stretches: Sequence[tuple[float, float]]) -> float:
    due = np.zeros(len(record.due_s), bool)
    for start_s, stop_s in stretches:
        due |= (record.due_s >= start_s) & (record.due_s < stop_s)
    latency_ms: Floats = 1e3 * (record.ended_s - record.due_s)[due & (record.status == 200)]
    return float(np.percentile(latency_ms, 99)) if len(latency_ms) else float("inf")
