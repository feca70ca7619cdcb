"""Applies the deployer's plans to a running front, with the replicas that are alive."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from deployments.config import AppConfig
from deployments.dispatch.dispatcher import Dispatcher
from deployments.front.counts import Counts
from deployments.front.driver import Driver
from deployments.front.messages import AskCounts, AskState, FrontMessage, FrontState, ReplicaShare
from deployments.front.stats import state_of
from deployments.front.workers import ServeWorkers
from deployments.graph import Graph
from deployments.planning import summary

log = logging.getLogger(__name__)
JOIN_WITHIN_S = 4.0
TELL_EVERY_S = 1.0
AGAIN_S = 0.5  # the wait between two attempts to reach the deployer


class Follower:
    """Must be kept for as long as its driver is used, since the replicas stay only while it listens."""

    def __init__(self, config: AppConfig, deployer: Any, directory: str) -> None:
        self._config, self._deployer = config, deployer
        self._name = uuid4().hex
        self._replicas: dict[str, Collection[str]] = {}  # by fleet
        self._kinds: dict[str, str] = {}  # of every replica so far
        self._workers = ServeWorkers(self._changed, config, directory)
        self._driver: Driver | None = None

    async def open(self, clock: Callable[[], float]) -> Driver:
        """Returns when every kind of the plan has replicas."""
        messages = self._lease()
        while (message := await anext(messages, None)) is None:  # a deployer of another configuration ends first
            await asyncio.sleep(AGAIN_S)
            messages = self._lease()
        self._graph: Graph = message.content
        await self._workers.open()
        await self._join(self._graph)
        limits = self._config.limits(1 / self._config.front_replicas)
        dispatcher = Dispatcher(self._graph.route, self._graph.members(self._replicas), limits)
        self._driver = Driver(dispatcher, self._workers, clock, Counts(self._kinds))
        self._listening = asyncio.create_task(self._listen(messages))
        if self._config.front_replicas > 1:
            self._telling = asyncio.create_task(self._tell_arrivals(self._driver))
        return self._driver

    @property
    def plan(self) -> str:
        """The plan in words."""
        return summary(self._graph.plan)

    @property
    def promised_per_s(self) -> float | None:
        """What the plan promises, if anything."""
        return self._graph.plan.promise.goodput_per_s if self._graph.plan.promise else None

    async def others(self) -> list[FrontState]:
        """The states of the other fronts of this application; none while no deployer runs that could ask them."""
        if self._config.front_replicas == 1:
            return []
        try:
            states: list[FrontState] = await self._deployer.states.remote(self._name)
        except Exception as error:
            log.warning("no deployer: %s: %s", type(error).__name__, error)
            return []
        return states

    def _lease(self) -> AsyncIterator[FrontMessage]:
        messages: AsyncIterator[FrontMessage] = self._deployer.options(stream=True).lease.remote(
            self._name, self._config
        )
        return messages

    async def _listen(self, messages: AsyncIterator[FrontMessage]) -> None:
        """Listen for ever: a killed deployer has a successor, which says at once which plan to follow."""
        while True:
            try:
                async for message in messages:
                    await self._receive(message)
            except Exception as error:
                log.warning("no deployer: %s: %s", type(error).__name__, error)
            await asyncio.sleep(AGAIN_S)
            messages = self._lease()

    async def _tell_arrivals(self, driver: Driver) -> None:
        """Say for ever what comes to this front, since its share of the replicas follows from that."""
        loop = asyncio.get_running_loop()
        before, since_s = driver.counts.arrivals, loop.time()
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            now, now_s = driver.counts.arrivals, loop.time()
            with suppress(Exception):  # there is no deployer at the moment
                await self._deployer.arrived.remote(self._name, (now - before) / (now_s - since_s))
            before, since_s = now, now_s

    async def _receive(self, message: FrontMessage) -> None:
        reply: object = None
        match message.content:
            case Graph():
                await self._follow(message.content)
            case ReplicaShare(share) if self._driver:
                self._driver.dispatcher.limit(self._config.limits(share))
                return
            case AskState() if self._driver:
                reply = state_of(self._driver)
            case AskCounts() if self._driver:
                benched = tuple((name, self._kinds[name]) for name in self._driver.benched())
                reply = replace(self._driver.counted().observed(self._graph.plan.num_blocks), benched=benched)
        await self._deployer.reply.remote(self._name, message.number, reply)

    async def _follow(self, graph: Graph) -> None:
        """Switch to the plan; inputs continue from their blocks, and running launches are not disturbed."""
        if graph.version == self._graph.version:
            return
        with suppress(TimeoutError):  # they ran a moment ago; if they have gone, Serve announces their successors
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
        self._driver.dispatcher.reroute(self._graph.route, self._graph.members(self._replicas))
        self._driver.pump()
