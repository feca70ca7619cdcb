"""Measures the controller's cost to requests: the rate through one front with it and without it."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.shared.live import Live, application, controller
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

BLOCKS, BATCH, KIND = 2, 16, "v100"
BLOCK_S = 0.001  # fast enough that the front is the limit
CLIENTS, SPELL_S, PAIRS = 64, 3.0, 4
WINDOW_S, LOOK_S = 6.0, 1.0
console = Console(stderr=True)


async def measure(here: Live, folder: Path) -> dict[str, float]:
    """Measure rates in turns, with the controller stopped (SIGSTOP) in every other one."""
    front = application(_plan(), _profile(), folder, slo_ms=1000.0)
    beside = controller(folder, replan_every_s=WINDOW_S, look_every_s=LOOK_S, max_batch=BATCH)
    await asyncio.to_thread(here.deploy, front, beside)
    (process,) = here.processes("controller").values()
    await _answered_per_s(here)  # warms up
    with_it, without = list[float](), list[float]()
    for _ in range(PAIRS):
        with_it.append(await _answered_per_s(here))
        with _stopped(process):
            without.append(await _answered_per_s(here))
        console.print(f"{with_it[-1]:.0f} requests a second with the controller, {without[-1]:.0f} without")
    return {
        "front_rps_with_controller": float(np.median(with_it)),
        "front_rps_without_controller": float(np.median(without)),
        "front_rps_ratio": float(np.median(np.divide(with_it, without))),
    }


async def _answered_per_s(here: Live) -> float:
    record = await LoadGenerator(here.url, [json.dumps({"inputs": {"exit_block": 1}}).encode()]).by_clients(
        CLIENTS, SPELL_S
    )
    return float((record.status == 200).sum()) / SPELL_S


@contextlib.contextmanager
def _stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def _profile() -> Profile:
    sizes, none = (4096,) * BLOCKS, ((0.0,) * BLOCKS,) * 2
    table = LatencyTable(KIND, (1, BATCH), ((BLOCK_S,) * BLOCKS,) * 2, none, 0.0, sizes, sizes, "made up")
    return Profile("fast", (table,), ExitProfile((1.0,) * BLOCKS))


def _plan() -> Plan:
    return Plan(tuple(Placement(KIND, 1, (Split(block, block + 1, BATCH),)) for block in range(BLOCKS)))
