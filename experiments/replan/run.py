"""Claim: a plan changes while requests flow: no request fails, no answer is wrong, and goodput hardly moves.

Everything is real but the devices: Ray Serve, HAProxy, HTTP, an open loop of requests at 60 % of what the weakest of
the plans sustains. The load comes from this process, on the same cores.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.rollout import RunningApplication
from experiments.live import NAME, Live, live
from experiments.load import BROKEN, WRONG, Load, Record
from experiments.load_report import summary
from experiments.replan import switch
from experiments.replan.suite import ROUND, START, offered_per_s, profile
from experiments.replan.timeline import load, steady_per_s, timeline
from experiments.workloads import arrivals
from optimizer.plan import Plan

SLO_MS = 2000.0
ROUNDS = 5  # of six changes
SHARE = 0.6
PICTURE = Path(__file__).parents[2] / "docs" / "switch.png"
CALM_S = 3.0  # before, between and after changes
LONGEST_S = 1800.0
console = Console(stderr=True)


@dataclass(frozen=True)
class Change:
    """When the application was led to another plan, and until when it was."""

    what: str
    began_s: float
    ended_s: float


def measure() -> dict[str, float]:
    with (
        TemporaryDirectory() as first,
        TemporaryDirectory() as second,
        live(START, profile(), Path(first), slo_ms=SLO_MS) as here,
    ):
        record, changes, switched = asyncio.run(_measured(here, Path(second)))
    switch.draw(switched, PICTURE)
    return _figures(record, changes) | switch.figures(switched)


async def _measured(here: Live, folder: Path) -> tuple[Record, list[Change], switch.Switch]:
    record, changes = await _changed_under_load(here.url, ROUND * ROUNDS)
    return record, changes, await switch.measure(here, folder)


async def _changed_under_load(url: str, steps: tuple[tuple[str, Plan], ...]) -> tuple[Record, list[Change]]:
    requests, rate = load(url, SLO_MS), offered_per_s(SHARE)
    console.print(f"{rate:.0f} requests a second, {len(steps)} changes")
    await load(url, SLO_MS).at(arrivals("uniform", rate, CALM_S, 0))  # warms up
    running = asyncio.create_task(requests.at(arrivals("uniform", rate, LONGEST_S, 0)))
    await asyncio.sleep(CALM_S)
    try:
        changes = [await _change(requests, *step) for step in steps]
    finally:
        requests.stop()
    return await running, changes


async def _change(requests: Load, what: str, plan: Plan) -> Change:
    began_s = requests.now_s()
    await RunningApplication(NAME).roll_out(plan)
    ended_s = requests.now_s()
    console.print(f"{what}: {ended_s - began_s:.2f} s")
    await asyncio.sleep(CALM_S)
    return Change(what, began_s, ended_s)


def _figures(record: Record, changes: list[Change]) -> dict[str, float]:
    times = timeline(record, SLO_MS)
    steady = steady_per_s(times, [change.began_s for change in changes])
    shares = {change: times.least(change.began_s, change.ended_s + 1.0) / steady for change in changes}
    console.print(_table(shares))
    seen = summary(record, SLO_MS)
    figures = {
        "changes": float(len(changes)),
        "failed": float((~np.isin(record.status, (200, WRONG))).sum()),
        "unanswered": float((record.status == BROKEN).sum()),
        "wrong": float((record.status == WRONG).sum()),
        "requests": float(len(record.status)),
        "offered_per_s": seen.offered_per_s,
        "steady_goodput_per_s": steady,
        "min_goodput_share": min(shares.values()),
        "p99_ms": seen.latency_ms["p99"],
        "slo_ms": SLO_MS,
    }
    return figures | {f"seconds_{what.replace(' ', '_')}": seconds for what, seconds in _seconds(changes).items()}


def _seconds(changes: list[Change]) -> dict[str, float]:
    """The median of each kind of change."""
    kinds = dict.fromkeys(change.what for change in changes)
    return {
        what: float(np.median([each.ended_s - each.began_s for each in changes if each.what == what])) for what in kinds
    }


def _table(shares: dict[Change, float]) -> Table:
    rows = Table("change", "s", "least goodput in any second", title="changes under load")
    for change, share in shares.items():
        rows.add_row(change.what, f"{change.ended_s - change.began_s:.2f}", f"{share:.0%}")
    return rows
