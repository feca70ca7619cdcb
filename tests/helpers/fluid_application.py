"""An application without requests, which behaves as the cost model predicts. A day of it takes seconds."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from isobatch.cluster.controller.application import RolloutError
from isobatch.cluster.controller.arbiter import Grant
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.control_loop import ControlLoop, Offload, at_once
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.decide import lost_devices, plan_change
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.record import Event, Events
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer import Objective, Plan, evaluate
from isobatch.optimizer.model.work import work
from isobatch.profiles.devices import Device
from isobatch.profiles.exits import ExitProfile, carried
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.windows import History

BLOCKS = 4
EASY, MEDIUM, HARD = (1.0, 0.3, 0.2, 0.1), (1.0, 0.7, 0.5, 0.3), (1.0, 1.0, 0.95, 0.9)
START_S = 20.0


def table(kind: str, slower: float = 1.0) -> LatencyTable:
    """A table with half of a full batch's time at any batch size, so that constant batch gains."""
    sizes = (1, 8)
    blocks = tuple((slower * seconds,) * BLOCKS for seconds in (0.010, 0.020))
    ramps = tuple((slower * 0.001,) * (BLOCKS - 1) + (0.0,) for _ in sizes)
    weights = (1000,) * BLOCKS
    return LatencyTable(kind, sizes, blocks, ramps, slower * 0.010, weights, weights, "made up")


def question(
    survival: tuple[float, ...] = MEDIUM, slo_s: float | None = 2.0, **fleet: int
) -> ClassifierPlanningProblem:
    counts = fleet or {"v100": 4}
    profile = Profile("toy", (table("v100"), table("k80", 2.0)), ExitProfile(survival))
    devices = tuple(Device(kind, count, 10**9, 1.0) for kind, count in counts.items())
    return ClassifierPlanningProblem(profile, devices, Objective(slo_s=slo_s, max_batch=8), one_machine=True)


class Fluid:
    """Time passes when the controller sleeps, and while a plan is rolled out. Its first plan is `plan`, or the best."""

    def __init__(self, problem: ClassifierPlanningProblem, plan: Plan | None = None, seed: int = 0) -> None:
        self.asked, self.running, self.now_s = problem, plan or first_plan(problem), 0.0
        self.random = np.random.default_rng(seed)
        self.truth: Callable[[float], tuple[float, ...]] = lambda at_s: MEDIUM
        self.full: Callable[[float], float] = lambda at_s: 0.0  # the share that asks for the whole network
        self.rate: Callable[[float], float] = lambda at_s: 400.0
        self.devices: Callable[[float], Mapping[str, int]] = lambda at_s: {}
        self.slower: Mapping[str, float] = {}  # than the table says
        self.poor: Callable[[Plan], float] = lambda plan: 1.0  # the real share of a plan's promise
        self.fails: Callable[[Plan], bool] = lambda plan: False
        self.devices_vanish = False  # where it fails, for that reason
        self.rolled: list[tuple[float, Plan]] = []
        self.answered: list[tuple[float, int]] = []  # at each look, since the one before
        self._asked_s = 0.0
        self._sustained: dict[object, float] = {}

    # Calls of the controller

    async def observe(self, devices: bool = True) -> Observed:
        started_s, seconds = self._asked_s, max(0.0, self.now_s - self._asked_s)
        self._asked_s = self.now_s
        arrivals = int(self.random.poisson(self.rate(self.now_s) * seconds))
        per_s = self.sustained_per_s(self.running) * self.poor(self.running)
        good = min(arrivals, int(per_s * seconds))
        self.answered.append((self.now_s, good))
        answered, full = (self._in_full(inputs) for inputs in (good, arrivals))
        exits, launches = self._exits(good - answered), self._launches(good)
        present, refused = self._present() if devices else {}, arrivals - good
        return Observed(started_s, seconds, arrivals, good, exits, launches, present, full=full, refused=refused)

    def _in_full(self, inputs: int) -> int:
        share = self.full(self.now_s)
        return int(self.random.binomial(inputs, share)) if share else 0

    async def plan(self) -> Plan:
        return self.running

    async def roll_out(self, plan: Plan) -> None:
        if plan_change(self.running, plan).starts:
            self.now_s += START_S
        if self.fails(plan):
            raise RolloutError("a replica did not start", blameless=self.devices_vanish)
        self.running = plan
        self.rolled.append((self.now_s, plan))

    # The truth behind them

    def sustained_per_s(self, plan: Plan) -> float:
        """Inputs per second of a plan; 0 if its devices are gone."""
        if lost_devices(plan, self._present()):
            return 0.0
        now = (plan, self._carried(), *self.slower.items())
        if now not in self._sustained:
            self._sustained[now] = evaluate(plan, self.facts()).goodput_per_s
        return self._sustained[now]

    def best(self) -> float:
        plan = self.asked.best(self._carried(), self._true_factors(), self._present())
        return evaluate(plan, self.facts()).goodput_per_s

    def facts(self):
        return self.asked.facts(self._carried(), self._true_factors())

    def _carried(self) -> tuple[float, ...]:
        return carried(self.truth(self.now_s), self.full(self.now_s))

    def _true_factors(self) -> Corrections:
        return Corrections({kind: (factor,) * BLOCKS for kind, factor in self.slower.items()})

    def _present(self) -> Mapping[str, int]:
        return self.devices(self.now_s) or {device.kind: device.count for device in self.asked.fleet}

    def _exits(self, answered: int) -> tuple[int, ...]:
        """Inputs leave at the first open ramp at or behind where they are sure."""
        sure = self.random.multinomial(answered, -np.diff([*self.truth(self.now_s), 0.0]))
        exits, waiting = [], 0
        for block, count in enumerate(sure.tolist()):
            waiting += count
            leaves = block in self.running.ramps or block == BLOCKS - 1
            exits.append(waiting if leaves else 0)
            waiting = 0 if leaves else waiting
        return tuple(exits)

    def _launches(self, answered: int) -> dict[LaunchShape, LaunchTimes]:
        launches, reach, facts = {}, 1.0, self.facts()
        for split in self.running.splits:
            kind = self.running.placement_of(split).kind
            done = work(split, facts, kind, None, reach)
            times = int(answered * reach / split.batch_size / self.poor(self.running))  # they are less full
            launches[LaunchShape(kind, split.start, split.stop, split.batch_size)] = LaunchTimes(
                times, times * done.launch_s
            )
            reach = done.survivors
        return launches


