"""One application on Ray Serve that computes for real, and the plans that take turns on it."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.controller.application import RunningApplication
from cluster.load.generator import LoadGenerator, LoadRecord
from cluster.load.report import summary
from cluster.load.workloads import arrivals
from cluster.simulator.plan_choice import LIMITS, best_simulated
from cluster.simulator.sustained import sustained
from deployments.front.observed import LaunchShape
from experiments.shared.live import NAME, Live, application, named, stats_at
from experiments.shared.real_network import KIND, LARGEST_BATCH, checkpoint, texts
from optimizer import Objective, Plan, Problem
from optimizer.model.work import work
from optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS, baseline
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.problem import problem
from profiles.devices import fleet, links_between
from profiles.files import Profile

CONSTANT = "constant"
NAMES = {NO_EXITS: "no_exits", EARLY_EXIT: "early_exit"}
SLACK = 0.2
KEPT = 0.98  # of the requests in time: then a rate is sustained
LOW, HIGH, STEPS = 0.5, 1.2, 5  # of what a plan promises
WARMS_UP, WARMS_UP_S = 0.7, 5.0  # of what it promises
NEARLY = 0.9  # of what it promises: how full launches are there, and how much its replica does
SENT = 512  # different texts


@dataclass(frozen=True)
class PlannedSystem:
    """A way to serve the network, and how many inputs a second its plan promises in time."""

    name: str
    plan: Plan
    promised_per_s: float
    facts: Problem

    def expected_s(self, shape: LaunchShape) -> float:
        """What a launch takes by the tables; 0 for one that is not of this plan."""
        reach = 1.0
        for split in self.plan.splits:
            result = work(split, self.facts, KIND, None, reach, shape.size)
            if (split.start, split.stop) == (shape.start, shape.stop):
                return result.launch_s
            reach = result.survivors
        return 0.0


@dataclass(frozen=True)
class Nearly:
    """What was seen of a plan while it was asked for most of what it promises."""

    fill: float  # the least of all splits but the last
    idle_share: float  # of the replica, between launches
    wall_over_processor: float  # of launches, without the time in which they waited for a core
    in_time: float
    launches_over_tables: float  # what they took, over what the tables say of launches of these sizes


def systems(known: Profile, slo_s: float, count: int = 1) -> list[PlannedSystem]:
    """What `isobatch plan` chooses, early exit in one split, and the network without exits; each as it plays best."""
    devices = fleet(f"{KIND}={count}")
    objective = Objective(slo_s=slo_s, slack=SLACK, max_batch=LARGEST_BATCH)
    facts = problem(known, devices, links_between(devices), length=known.length)
    chosen = best_simulated(_planned(facts, objective), facts, objective, side_by_side)
    result = [PlannedSystem(CONSTANT, chosen.plan, chosen.after_per_s, facts)]
    for name, short in NAMES.items():
        limits = [replace(objective, slo_s=times * slo_s, slack=0.0) for times in LIMITS]
        plans = {plan for each in limits if (plan := baseline(name, facts, each).plan)}
        rates = {plan: sustained(plan, facts, slo_s).goodput_per_s for plan in plans}
        best = max(rates, key=lambda plan: rates[plan])
        result.append(PlannedSystem(short, best, rates[best], facts))
    return result


def _planned(facts: Problem, objective: Objective) -> Plan:
    plan = side_by_side(facts, objective)
    assert plan, "This is a bug: one replica is enough for some plan."
    return plan


@dataclass(frozen=True)
class ServedNetwork:
    """The running application."""

    here: Live
    slo_ms: float

    @staticmethod
    async def deployed(
        here: Live, folder: Path, known: Profile, plan: Plan, dtype: str, slo_ms: float
    ) -> "ServedNetwork":
        fields = {"dtype": dtype, "slo_ms": slo_ms, "cpus_per_replica": 1}
        front = application(
            plan, known, folder, model=str(checkpoint()), backend="onnx" if dtype == "int8" else "torch", **fields
        )
        await asyncio.to_thread(here.deploy, front)
        return ServedNetwork(here, slo_ms)

    async def follow(self, system: PlannedSystem) -> None:
        await RunningApplication(NAME).apply(system.plan)
        await self.ask(WARMS_UP * system.promised_per_s, WARMS_UP_S)

    async def sustained_per_s(self, system: PlannedSystem, seconds: float, seed: int) -> float:
        """The largest rate at which nearly all requests are answered in time."""
        low, high = LOW * system.promised_per_s, HIGH * system.promised_per_s
        best: float = 0.0
        for _ in range(STEPS):
            rate = (low + high) / 2
            seen = summary(await self.ask(rate, seconds, seed), self.slo_ms)
            if seen.good_share >= KEPT:
                low, best = rate, max(best, seen.goodput_per_s)
            else:
                high = rate
        return best

    async def ask(self, per_s: float, seconds: float, seed: int = 0) -> LoadRecord:
        bodies = [json.dumps({"inputs": [text]}).encode() for text in texts(SENT, seed=2)]
        generator = LoadGenerator(self.here.url, bodies)
        return await generator.at(arrivals("poisson", per_s, seconds, seed), patience_s=2 * self.slo_ms / 1e3)

    async def nearly(self, system: PlannedSystem, seconds: float) -> Nearly:
        """Ask for most of what the plan promises, and look at its replica."""
        application = RunningApplication(NAME)
        await application.observe(devices=False)
        before, clock = stats_at(self.here.base)["splits"], ReplicaClock.now()
        record = await self.ask(NEARLY * system.promised_per_s, seconds, seed=9)
        spent, seen = clock.spent(), await application.observe(devices=False)
        fills = filled(before, stats_at(self.here.base)["splits"])
        busy_s = sum(took.seconds for took in seen.launches.values())
        known = {shape: took for shape, took in seen.launches.items() if system.expected_s(shape)}
        expected_s = sum(took.times * system.expected_s(shape) for shape, took in known.items())
        return Nearly(
            min(fills[:-1] or fills),
            1 - busy_s / spent.wall_s,
            (busy_s - spent.waited_s) / spent.processor_s,
            summary(record, self.slo_ms).good_share,
            sum(took.seconds for took in known.values()) / expected_s,
        )


def filled(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[float]:
    """How full the launches of each split were between two looks at /stats.

    >>> before = [{"launches": 2, "fill": 0.5}]
    >>> filled(before, [{"launches": 4, "fill": 0.75}])
    [1.0]
    """
    shares = []
    for one, other in zip(before, after, strict=True):
        launches = other["launches"] - one["launches"]
        shares.append((other["fill"] * other["launches"] - one["fill"] * one["launches"]) / max(launches, 1))
    return shares


def core_times() -> tuple[int, int]:
    """Of all cores since they started, in ticks: what the machine below took for others, and all."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


@dataclass(frozen=True)
class ThreadTimes:
    """What the thread of a replica that computes has spent: in all, on a core, and waiting for one."""

    wall_s: float
    processor_s: float
    waited_s: float


@dataclass(frozen=True)
class ReplicaClock:
    """When it was looked at, and the nanoseconds of every thread of the replica: on a core, and waiting for one."""

    process: int
    at_s: float
    threads: Mapping[str, tuple[int, int]]

    @classmethod
    def now(cls) -> "ReplicaClock":
        (process,) = named("ServeReplica:live.")[:1]
        threads = {}
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            ran, waited, _ = map(int, path.read_text().split())
            threads[path.parent.name] = ran, waited
        return cls(process, time.perf_counter(), threads)

    def spent(self) -> ThreadTimes:
        """Since then, by the thread that was on a core for longest."""
        now = ReplicaClock.now()
        before = {name: self.threads.get(name, (0, 0)) for name in now.threads}
        most = max(now.threads, key=lambda name: now.threads[name][0] - before[name][0])
        ran, waited = (after - here for after, here in zip(now.threads[most], before[most], strict=True))
        return ThreadTimes(now.at_s - self.at_s, ran / 1e9, waited / 1e9)
