"""A front's share in a running plan: it follows where the deployer leads, with the replicas that are alive."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from typing import Any
from uuid import uuid4

from deployments.config import AppConfig
from deployments.dispatcher import Dispatcher
from deployments.driver import Driver
from deployments.front.counting import Counting
from deployments.front.stats import Seen, Tell, seen_by
from deployments.graph import Graph
from deployments.planning import summary
from deployments.replicas.serve_workers import ServeWorkers
from deployments.rollout.fronts import Dealt, Letter
from deployments.rollout.shares import shared_out

log = logging.getLogger(__name__)
JOIN_WITHIN_S = 4.0
AGAIN_S = 0.5  # between two attempts to reach the deployer


class Follower:
    """Must be kept for as long as its driver is used: the replicas stay while it listens."""

    def __init__(self, config: AppConfig, deployer: Any) -> None:
        self._config, self._deployer = config, deployer
        self._name = uuid4().hex
        self._replicas: dict[str, Collection[str]] = {}  # of each fleet
        self._kinds: dict[str, str] = {}  # of each replica there ever was
        self._workers = ServeWorkers(self._changed, config.by_value_bytes)
        self._driver: Driver | None = None

    async def open(self, clock: Callable[[], float]) -> Driver:
        """Returns when every kind of the plan has replicas."""
        letters = self._lease()
        while (letter := await anext(letters, None)) is None:  # that deployer is another configuration's: ours comes
            await asyncio.sleep(AGAIN_S)
            letters = self._lease()
        self._graph: Graph = letter.content
        await self._workers.open()
        await self._join(self._graph)
        dispatcher = Dispatcher(self._graph.route, self._members(), self._config.limits(self._config.front_replicas))
        self._driver = Driver(dispatcher, self._workers, clock, Counting(self._kinds))
        self._listening = asyncio.create_task(self._listen(letters))
        return self._driver

    @property
    def plan(self) -> str:
        """In words."""
        return summary(self._graph.plan)

    async def others(self) -> list[Seen]:
        """What the other fronts of this application have seen; nothing while there is no deployer to ask for it."""
        if self._config.front_replicas == 1:
            return []
        try:
            seen: list[Seen] = await self._deployer.seen.remote(self._name)
        except Exception as error:
            log.warning("no deployer: %s: %s", type(error).__name__, error)
            return []
        return seen

    def _lease(self) -> AsyncIterator[Letter]:
        letters: AsyncIterator[Letter] = self._deployer.options(stream=True).lease.remote(self._name, self._config)
        return letters

    async def _listen(self, letters: AsyncIterator[Letter]) -> None:
        """For ever: a deployer that is killed has a successor, which says at once where it leads."""
        while True:
            try:
                async for letter in letters:
                    await self._obey(letter)
            except Exception as error:
                log.warning("no deployer: %s: %s", type(error).__name__, error)
            await asyncio.sleep(AGAIN_S)
            letters = self._lease()

    async def _obey(self, letter: Letter) -> None:
        reply: object = None
        match letter.content:
            case Graph():
                await self._follow(letter.content)
            case Dealt(fronts) if self._driver:
                self._driver.dispatcher.limit(self._config.limits(fronts))
                return
            case Tell() if self._driver:
                reply = seen_by(self._driver)
            case _ if self._driver:
                reply = self._driver.counting.observed(self._graph.plan.num_blocks)
        await self._deployer.reply.remote(self._name, letter.number, reply)

    async def _follow(self, graph: Graph) -> None:
        """Inputs go on from where they stand; nothing that runs is disturbed."""
        if graph.version == self._graph.version:
            return
        with suppress(TimeoutError):  # they ran a moment ago: if all are gone now, their successors are heard of
            await asyncio.wait_for(self._join(graph), JOIN_WITHIN_S)
        self._graph = graph
        self._reroute()

    async def _join(self, graph: Graph) -> None:
        await asyncio.gather(*(self._workers.join(fleet) for fleet in graph.fleets.values()))

    def _changed(self, fleet: str, replicas: Collection[str]) -> None:
        self._replicas[fleet] = replicas
        self._kinds |= dict.fromkeys(replicas, fleet.rpartition(".")[2])
        if self._driver:
            self._reroute()

    def _reroute(self) -> None:
        assert self._driver, "This is a bug: there is nothing to reroute yet."
        self._driver.dispatcher.reroute(self._graph.route, self._members())
        self._driver.pump()

    def _members(self) -> dict[str, list[str]]:
        """Who works for each group of the plan."""
        members: dict[str, list[str]] = {}
        for kind, fleet in self._graph.fleets.items():
            groups = {name: each.replicas for name, each in self._graph.groups.items() if each.kind == kind}
            members |= shared_out(self._replicas.get(fleet, ()), groups)
        return members
