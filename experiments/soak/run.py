"""Claim: in an hour of traffic and faults, no request is lost, no answer is wrong, and no process grows.

Two fronts and a controller run on virtual devices. Clients over HTTP and gRPC keep two cores busy, with one input or
many in a request, and with some wrong requests. Inputs become harder and easier in turns, so that plans change. The
first half has the faults of `experiments/chaos`; processes after them live long enough to show whether they grow. For
shorter runs set `ISOBATCH_SOAK_MINUTES=8`, for lower rates `ISOBATCH_SOAK_PER_S=200`.
"""

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from experiments.chaos.faults import DEVICES, FAULTS, START
from experiments.replan.suite import BATCH, FAST, profile
from experiments.shared.live import NAME, Live, application, bare, controller
from experiments.shared.machine import free_port
from experiments.soak.traffic import DEADLINE_MS, OUTCOMES, Traffic
from experiments.soak.watch import Life, Watch
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.controller.decide import served_alike
from isobatch.optimizer.plan import Plan

REQUESTS, MINUTES = 10_000_000, 60.0
CLIENTS = 24
BLOCK_S = 0.003  # of virtual devices, so fast that this machine is the limit
PATIENCE = {"look_every_s": 1.0, "replan_every_s": 20.0}  # of the controller
LOOK_EVERY_S, TELL_EVERY_S = 2.0, 15.0
STARTS_WITHIN_S = 600.0  # on a busy machine
REPAIRED_AFTER_S = 15.0  # then slow processes are fast again
STRUCK_SHARE, FAULTS_AT_MOST = 0.5, 20  # faults happen in this share of the run, at most this number
MUCH_MIB_PER_H = 10.0
TELLING_SHARE = 0.25  # of the run: the least settled life of a process that shows whether it grows
console = Console(stderr=True, width=140)


def measure(requests: int = REQUESTS, minutes: int = 0) -> dict[str, float]:
    long_s = 60 * (minutes or float(os.environ.get("ISOBATCH_SOAK_MINUTES", MINUTES)))
    most_per_s = float(os.environ.get("ISOBATCH_SOAK_PER_S", math.inf))
    with TemporaryDirectory() as folder, served(Path(folder)) as (here, grpc_port):
        soak = Soak(here, grpc_port, long_s, most_per_s)
        with redirect_stdout(StringIO()):  # Ray prints much about processes that died
            asyncio.run(soak.run(requests))
    console.print(_table(soak.lives()))
    for surprise in soak.traffic.surprises:
        console.print(surprise, markup=False)
    return soak.figures()


@contextmanager
def served(folder: Path) -> Iterator[tuple[Live, int]]:
    """The application, and the port of its gRPC."""
    grpc_port = free_port()
    with bare() as here:
        beside = controller(folder, devices=DEVICES, max_batch=BATCH, slo_ms=DEADLINE_MS, **PATIENCE)
        fields = {"slo_ms": DEADLINE_MS, "front_replicas": 2, "grpc_port": grpc_port, "name": NAME}
        fields |= {"cpus_per_replica": 0.0}  # each front reserves a core
        here.deploy(application(START, profile({FAST: BLOCK_S}), folder, **fields), beside, patience_s=STARTS_WITHIN_S)
        yield here, grpc_port


