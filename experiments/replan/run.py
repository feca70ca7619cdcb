"""Claim: when a plan changes while requests flow, no request fails, no answer is wrong, and goodput hardly changes.

Devices are virtual; Ray Serve, HAProxy and HTTP are real. An open loop has 60 % of the rate of the weakest plan; the
load comes from this process, on the same cores. The control of a change is the goodput between changes; the controls of
the controller are plans that stay, with the same inputs.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.replan import changes as changing
from experiments.replan import switch
from experiments.replan.suite import START, cpus_per_replica, profile
from experiments.shared.live import Live, application, bare

PICTURE = Path(__file__).parents[2] / "docs" / "switch.png"
console = Console(stderr=True, width=140)  # tables are kept in files too
Figures = dict[str, float]


def measure(parts: str = "changes,switch", changes: int = 30, windows: int = switch.WINDOWS) -> Figures:
    """Run these parts; `windows` is the number of the controller's windows for each mix of inputs."""
    measures: dict[str, Callable[[Live, Path], Awaitable[Figures]]] = {
        "changes": lambda here, folder: _changes(here, folder, changes),
        "switch": lambda here, folder: _switch(here, folder, windows),
    }
    with TemporaryDirectory() as folder, bare() as here:
        return asyncio.run(_one_by_one([measures[part] for part in parts.split(",")], here, Path(folder)))


async def _one_by_one(parts: list[Callable[[Live, Path], Awaitable[Figures]]], here: Live, folder: Path) -> Figures:
    """Run the parts on one event loop, since a handle of Serve belongs to the loop of its first use."""
    figures: Figures = {}
    for number, part in enumerate(parts):
        own = folder / str(number)
        own.mkdir()
        figures |= await part(here, own)
    return figures


async def _changes(here: Live, folder: Path, changes: int) -> Figures:
    replicas = {"cpus_per_replica": cpus_per_replica(), "slo_ms": changing.SLO_MS}
    await asyncio.to_thread(here.deploy, application(START, profile(), folder, **replicas))
    record, made = await changing.under_load(here.url, changes)
    console.print(changing.table(changing.kinds(record, made)))
    return changing.figures(record, made)


async def _switch(here: Live, folder: Path, windows: int) -> Figures:
    seen = await switch.measure(here, folder, windows)
    if windows == switch.WINDOWS:
        switch.draw(seen, PICTURE)
    return switch.figures(seen)
