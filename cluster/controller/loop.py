"""Drives the controller: it observes, asks for a decision and rolls out, for live applications and simulated ones."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar

from cluster.controller.application import Application, RolloutError
from cluster.controller.core import Controller, NextStep
from cluster.controller.record import Event
from deployments.front.observed import Observed, merged
from optimizer.plan import Plan

log = logging.getLogger(__name__)
T = TypeVar("T")


class Offload(Protocol):
    """Runs something that takes long where requests do not wait for it."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> Coroutine[Any, Any, T]: ...


async def at_once(function: Callable[..., T], /, *arguments: Any) -> T:
    """An `Offload` for callers that have nothing else to do meanwhile."""
    return function(*arguments)


@dataclass
class Spent:
    """What the controller itself costs."""

    windows: int = 0
    looks: int = 0
    window_s: float = 0.0
    look_s: float = 0.0


class ControlLoop:
    """One step is one look. `clock` is the time of day, `stopwatch` measures what steps cost.

    `ask` tells Ray's autoscaler how many devices should be there.
    """

    def __init__(
        self,
        application: Application,
        controller: Controller,
        clock: Callable[[], float],
        stopwatch: Callable[[], float],
        offload: Offload = at_once,
        told: Callable[[Event], None] = lambda event: log.info("%s: %s", event.what, event.why),
        ask: Callable[[Mapping[str, int]], None] = lambda devices: None,
    ) -> None:
        self.controller, self.spent = controller, Spent()
        self.decided: Counter[str] = Counter()  # decisions, by what they were
        self.trouble: str | None = None  # why the last look failed
        self._application, self._clock, self._stopwatch, self._offload = application, clock, stopwatch, offload
        self._told, self._ask = told, ask
        self._asked: Mapping[str, int] | None = None  # what the autoscaler was told last
        self._unseen, self._looked_s = (
            list[Observed](),
            -inf,
        )  # what was observed since the last look, and when that was
        self._turn = asyncio.Lock()  # a person may ask while the loop looks
        self._thinking = asyncio.Lock()  # while the controller thinks, nobody tells it anything
        self._asked_for = set[asyncio.Task[Any]]()  # by persons, and under way

    def go_on_from(self, before: "ControlLoop") -> None:
        """The application was deployed anew while that one looked: what it counted is counted on."""
        self.spent, self.decided = before.spent, before.decided
        self.controller.deployed_anew(before.controller, self._clock())

    async def run(self, stays: Callable[[], Awaitable[bool]]) -> None:
        """Look for as long as the application stays what it was. Whatever fails in one look, the next one comes."""
        while True:
            await asyncio.sleep(self.controller.patience.react_every_s)
            try:
                if self.is_due and not await stays():
                    return
                await self.step()
                self.trouble = None
            except Exception as error:
                if self.trouble is None:
                    log.warning("the controller could not look: %s", error, exc_info=True)
                self.trouble = f"{type(error).__name__}: {error}"

    @property
    def is_due(self) -> bool:
        """Whether so much time has passed since the last look that the next one is due, at about this moment."""
        patience, since_s = self.controller.patience, self._clock() - self._looked_s
        return since_s < 0 or since_s >= patience.look_every_s - patience.react_every_s / 2

    async def step(self) -> None:
        """Look, if that is due, or if inputs are refused and something can be done about it."""
        async with self._turn:
            due = self.is_due
            self._unseen.append(await self._application.observe(devices=due))
            observed = merged(self._unseen)
            if due or self.controller.must_look(observed, self._clock()):
                await self._look(observed)

    async def _look(self, observed: Observed) -> None:
        plan = await self._application.plan()
        self._unseen, self._looked_s = [], self._clock()
        self.controller.follow(plan, self._clock())
        begun_s = self._stopwatch()
        step = await self._think(self.controller.look, observed, self._clock())
        self._count(step is not None, self._stopwatch() - begun_s)
        try:
            await self._tell_autoscaler(self.controller.requested, anew=step is not None)
        finally:  # if it cannot be asked, what can be done without it is done
            if step:
                await self._take(step)

    async def _tell_autoscaler(self, devices: Mapping[str, int], anew: bool) -> None:
        """Again at every decision, as a Ray that was restarted has forgotten it."""
        if anew or devices != self._asked:
            self._asked = None
            await self._offload(self._ask, devices)
            self._asked = devices

    async def force(self) -> Event:
        """Close the window now, and take the best plan there is. A look with all ramps open is ended before."""
        return await self._to_its_end(self._force())

    async def would(self) -> Event:
        """What would be decided now."""
        return await self._to_its_end(self._would())

    async def pause(self, paused: bool) -> None:
        """What is being thought about is not done any more; a roll-out that has begun goes on."""
        await self._to_its_end(self._pause(paused))

    async def _to_its_end(self, asked: Coroutine[Any, Any, T]) -> T:
        """What a person asked for, even if that person goes away meanwhile."""
        task = asyncio.create_task(asked)
        self._asked_for.add(task)
        task.add_done_callback(self._asked_for.discard)
        return await asyncio.shield(task)

    async def _force(self) -> Event:
        async with self._turn:
            self._unseen.append(await self._application.observe())
            await self._look(merged(self._unseen))
            self.controller.follow(await self._application.plan(), self._clock())
            return await self._take(await self._think(self.controller.force, self._clock()))

    async def _would(self) -> Event:
        async with self._turn:
            step = await self._think(self.controller.would, self._clock())
        return step.event

    async def _pause(self, paused: bool) -> None:
        async with self._thinking:
            self.controller.pause(self._clock(), paused)

    async def _think(self, function: Callable[..., T], *arguments: Any) -> T:
        async with self._thinking:
            return await self._offload(function, *arguments)

    async def _take(self, step: NextStep) -> Event:
        self.decided[step.event.what] += 1
        self._told(step.event)
        if step.plan and self.controller.record.paused and step.event.what != "looked":
            self.controller.failed(step, "the controller was paused meanwhile", self._clock(), blameless=True)
        elif step.plan:
            await self._roll_out(step, step.plan)
        return self.controller.record.events.numbered(step.event.number) or step.event

    async def _roll_out(self, step: NextStep, plan: Plan) -> None:
        begun_s = self._clock()
        try:
            await self._application.roll_out(plan)
        except RolloutError as error:
            log.warning("the plan from before runs again: %s", error)
            self.controller.failed(step, str(error), self._clock(), blameless=error.no_devices)
        else:
            await self._think(self.controller.rolled_out, step, self._clock() - begun_s, self._clock())

    def _count(self, window: bool, seconds: float) -> None:
        if window:
            self.spent.windows += 1
            self.spent.window_s += seconds
        else:
            self.spent.looks += 1
            self.spent.look_s += seconds
