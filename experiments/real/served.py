"""A really computed application on Ray Serve, and the plans that take turns on it."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.shared.live import NAME, Live, answer_at, application, named
from experiments.shared.rate_search import FIRST, LEAD_S, run_passes
from experiments.shared.real_network import CPU_SIZE, KIND, SURVIVAL, RealSize, checkpoint, profiled_texts
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.report import summary
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.simulator.candidates import LIMITS
from isobatch.cluster.simulator.plan_choice import best_simulated
from isobatch.cluster.simulator.sustained import IN_TIME_SHARE, sustained_per_s
from isobatch.optimizer import Objective, Plan, Problem
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS, baseline
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.problem import problem
from isobatch.optimizer.tuning import plan_for_its_ramps
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.files import Profile

CONSTANT = "constant"
NAMES = {NO_EXITS: "no_exits", EARLY_EXIT: "early_exit"}
SLACK = 0.2
ANSWERED = 200  # an HTTP status
NEARLY = 0.9  # of the promise: the load at which fill and idle time are measured
REPLICA = "ServeReplica:live."  # a part of a replica's command line


@dataclass(frozen=True)
class PlannedSystem:
    """A way to serve the network, and the inputs per second that its plan promises."""

    name: str
    plan: Plan
    promised_per_s: float


@dataclass(frozen=True)
class Nearly:
    """The measurements of a plan at most of its promise."""

    fill: float  # the least of all splits except the last
    replica_idle_share: float  # of the replica, between launches
    wall_over_processor: float  # of launches, without waiting for a core
    in_time_at_90_percent: float


@dataclass(frozen=True)
class RealCase:
    """A network to serve, and its SLO. `survival`: the share of inputs that enter each block. `begin`: the share of a
    promise at which the search for a rate begins."""

    dtype: str
    slo_ms: float
    replicas: int = 1
    survival: tuple[float, ...] = SURVIVAL
    size: RealSize = CPU_SIZE
    begin: float = FIRST

    @property
    def checkpoint(self) -> Path:
        return checkpoint(self.survival, self.size.width)

    @property
    def backend(self) -> str:
        return "onnx" if self.dtype == "int8" else "torch"


def systems(known: Profile, slo_s: float, count: int = 1, largest: int = CPU_SIZE.largest) -> list[PlannedSystem]:
    """The plan of `isobatch plan`, early exit in one split, and no exits; each is the best one in simulation."""
    objective = Objective(slo_s=slo_s, slack=SLACK, max_batch=largest)
    facts = facts_of(known, f"{known.kinds[0]}={count}")
    result = [chosen_system(CONSTANT, facts, objective)]
    for name, short in NAMES.items():
        limits = [replace(objective, slo_s=times * slo_s, slack=0.0) for times in LIMITS]
        plans = {plan for each in limits if (plan := baseline(name, facts, each).plan)}
        rates = {plan: sustained_per_s(plan, facts, slo_s) for plan in plans}
        best = max(rates, key=lambda plan: rates[plan])
        result.append(PlannedSystem(short, best, rates[best]))
    return result


def facts_of(known: Profile, devices: str) -> Problem:
    """`devices`: as KIND=COUNT."""
    there = fleet(devices)
    return problem(known, there, links_between(there), length=known.length, exits=known.exits_of(known.length))


def chosen_system(name: str, facts: Problem, objective: Objective) -> PlannedSystem:
    """The plan of `isobatch plan` for these devices."""
    first = plan_for_its_ramps(facts, objective, lambda given: side_by_side(given, objective))
    assert first, "This is a bug: one replica is enough for some plan."
    planned, own = first
    chosen = best_simulated(planned, own, objective, lambda asked, within: side_by_side(asked.given, within))
    return PlannedSystem(name, chosen.plan, chosen.after_per_s)


@dataclass(frozen=True)
class AskedServer:
    """A server at an address. `is_listed`: a request holds a list of texts."""

    url: str
    slo_ms: float
    is_listed: bool = True
    words: int = CPU_SIZE.words

    async def answered_per_s(self, clients: int, seconds: float) -> float:
        """The rate of its answers to clients that wait for them."""
        return summary(await self._generator().by_clients(clients, seconds), self.slo_ms).answered_per_s

    async def sustains(self, per_s: float, seconds: float, seed: int) -> bool:
        """Whether enough inputs of a run are answered in time, without those of its lead."""
        due_s = arrivals("poisson", per_s, LEAD_S + seconds, seed)
        share = 1 - IN_TIME_SHARE
        return await run_passes(self._generator(), due_s, LEAD_S, share, self._lost, self._patience_s)

    def _lost(self, record: LoadRecord, now_s: float) -> NDArray[Any]:
        """Marks the inputs that were refused or are late."""
        ended = ~np.isnan(record.ended_s)
        took_s = np.where(ended, record.ended_s, now_s) - record.due_s
        lost: NDArray[Any] = (ended & (record.status != ANSWERED)) | (1e3 * took_s > self.slo_ms)
        return lost

    async def ask(self, per_s: float, seconds: float, seed: int = 0) -> LoadRecord:
        return await self._generator().at(arrivals("poisson", per_s, seconds, seed), self._patience_s)

    @property
    def _patience_s(self) -> float:
        return 2 * self.slo_ms / 1e3

    def _generator(self) -> LoadGenerator:
        texts = profiled_texts(self.words)
        bodies = [json.dumps({"inputs": [text] if self.is_listed else text}).encode() for text in texts]
        return LoadGenerator(self.url, bodies)


@dataclass(frozen=True)
class ServedNetwork:
    """The running application."""

    here: Live
    server: AskedServer

    @staticmethod
    async def deployed(here: Live, folder: Path, known: Profile, plan: Plan, case: "RealCase") -> "ServedNetwork":
        share = {"cpus_per_replica": 1 / case.replicas} if case.size.device == KIND else {}
        front = application(
            plan, known, folder, model=str(case.checkpoint), backend=case.backend, dtype=case.dtype,
            slo_ms=case.slo_ms, **share,
        )  # fmt: skip
        await asyncio.to_thread(here.deploy, front)
        return ServedNetwork(here, AskedServer(here.url, case.slo_ms, words=case.size.words))

    async def follow(self, system: PlannedSystem) -> None:
        await RunningApplication(NAME).roll_out(system.plan)

    async def nearly(self, system: PlannedSystem, seconds: float) -> Nearly:
        """Measure the replicas of a plan at most of its promise."""
        application = RunningApplication(NAME)
        await application.observe(devices=False)
        stats = f"{self.here.base}/stats"
        before, clock = answer_at(stats)["splits"], ReplicaClock.now(sum(system.plan.devices().values()))
        record = await self.server.ask(NEARLY * system.promised_per_s, seconds, seed=9)
        spent, seen = clock.spent(), await application.observe(devices=False)
        fills = filled(before, answer_at(stats)["splits"])
        busy_s = sum(took.seconds for took in seen.launches.values())
        return Nearly(
            min(fills[:-1] or fills),
            1 - busy_s / spent.wall_s,
            (busy_s - spent.waited_s) / spent.processor_s,
            summary(record, self.server.slo_ms).good_share,
        )


def filled(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[float]:
    """The fill of each split's launches between two readings of /stats.

    >>> before = [{"launches": 2, "fill": 0.5}]
    >>> filled(before, [{"launches": 4, "fill": 0.75}])
    [1.0]
    """
    shares = []
    for one, other in zip(before, after, strict=True):
        launches = other["launches"] - one["launches"]
        shares.append((other["fill"] * other["launches"] - one["fill"] * one["launches"]) / max(launches, 1))
    return shares


@dataclass(frozen=True)
class ThreadTimes:
    """Nanoseconds of the computing threads, one of each replica: in total, on a core, and waiting for a core."""

    wall_s: float
    processor_s: float
    waited_s: float


@dataclass(frozen=True)
class ReplicaClock:
    """A reading of the nanoseconds that each thread of each replica spent on a core and waiting for one."""

    at_s: float
    threads: Mapping[int, Mapping[str, tuple[int, int]]]  # by process

    @classmethod
    def now(cls, replicas: int) -> "ReplicaClock":
        return cls(time.perf_counter(), {process: _threads(process) for process in named(REPLICA)[:replicas]})

    def spent(self) -> ThreadTimes:
        """The time since this reading, by the thread of each replica that was on a core for longest."""
        at_s, ran_ns, waited_ns = time.perf_counter(), 0, 0
        for process, before in self.threads.items():
            spent = [
                (ran - before.get(name, (0, 0))[0], waited - before.get(name, (0, 0))[1])
                for name, (ran, waited) in _threads(process).items()
            ]
            ran_ns, waited_ns = ran_ns + max(spent)[0], waited_ns + max(spent)[1]
        return ThreadTimes(len(self.threads) * (at_s - self.at_s), ran_ns / 1e9, waited_ns / 1e9)


def _threads(process: int) -> dict[str, tuple[int, int]]:
    threads = {}
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        ran, waited, _ = map(int, path.read_text().split())
        threads[path.parent.name] = ran, waited
    return threads