class Soak:
    """The traffic, the faults and the samples of processes, at once."""

    def __init__(self, here: Live, grpc_port: int, long_s: float, most_per_s: float) -> None:
        self._here, self._long_s = here, long_s
        place = urlsplit(here.base)
        assert place.hostname
        assert place.port
        self.traffic = Traffic((place.hostname, place.port), grpc_port, self._hard_share, most_per_s)
        self.watch = Watch()
        self._faults = self._changes = 0
        self._plan: Plan | None = None
        self._now_s = 0.0

    async def run(self, requests: int) -> None:
        """Run until this number of requests has ended, or the time is over."""
        self._began_s = asyncio.get_running_loop().time()
        clients = asyncio.create_task(self.traffic.run(CLIENTS))
        async with _beside(self._strike(), self._follow()):
            while self._elapsed_s() < self._long_s and self.traffic.requests < requests and not clients.done():
                await asyncio.to_thread(self.watch.look, self._elapsed_s())
                if self._elapsed_s() // TELL_EVERY_S > self._now_s // TELL_EVERY_S:
                    self._print_progress()
                self._now_s = self._elapsed_s()
                await asyncio.sleep(LOOK_EVERY_S)
        self._now_s = self._elapsed_s()
        self.traffic.stop()
        await clients

    def _elapsed_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    def _hard_share(self) -> float:
        """The share of hard inputs: from 0 to 1 and back in each quarter of the run, or in ten minutes if shorter."""
        period_s = min(600.0, self._long_s / 4)
        return 0.5 - 0.5 * math.cos(2 * math.pi * self._now_s / period_s)

    async def _strike(self) -> None:
        """Cause every fault in random order, again and again, until the run's second part begins."""
        struck_s = STRUCK_SHARE * self._long_s
        chance, every_s = random.Random(7), max(25.0, struck_s / FAULTS_AT_MOST)
        while True:
            for name in chance.sample(sorted(FAULTS), len(FAULTS)):
                if self._elapsed_s() + every_s > struck_s:
                    return
                await asyncio.sleep(every_s - REPAIRED_AFTER_S)
                console.print(f"{self._elapsed_s():5.0f} s: {name}")
                await FAULTS[name](self._here, chance)
                self._faults += 1
                await asyncio.sleep(REPAIRED_AFTER_S)
                for slow in self._here.faults.iterdir():
                    slow.unlink()

    async def _follow(self) -> None:
        """Count the application's changes of plan."""
        running = RunningApplication(NAME)
        while True:
            await asyncio.sleep(1.0)
            with suppress(Exception):  # the deployer is restarting
                async with asyncio.timeout(5.0):
                    plan = await running.plan()
                self._changes += self._plan is not None and not served_alike(plan, self._plan)
                self._plan = plan

    def _print_progress(self) -> None:
        outcomes = ", ".join(f"{count} {name}" for name, count in self.traffic.outcomes.most_common())
        console.print(f"{self._elapsed_s():5.0f} s: {outcomes}; {self._changes} changes of plan, {self._faults} faults")

    def lives(self) -> list[Life]:
        """The processes that lived long enough to show whether they grow."""
        return self.watch.lives(TELLING_SHARE * self._now_s)

    def figures(self) -> dict[str, float]:
        traffic, lives = self.traffic, self.lives()
        result = {"minutes": self._now_s / 60, "requests": traffic.requests, "faults": self._faults}
        result |= {name: traffic.outcomes[name] for name in OUTCOMES} | {"resent": traffic.resent}
        result |= {"plan_changes": self._changes, "processes": len(lives)}
        result["growing"] = sum(life.memory.grows for life in lives)
        result["growing_much"] = sum(life.memory.grows_by(MUCH_MIB_PER_H) for life in lives)
        result["handles_growing"] = sum(life.handles.grows for life in lives)
        result["threads_growing"] = sum(life.threads.grows for life in lives)
        for name in sorted({life.name for life in lives}):
            for number, life in enumerate(each for each in lives if each.name == name):
                result[f"{name}_{number}_mib_per_h"] = life.memory.per_hour
                result[f"{name}_{number}_mib_per_h_error"] = life.memory.error
        return {name: float(value) for name, value in result.items()}


@asynccontextmanager
async def _beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these tasks during the block; an error in them fails the run."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()


def _table(lives: list[Life]) -> Table:
    rows = Table("process", "MiB by quarter", "MiB/h", "handles/h", "threads/h", "samples", title="what grows")
    for life in lives:
        slopes = (f"{each.per_hour:+.1f} ± {each.error:.1f}" for each in (life.memory, life.handles, life.threads))
        quarters = " ".join(f"{each:.0f}" for each in life.quarters_mib)
        rows.add_row(f"{life.name} {life.process}", quarters, *slopes, str(life.samples))
    return rows