class Cloud:
    """Brings the devices that are asked for `after_s` later, and takes at once what nobody asks for or uses.

    `stock` is what it really has, beside the devices that are there for ever (`own`). It brings nothing at all, as
    Ray's autoscaler, while more of a kind is asked for than in `offered`.
    """

    def __init__(
        self, app: Fluid, own: Mapping[str, int], stock: Mapping[str, int], after_s: float,
        offered: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.app, self.own, self.stock, self.after_s = app, dict(own), dict(stock), after_s
        self.offered = offered
        self.asked: dict[str, int] = {}
        self.all_asked: list[Mapping[str, int]] = []
        self._come: dict[str, list[float]] = {kind: [] for kind in stock}  # when each rented device comes
        app.devices = self.devices

    def ask(self, devices: Mapping[str, int]) -> None:
        self.asked = dict(devices)
        self.all_asked.append(self.asked)
        if self.refuses():
            return
        for kind, come in self._come.items():
            come += [self.app.now_s + self.after_s] * (min(self.stock[kind], self._rented(kind, devices)) - len(come))

    def refuses(self) -> bool:
        offered = self.asked if self.offered is None else self.offered
        return any(count > offered.get(kind, 0) for kind, count in self.asked.items())

    def _rented(self, kind: str, devices: Mapping[str, int]) -> int:
        return max(0, devices.get(kind, 0) - self.own.get(kind, 0))

    def devices(self, at_s: float) -> Mapping[str, int]:
        for kind, come in self._come.items():
            del come[max(self._rented(kind, each) for each in (self.asked, self.app.running.devices())) :]
        came = {kind: sum(at_s >= each for each in come) for kind, come in self._come.items()}
        return {kind: self.own.get(kind, 0) + came.get(kind, 0) for kind in {**self.own, **came}}

    def reclaim(self, kind: str) -> None:
        """Take one away, without asking."""
        del self._come[kind][0]
        self.stock[kind] -= 1


def control_loop(
    app: Fluid, folder: Path | None = None, pinned: Plan | None = None, cloud: Cloud | None = None,
    grow_to: Mapping[str, int] | None = None, offload: Offload = at_once, budget: Mapping[str, int] | None = None,
    **patience: float,
) -> ControlLoop:  # fmt: skip
    """The control loop as it starts, or starts again in the same folder. `budget`: it has an arbiter."""
    history, events = History(folder and folder / "exits.jsonl"), Events(folder and folder / "events.jsonl")
    terms, now_s = Patience(**patience), app.now_s
    controller = Controller(
        app.asked, terms, history, events, app.running, now_s, pinned, grow_to=grow_to, budget=budget
    )
    problem = {"request": cloud.ask, "refused": cloud.refuses} if cloud else {}
    return ControlLoop(app, controller, lambda: app.now_s, lambda: 0.0, offload, lambda event: None, **problem)


def run(app: Fluid, loop: ControlLoop, seconds: float, look_s: float = 30.0) -> list[Event]:
    """Look every `look_s` for so long; the events of that time."""
    first, until_s = loop.controller.record.number, app.now_s + seconds

    async def steps() -> None:
        while app.now_s < until_s:
            app.now_s += look_s
            await loop.step()

    asyncio.run(steps())
    return [event for event in loop.controller.record.events.all if event.number >= first]


def moves(events: list[Event]) -> list[Event]:
    """The events that changed the plan, or tried to."""
    return [event for event in events if event.what in ("rolled out", "rolled back", "failed")]


@cache  # many tests begin with it
def first_plan(problem: ClassifierPlanningProblem, survival: tuple[float, ...] | None = None) -> Plan:
    exits = problem.profile.exits
    return problem.best(survival or (exits.survival if exits else (1.0,) * BLOCKS), Corrections(), {})


def batches(plan: Plan, batch_size: int) -> Plan:
    """The same plan with smaller batches."""
    placements = tuple(
        replace(each, splits=tuple(replace(split, batch_size=batch_size) for split in each.splits))
        for each in plan.placements
    )
    return replace(plan, placements=placements)


def improvable(survival: tuple[float, ...] = MEDIUM) -> Fluid:
    """An application whose batches are smaller than those of its best plan."""
    problem = question(survival)
    return Fluid(problem, batches(first_plan(problem), 4))


async def until_it_moves(app: Fluid, loop: ControlLoop, grant: Callable[[], Awaitable[None]]) -> None:
    """Run the loop, and grant, until the application runs on other devices."""

    async def stays() -> bool:
        return True

    before, running = app.running.devices(), asyncio.create_task(loop.run(stays))
    await grant()
    async with asyncio.timeout(60):
        while app.running.devices() == before:
            await asyncio.sleep(0.01)
    running.cancel()


def granted(loop: ControlLoop, grant: Grant) -> None:
    """An arbiter's grant, and all that the controller does about it at once."""

    async def follow() -> None:
        await loop.grant(grant)
        await loop.act()

    asyncio.run(follow())
