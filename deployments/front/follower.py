"""Applies the deployer's plans to a running front, with the replicas that run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.front.counts import Counts
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.messages import AskCounts, AskState, FrontMessage, FrontState, ReplicaShare
from isobatch.deployments.front.stats import state_of
from isobatch.deployments.front.workers import ServeWorkers
from isobatch.deployments.graph import Graph
from isobatch.deployments.planning import summary

log = logging.getLogger(__name__)
# The time to reach the replicas of a new plan. Any that are missing join later.
JOIN_WITHIN_S = 4.0
# The time between two reports of this front's arrivals.
REPORT_EVERY_S = 1.0
# The wait between two attempts to reach the deployer.
RETRY_AFTER_S = 0.5


class Follower:
    """Holds the lease on the replicas, so it must live for as long as its driver is used."""

    def __init__(self, config: AppConfig, deployer: Any, directory: str) -> None:
        self._config, self._deployer = config, deployer
        self._name = uuid4().hex
        self._replicas: dict[str, Collection[str]] = {}  # by fleet
        self._kinds: dict[str, str] = {}  # kinds of devices, by replica
        self._workers = ServeWorkers(self._changed, config, directory)
        self._driver: Driver | None = None

    async def open(self, clock: Callable[[], float]) -> Driver:
        """Follow the deployer's plan; returns when each of its fleets has replicas."""
        messages = self._lease()
        while (message := await anext(messages, None)) is None:  # a deployer of another configuration ends first
            await asyncio.sleep(RETRY_AFTER_S)
            messages = self._lease()
        self._graph: Graph = message.content
        await self._workers.open()
        await self._join(self._graph)
        limits = self._config.limits(1 / self._config.front_replicas)
        dispatcher = Dispatcher(self._graph.route, self._graph.members(self._replicas), limits)
        self._driver = Driver(dispatcher, self._workers, clock, Counts(self._kinds))
        self._listening = asyncio.create_task(self._listen(messages))
        if self._config.front_replicas > 1:
            self._reporting = asyncio.create_task(self._report_arrivals(self._driver))
        return self._driver

    @property
    def plan(self) -> str:
        """The plan in words."""
        return summary(self._graph.plan)

    @property
    def promised_per_s(self) -> float | None:
        """The inputs per second that the plan promises, if any."""
        return self._graph.plan.promise.goodput_per_s if self._graph.plan.promise else None

    async def others(self) -> list[FrontState]:
        """The states of the application's other fronts; empty while no deployer runs."""
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
        """Receive messages for ever. If the deployer is killed, its successor sends the present plan at once."""
        while True:
            try:
                async for message in messages:
                    await self._receive(message)
            except Exception as error:
                log.warning("no deployer: %s: %s", type(error).__name__, error)
            await asyncio.sleep(RETRY_AFTER_S)
            messages = self._lease()

    async def _report_arrivals(self, driver: Driver) -> None:
        """Report the arrivals of this front for ever: the deployer computes its share of the replicas from them."""
        loop = asyncio.get_running_loop()
        before, since_s = driver.counts.arrivals, loop.time()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            now, now_s = driver.counts.arrivals, loop.time()
            with suppress(Exception):  # no deployer runs at the moment
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
        """Switch to another plan. Inputs go on from their blocks, and running launches are not disturbed."""
        if graph.version == self._graph.version:
            return
        with suppress(TimeoutError):  # replicas that have just gone get successors, which join later
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
        assert self._driver, "This is a bug: there is no driver yet."
        self._driver.dispatcher.reroute(self._graph.route, self._graph.members(self._replicas))
        self._driver.pump()
