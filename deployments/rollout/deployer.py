"""Brings a plan's replicas to life, leads all fronts from one plan to another, and ends with the front application."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ray import serve
from ray.serve import Application

from deployments.config import AppConfig
from deployments.front.observed import Observed
from deployments.front.stats import Seen, Tell
from deployments.graph import Graph, graph_of, mark_of, origin_of, profile_of, read_graph
from deployments.planning import plan_for_fewer
from deployments.replicas.placed import needs
from deployments.rollout.fleet import ServeFleet, delete_fleets
from deployments.rollout.fronts import Fronts, Letter
from deployments.rollout.memory import Memory, forget, recall
from deployments.rollout.steps import CannotStartError, Moved, Undone, move, risen
from optimizer.plan import Plan
from profiles.errors import UserError

log = logging.getLogger("ray.serve")
T = TypeVar("T")
DEPLOYER = "deployer"  # what the deployment is called
PATIENCE_S = 600.0  # until a plan's replicas run: a network may be large
FOLLOW_WITHIN_S = 5.0
COUNT_WITHIN_S = 2.0


@dataclass(frozen=True)
class Count:
    """What a front is asked when somebody wants to know what it has counted."""


class Deployer:
    """Lives in the front application. `bind` makes the application of so many replicas of one kind.

    It may be killed at any time: what Serve runs goes on, fronts follow the plan they know, and the next deployer
    remembers which one that is.
    """

    def __init__(self, config: AppConfig, bind: Callable[[str, int], Application]) -> None:
        self._application = serve.get_replica_context().app_name
        self._config, self._profile = config, profile_of(config)
        self._fleet = ServeFleet(f"{self._application}.{mark_of(config)}", bind, partial(needs, config))
        self._fronts = Fronts()
        self._starting, self._moving = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = self._leading = False
        self._cannot: CannotStartError | None = None
        self._graph = self._first()

    # What fronts ask

    async def lease(self, front: str, config: AppConfig) -> AsyncIterator[Letter]:
        """What this front is told and asked, beginning with the plan, once its replicas run.

        They stay for as long as anybody listens: Serve lets a replica finish its calls before it takes it down, so this
        one is kept while a front drains. A front of another configuration has another deployer: it hears nothing.
        """
        if config != self._config:
            return
        async with self._starting:
            await self._start()
        async for letter in self._fronts.letters(front, self._graph):
            yield letter

    async def reply(self, front: str, number: int, content: object) -> None:
        self._fronts.reply(front, number, content)

    # What whoever leads the application asks

    async def config(self) -> AppConfig:
        return self._config

    async def plan(self) -> str:
        return self._graph.plan.to_json()

    async def seen(self, front: str) -> list[Seen]:
        """What all fronts but this one have seen, those that are alive."""
        replies = await self._fronts.ask(Tell(), COUNT_WITHIN_S)
        return [reply for name, reply in replies.items() if name != front and isinstance(reply, Seen)]

    async def counted(self) -> dict[str, Observed]:
        """By front. One that has died is not among them."""
        return await self._fronts.ask(Count(), COUNT_WITHIN_S)

    async def apply(self, plan: str, patience_s: float = PATIENCE_S) -> Moved | Undone:
        """Lead the application to another plan. Whoever asked for it may go meanwhile: it is brought to an end."""
        if self._leading or not self._running:
            return Undone("another plan is being rolled out" if self._running else "the application is not running yet")
        self._leading = True
        return await asyncio.shield(self._task(self._apply(plan, patience_s)))

    async def _apply(self, plan: str, patience_s: float) -> Moved | Undone:
        async with self._moving:  # what is just being tidied up is waited for
            try:
                before, after = self._graph.plan, self._graph_of(plan, self._graph.version + 1).plan
                return await move(self._fleet, before, after, self._lead, self._meanwhile, patience_s)
            except (UserError, CannotStartError) as error:
                return Undone(str(error))
            except Exception as error:
                log.exception("a plan could not be rolled out")
                return Undone(f"{type(error).__name__}: {error}")
            finally:
                self._leading = False

    async def _lead(self, plan: Plan) -> None:
        """From here on a deployer that is restarted goes forward to this plan, not back."""
        self._graph = self._graph_of(plan.to_json(), self._graph.version + 1)
        self._remember()
        await self._fronts.ask(self._graph, FOLLOW_WITHIN_S)

    async def _meanwhile(self, counts: Mapping[str, int]) -> Plan | None:
        """What runs best on the devices that stay, while others are freed for those to come; None: nothing can."""
        return await asyncio.to_thread(plan_for_fewer, self._graph.plan, counts, self._config, self._profile)

    # How it begins and ends

    def _first(self) -> Graph:
        """The plan that runs, if the user's file still names the one that it began with."""
        memory = recall(self._application)
        self._origin, self._recalled = origin_of(self._config), bool(memory and memory.fleet == self._fleet.prefix)
        if memory and memory.origin == self._origin:
            return self._graph_of(memory.plan, memory.version)
        return self._graph_of(read_graph(self._config).plan.to_json(), memory.version + 1 if memory else 0)

    def _graph_of(self, plan: str, version: int) -> Graph:
        return graph_of(Plan.from_json(plan), self._profile, self._config, version, self._fleet.prefix)

    async def _start(self) -> None:
        if self._running:
            return
        counts = self._graph.plan.devices()
        if self._recalled:  # it has run before: what does not come up now must not keep fronts from using the rest
            await asyncio.to_thread(self._fleet.want, counts)
        elif self._cannot:
            raise self._cannot  # what Serve says of it stays to be read: it is not tried again
        else:
            await self._rise(counts)
        memory = recall(self._application)
        self._remember()
        self._running = True
        if memory and memory.ended:
            await asyncio.to_thread(delete_fleets, self._application, but=self._fleet.prefix)
        self._task(self._tidy_later())

    async def _rise(self, counts: Mapping[str, int]) -> None:
        try:
            await risen(self._fleet, counts, PATIENCE_S)
        except CannotStartError as error:
            self._cannot = error
            raise

    def _remember(self) -> None:
        Memory(self._fleet.prefix, self._origin, self._graph.version, self._graph.plan.to_json()).keep(
            self._application
        )

    async def _tidy_later(self) -> None:
        """What a deployer from before has left behind; its fronts have drained by then."""
        await asyncio.sleep(2 * self._config.drain_s)
        async with self._moving:
            await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        self._fleet.want(dict.fromkeys(self._fleet.standing(), 0) | self._graph.plan.devices())
        delete_fleets(self._application, but=self._fleet.prefix)

    def _task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __del__(self) -> None:
        """Serve calls it when this one has no more calls: all its fronts have gone."""
        with contextlib.suppress(Exception):
            application, memory = serve.status().applications.get(self._application), recall(self._application)
            if application is None or application.status.value == "DELETING" or DEPLOYER not in application.deployments:
                delete_fleets(self._application)
                forget(self._application)
            elif memory and memory.fleet != self._fleet.prefix:
                self._fleet.delete()  # the next deployer has made others
            elif memory:
                replace(memory, ended=True).keep(self._application)  # the next one decides what it can use
