"""The controller around its core: look, decide, roll out; the same for a live application and for a simulated one."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cluster.controller.application import Application, RolloutError
from cluster.controller.core import Core, Decision
from cluster.controller.events import Event
from optimizer.plan import Plan

log = logging.getLogger("isobatch.controller")
T = TypeVar("T")


class Offload(Protocol):
    """Run something that takes long where requests do not wait for it."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> Coroutine[Any, Any, T]: ...


async def at_once(function: Callable[..., T], /, *arguments: Any) -> T:
    """For those who have nothing else to do meanwhile."""
    return function(*arguments)


@dataclass
class Effort:
    """What the controller itself costs."""

    windows: int = 0
    looks: int = 0
    window_s: float = 0.0
    look_s: float = 0.0


class Controller:
    """One step is one look. `clock` is the time of day, `stopwatch` measures what steps cost."""

    def __init__(
        self,
        application: Application,
        core: Core,
        clock: Callable[[], float],
        stopwatch: Callable[[], float],
        offload: Offload = at_once,
        told: Callable[[Event], None] = lambda event: log.info("%s: %s", event.what, event.why),
    ) -> None:
        self.core, self.effort = core, Effort()
        self.trouble: str | None = None  # why nothing could be seen lately
        self._application, self._clock, self._stopwatch, self._offload = application, clock, stopwatch, offload
        self._told = told
        self._turn = asyncio.Lock()  # a person may ask while the loop looks

    async def step(self) -> None:
        async with self._turn:
            await self._step()

    async def _step(self) -> None:
        observed = await self._application.observe()
        self.core.follow(await self._application.plan(), self._clock())
        begun_s = self._stopwatch()
        decision = await self._offload(self.core.look, observed, self._clock())
        self._count(decision is not None, self._stopwatch() - begun_s)
        if decision:
            await self._follow(decision)

    async def force(self) -> Event:
        """Close the window now, and take the best plan there is."""
        async with self._turn:
            self.core.follow(await self._application.plan(), self._clock())
            return await self._follow(await self._offload(self.core.force, self._clock()))

    async def would(self) -> Event:
        """What would be decided now."""
        async with self._turn:
            decision: Decision = await self._offload(self.core.would, self._clock())
        return decision.event

    def pause(self, paused: bool) -> None:
        self.core.pause(self._clock(), paused)

    async def _follow(self, decision: Decision) -> Event:
        self._told(decision.event)
        if decision.plan:
            await self._roll_out(decision, decision.plan)
        return self.core.record.events.last or decision.event

    async def _roll_out(self, decision: Decision, plan: Plan) -> None:
        begun_s = self._clock()
        try:
            await self._application.roll_out(plan)
        except RolloutError as error:
            log.warning("the plan from before runs again: %s", error)
            self.core.failed(decision, str(error), self._clock())
        else:
            self.core.rolled_out(decision, self._clock() - begun_s, self._clock())

    def _count(self, window: bool, seconds: float) -> None:
        if window:
            self.effort.windows += 1
            self.effort.window_s += seconds
        else:
            self.effort.looks += 1
            self.effort.look_s += seconds
