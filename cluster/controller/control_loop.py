"""Drives the controller: it observes, asks for a decision and rolls out, for live applications and simulated ones."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol, TypeVar

from isobatch.cluster.controller.application import Application, RolloutError
from isobatch.cluster.controller.arbiter import Grant
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.decide import is_refusing, lost_devices, served_alike
from isobatch.cluster.controller.fleet_division import Standing
from isobatch.cluster.controller.record import Event, NextStep
from isobatch.deployments.front.observed import Observed, merged
from isobatch.deployments.serve_process import own_task
from isobatch.optimizer.plan import Plan

log = logging.getLogger(__name__)
T = TypeVar("T")


class Offload(Protocol):
    """Runs a slow function in another thread, so that requests do not wait for it."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> Coroutine[Any, Any, T]: ...


async def at_once(function: Callable[..., T], /, *arguments: Any) -> T:
    """An `Offload` without a thread, for callers that serve no requests."""
    return function(*arguments)


@dataclass
class Spent:
    windows: int = 0
    looks: int = 0
    window_s: float = 0.0
    look_s: float = 0.0


@dataclass
class ControlLoop:
    """One step is one look. `clock` is the time of day, `stopwatch` measures the cost of steps.

    `report` is called with every decision; `request` asks Ray's autoscaler for devices, and `refused` says whether the
    autoscaler cannot provide all of them.
    """

    application: Application
    controller: Controller
    clock: Callable[[], float]
    stopwatch: Callable[[], float]
    offload: Offload = at_once
    report: Callable[[Event], None] = lambda event: log.info("%s: %s", event.what, event.why)
    request: Callable[[Mapping[str, int]], None] = lambda devices: None
    refused: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.spent = Spent()
        self.decided: Counter[str] = Counter()  # decisions by the kind of their event
        self.trouble: str | None = None  # why the last look failed
        self._requested: Mapping[str, int] | None = None  # the last request to the autoscaler
        self._pending = list[Observed]()  # observations since the last look
        self._looked_s = -inf
        self._turn = asyncio.Lock()  # a person may send a command while the loop looks
        self._deciding = asyncio.Lock()  # the controller is not thread-safe
        self._commands = set[asyncio.Task[Any]]()  # commands of persons that are being executed
        self._previewing: asyncio.Task[Event] | None = None
        self._granted = asyncio.Event()
        self._rolled_out: Mapping[str, int] = {}  # the devices of the plan that is being rolled out

    def continue_from(self, before: "ControlLoop") -> None:
        """Continue after the loop of another configuration: its counts, pause, and meaning of thresholds."""
        self.spent, self.decided = before.spent, before.decided
        running, keeper, known = self.controller.running, self.controller.keeper, before.controller.keeper
        ran = before.controller.running
        stays = served_alike(ran, running) and ran.thresholds == running.thresholds  # also where no ramp is open
        if keeper and known and (running.thresholds or stays):
            keeper.resume(known.worse, running, known.relaxed)
        self.controller.redeployed(before.controller, self.clock())
        if before.controller.record.paused:
            self.controller.pause(self.clock())

    async def run(self, stays: Callable[[], Awaitable[bool]]) -> None:
        """Look until the application has another configuration. A look that fails is logged, and the next follows."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._granted.wait(), self.controller.patience.react_every_s)
            try:
                if self._granted.is_set():
                    await self.act()
                elif self.is_due and not await stays():
                    return
                else:
                    await self.step()
                self.trouble = None
            except Exception as error:
                if self.trouble is None:
                    log.warning("the controller could not look: %s", error, exc_info=True)
                self.trouble = f"{type(error).__name__}: {error}"

    @property
    def is_due(self) -> bool:
        """Whether the next regular look is due at about this time."""
        patience, since_s = self.controller.patience, self.clock() - self._looked_s
        return since_s < 0 or since_s >= patience.look_every_s - patience.react_every_s / 2

    async def step(self) -> None:
        """Look, if a look is due, or if inputs are refused and another plan could help."""
        async with self._turn:
            due = self.is_due
            self._pending.append(await self.application.observe(devices=due))
            observed = merged(self._pending)
            if due or self.controller.must_look(observed, self.clock()):
                await self._look(observed)

    async def _look_now(self) -> None:
        self._pending.append(await self.application.observe())
        await self._look(merged(self._pending))

    async def _look(self, observed: Observed) -> None:
        plan = await self.application.plan()
        self._pending, self._looked_s = [], self.clock()
        await self._call(self.controller.follow, plan, self.clock())
        begun_s = self.stopwatch()
        step = await self._call(self.controller.look, observed, self.clock())
        self._count(step is not None, self.stopwatch() - begun_s)
        try:
            await self._request_devices(self.controller.requested, anew=step is not None)
        finally:  # a decision is executed even if the autoscaler cannot be reached
            if step:
                await self._execute(step)

    async def _request_devices(self, devices: Mapping[str, int], anew: bool) -> None:
        """Repeat the request at every decision, because a restarted Ray has forgotten it."""
        if devices and devices == self._requested and await self.offload(self.refused):
            await self._call(self.controller.requests_refused, self.clock())
            devices = self.controller.requested
        if anew or devices != self._requested:
            self._requested = None
            await self.offload(self.request, devices)
            self._requested = devices

    async def force(self) -> Event:
        """Close the window now, and take the best plan. An exploration is ended before."""
        return await self._shielded(self._force())

    async def preview(self) -> Event:
        """The decision that would be made now; nothing changes. Callers share one that has begun: each plans anew."""
        if self._previewing is None or self._previewing.done():
            self._previewing = own_task(self._preview(), self._commands)
        return await asyncio.shield(self._previewing)

    async def pause(self, paused: bool) -> None:
        """A decision that is being made is not executed; a roll-out that has begun continues."""
        await self._shielded(self._pause(paused))

    async def standing(self) -> Standing:
        """The facts of this application that an arbiter needs."""
        if self.controller.window.latest is None:
            raise ConnectionError("the controller has not looked at the application yet")
        standing = await self._call(Standing.of, self.controller, self._rolled_out, self.clock())
        if not (self._rolled_out and self._pending):
            return standing
        latest = self._pending[-1].counted_in(self.controller.running.length)
        expected_per_s = max(standing.expected_per_s, latest.arrivals_per_s)
        return replace(standing, refuses=is_refusing(latest), expected_per_s=expected_per_s)

    async def grant(self, grant: Grant) -> None:
        """Plan on other devices from now on: `act`, which `run` calls next, changes to them."""
        # Other grants only choose replicas, and do not wait for a decision that is being made.
        if grant.why or grant.parked or self.controller.window.parked:
            async with self._deciding:
                self.controller.grant(grant.budget, grant.why, self.clock(), grant.parked)
                self.decided["granted"] += bool(grant.why)
        try:
            if grant.parked:
                await self.application.park(self.controller.record.wakes_in_s)
            elif grant.device_ids is not None:
                await self.application.use(grant.device_ids)
        finally:  # the budget has changed even if the fronts cannot be reached
            self._granted.set()

    async def act(self) -> None:
        """End an exploration, look, and roll out the plan that follows from a grant. Then another look is due."""
        self._granted.clear()
        try:
            async with self._turn:
                explores = self.controller.exploring is not None
                await self._look_now()
                if explores:
                    await self._look_now()
        finally:
            self._looked_s = -inf

    async def _shielded(self, command: Coroutine[Any, Any, T]) -> T:
        """Execute a command of a person, even if the connection to that person is closed."""
        return await asyncio.shield(own_task(command, self._commands))

    async def _force(self) -> Event:
        async with self._turn:
            await self._look_now()
            await self._call(self.controller.follow, await self.application.plan(), self.clock())
            return await self._execute(await self._call(self.controller.force, self.clock()))

    async def _preview(self) -> Event:
        async with self._turn:
            step = await self._call(self.controller.preview, self.clock())
        return step.event

    async def _pause(self, paused: bool) -> None:
        async with self._deciding:
            self.controller.pause(self.clock(), paused)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        async with self._deciding:
            return await self.offload(function, *arguments)

    async def _execute(self, step: NextStep) -> Event:
        self.decided[step.event.what] += 1
        self.report(step.event)
        if step.plan and (obstacle := self._obstacle(step.event, step.plan)):
            await self._failed(step, obstacle, blameless=True, tried=False)
        elif step.plan:
            await self._roll_out(step, step.plan)
        return self.controller.record.events.numbered(step.event.number) or step.event

    def _obstacle(self, event: Event, plan: Plan) -> str:
        """Why a command that arrived meanwhile forbids the chosen plan; empty: it may be rolled out."""
        if self.controller.record.paused and event.what != "looked":
            return "the controller was paused meanwhile"
        parked, budget = self.controller.window.parked, self.controller.present.budget
        if parked and event.what != "waking":
            return "the application was parked meanwhile"
        running = {} if parked else self.controller.running.devices()
        taken = lost_devices(plan, {kind: max(running.get(kind, 0), count) for kind, count in budget.items()})
        return f"the budget has shrunk meanwhile: {taken}" if taken else ""

    async def _roll_out(self, step: NextStep, plan: Plan) -> None:
        begun_s, self._rolled_out = self.clock(), plan.devices()
        watching = asyncio.create_task(self._watch())
        try:
            await self.application.roll_out(plan)
        except RolloutError as error:
            log.warning("the previous plan runs again: %s", error)
            await self._failed(step, str(error), error.blameless)
        except Exception as error:  # the deployer has ended, for instance: the next look sees which plan runs
            await self._failed(step, f"{type(error).__name__}: {error}", blameless=True, tried=False)
            raise
        else:
            await self._call(self.controller.rolled_out, step, self.clock() - begun_s, self.clock())
        finally:
            watching.cancel()
            self._rolled_out = {}

    async def _watch(self) -> None:
        """Observe until cancelled, and decide nothing: replicas may take minutes to start, and some fronts may end."""
        while True:
            await asyncio.sleep(self.controller.patience.look_every_s)
            with suppress(Exception):  # the next look says why the application does not answer
                observed = await self.application.observe(devices=False)
                self._pending.append(observed)

    async def _failed(self, step: NextStep, reason: str, blameless: bool, tried: bool = True) -> None:
        await self._call(self.controller.failed, step, reason, self.clock(), blameless, tried)

    def _count(self, window: bool, seconds: float) -> None:
        if window:
            self.spent.windows += 1
            self.spent.window_s += seconds
        else:
            self.spent.looks += 1
            self.spent.look_s += seconds
