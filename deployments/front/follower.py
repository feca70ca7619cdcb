"""Applies the deployer's plans to a running front, and sends its orders to the replicas that run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
from msgspec import structs
from ray import serve

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.front import router
from isobatch.deployments.front.counts import Counts
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.messages import FrontMessage, FrontState, Question, ReplicaShare
from isobatch.deployments.front.observed import StandbyReplica
from isobatch.deployments.front.stats import state_of
from isobatch.deployments.graph import Graph
from isobatch.deployments.planning import summary
from isobatch.deployments.ray_facts import kind_in, wire_of
from isobatch.deployments.replica.loading import weights_in
from isobatch.deployments.replica.serve_replica import DEPLOYMENT
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings, Share
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.packed import Packed, join, joined
from isobatch.deployments.transport.replica_connection import ReplicaAddress, ReplicaConnection, connect_to
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import differ
from isobatch.profiles.model import SplitModel

log = logging.getLogger(__name__)
# The time to reach the replicas of a new plan, and for these to warm up. After that the plan is followed as it is:
# missing replicas join later, and cold ones get orders between their full batches.
JOIN_WITHIN_S = 4.0
OPEN_WITHIN_S = 60.0  # the same for a front that starts: until it has replicas, it gets no requests
OTHERS_WITHIN_S = 4.0  # for the counts of other fronts: the deployer gives fronts 2 s, HAProxy a health check 5 s
REPORT_EVERY_S = 1.0  # the time between two reports of this front's arrivals
RETRY_AFTER_S = 0.5  # the wait between two attempts to reach the deployer
STANDBY_AGAIN_S = 5.0  # the same for replicas that only stand by, whose start may take minutes
STUCK_S = 5.0  # a launch that still runs this long after its time limit counts as hung, and its replica is ended
CONNECT_WITHIN_S = 5.0  # the time to connect to a replica
# The time for a replica to run full batches of the plan. After that it is used even if it has not.
WARM_WITHIN_S = 30.0
# The wait before Serve's list is trusted again. Serve notices a dead replica within about a second.
TRUSTED_AFTER_S = 2.0


class Follower:
    """Holds the lease on the replicas, so it must live for as long as its driver is used."""

    def __init__(self, config: AppConfig, deployer: Any, directory: str) -> None:
        self._config, self._deployer = config, deployer
        self._name = uuid4().hex
        self._replicas: dict[str, Mapping[str, str]] = {}  # with the ids of their devices if they stand by, by fleet
        self._kinds: dict[str, str] = {}  # kinds of devices, by replica, also by those that have gone
        self._workers = ServeWorkers(self._changed, config, directory)
        self._driver: Driver | None = None
        self._following = asyncio.Lock()  # plans are followed one after another
        self._moved = asyncio.Event()  # another plan than the first one is followed
        self._is_open = False

    async def open(self, model: SplitModel, clock: Callable[[], float]) -> Driver:
        """Follow the deployer's plan; returns when each of its fleets has replicas, or after `OPEN_WITHIN_S`.

        The controller is answered before: if devices are gone, it plans without them.
        """
        messages = self._lease()
        while (message := await anext(messages, None)) is None:  # a deployer of another configuration ends first
            await asyncio.sleep(RETRY_AFTER_S)
            messages = self._lease()
        self._graph: Graph = message.content
        await self._workers.open()
        limits = self._config.limits(1 / self._config.front_replicas)
        dispatcher = Dispatcher(self._graph.route, self._members, limits)
        self._driver = Driver(dispatcher, self._workers, clock, Counts(self._kinds))
        self._reroute()
        self._listening = asyncio.create_task(self._listen(messages))
        await self._open_on(self._graph)
        idle = [f"{self._graph.fleet}.{kind}" for kind in self._config.standby.keys() - self._graph.plan.devices()]
        self._joining = [asyncio.create_task(self._join_standby(fleet)) for fleet in idle]
        if self._config.front_replicas > 1:
            self._reporting = asyncio.create_task(self._report_arrivals(self._driver))
        self._is_open = True
        return self._driver

    @property
    def plan(self) -> str:
        return summary(self._graph.plan, self._graph.parked)

    @property
    def promised_per_s(self) -> float | None:
        return self._graph.plan.promise.goodput_per_s if self._graph.plan.promise else None

    async def others(self) -> list[FrontState]:
        """Empty while no deployer runs, for whose replica a call would wait."""
        if self._config.front_replicas == 1:
            return []
        try:
            async with asyncio.timeout(OTHERS_WITHIN_S):
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
        """Receive messages for ever. If the deployer is killed, its successor sends the present plan at once.

        A plan takes seconds to follow. The front answers other messages meanwhile, as the deployer soon drops a silent
        front.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as receiving:
                    async for message in messages:
                        receiving.create_task(self._receive(message))
            except* Exception as errors:
                log.warning("no deployer: %s", errors.exceptions)
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
                async with self._following:
                    await self._follow(message.content)
            case ReplicaShare(share) if self._driver:
                self._driver.dispatcher.limit(self._config.limits(share))
                return
            case Question.STATE if self._driver and self._is_open:
                reply = state_of(self._driver)
            case Question.COUNTS if self._driver:
                benched = tuple((name, self._kinds[name]) for name in self._driver.benched())
                counts = self._driver.counted().observed(self._graph.plan.num_blocks)
                standby = self._standby if self._config.standby else None
                holds, parked = self._driver.dispatcher.inside > 0, self._graph.parked
                reply = replace(counts, benched=benched, standby=standby, parked=parked, holds_inputs=holds)
        await self._deployer.reply.remote(self._name, message.number, reply)

    @property
    def _standby(self) -> tuple[StandbyReplica, ...]:
        devices = ((kind_in(fleet), id_) for fleet, ids in self._replicas.items() for id_ in ids.values() if id_)
        return tuple(StandbyReplica(kind, device_id, self._graph.uses(device_id)) for kind, device_id in devices)

    async def _follow(self, graph: Graph) -> None:
        """Switch to another plan. Inputs continue from their blocks, and running launches are not disturbed."""
        if graph.version == self._graph.version:
            return
        await self._try_to_join(graph, JOIN_WITHIN_S)
        await asyncio.to_thread(lambda: graph.route)  # the graph keeps it; for large batches it takes 0.1 s
        if graph.parked or graph.plan != self._graph.plan:
            self._moved.set()
        self._graph = graph
        self._reroute()

    async def _open_on(self, graph: Graph) -> None:
        """Wait for the replicas of the first plan, until another one is followed."""
        joining = asyncio.create_task(self._try_to_join(graph, OPEN_WITHIN_S))
        moving = asyncio.create_task(self._moved.wait())
        await asyncio.wait((joining, moving), return_when=asyncio.FIRST_COMPLETED)
        moving.cancel()
        if self._moved.is_set():
            joining.cancel()
        else:
            joining.result()

    async def _try_to_join(self, graph: Graph, within_s: float) -> None:
        """Reach the replicas of a plan, and have those that it uses run full batches of it."""
        if graph.parked:
            return
        self._workers.plan, self._workers.uses = graph.plan.to_json(), graph.uses
        with suppress(TimeoutError):  # replicas that have just ended get successors, which join later
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(self._workers.join(fleet) for fleet in graph.fleets.values()))

    async def _join_standby(self, fleet: str) -> None:
        """Reach the replicas of a kind that only stand by. They may start later than this front."""
        while True:
            try:
                return await self._workers.join(fleet)
            except Exception as error:
                log.warning("replicas of %s cannot be reached yet: %s: %s", fleet, type(error).__name__, error)
            await asyncio.sleep(STANDBY_AGAIN_S)

    def _changed(self, fleet: str, replicas: Mapping[str, str]) -> None:
        self._replicas[fleet] = replicas
        self._kinds |= dict.fromkeys(replicas, kind_in(fleet))
        if self._driver:
            self._reroute()

    def _reroute(self) -> None:
        assert self._driver, "This is a bug: there is no driver yet."
        self._driver.dispatcher.reroute(self._graph.route, self._members, self._graph.wakes_in_s)
        self._driver.pump()

    @property
    def _members(self) -> dict[str, list[str]]:
        return self._graph.members(self._replicas)


@dataclass(frozen=True)
class _Connected:
    """A replica with an open connection for orders."""

    group: str
    connection: ReplicaConnection
    device_id: str
    warmed_for: str = ""  # the last plan for which it warmed up, in JSON


class ServeWorkers:
    """Replicas on Ray Serve: Serve lists them and their addresses, and orders go to them directly.

    Here a group is all replicas of one kind of device, a Serve application that the front finds by its name: elsewhere
    a *fleet*. `on_change` is called with its name, and the reachable replicas with the ids of their devices, whenever
    this set changes.
    """

    def __init__(self, on_change: Callable[[str, Mapping[str, str]], None], config: AppConfig, directory: str) -> None:
        self._on_change = on_change
        self._by_value_bytes = config.by_value_bytes
        self._wire, self._weights = wire_of(config), weights_in(config, directory)
        self._holdings = Holdings()
        self._exchange = Exchange(self._holdings)
        self._name = uuid4().hex  # by this name replicas recognize a front that connects again
        self._connected: dict[str, _Connected] = {}  # by replica
        self._connecting: dict[str, asyncio.Task[None]] = {}  # by replica
        self._handles: dict[str, Any] = {}  # by group
        self._listed: dict[str, frozenset[str]] = {}  # Serve's last list of replicas, by group
        self._was_listed: dict[str, asyncio.Event] = {}  # set once Serve has listed replicas, by group
        self.plan = ""  # the plan for which replicas warm up before use, in JSON; "": none
        self.uses: Callable[[str], bool] = lambda device_id: True  # whether the plan has splits for this device
        self._warming = set[str]()  # replicas that are connected, but are not used yet
        self._suspects = set[str]()  # replicas that are ended soon if they still hang

    async def open(self) -> None:
        await self._exchange.open(self._wire)

    async def join(self, group: str) -> None:
        """Follow a group's replicas from now on. Returns when the front is connected to the present ones, and they have
        run full batches of the plan.

        Both continue if the caller stops waiting.
        """
        if group not in self._handles:
            self._watch(group)
        try:
            await self._handles[group].whereabouts.remote()  # the first call makes Serve look for the replicas
        except Exception as error:  # it may have just ended
            log.warning("a replica of %s does not answer: %s: %s", group, type(error).__name__, error)
        await self._was_listed[group].wait()
        if connecting := [self._connecting[name] for name in self._listed[group] if name in self._connecting]:
            await asyncio.wait(connecting)
        here = [name for name, each in self._connected.items() if each.group == group]
        await asyncio.gather(*map(self._warm_up, here))

    async def _warm_up(self, name: str) -> None:
        """Have a replica run full batches of the plan, if the plan uses it, and if that has not been tried yet."""
        connected, plan = self._connected.get(name), self.plan
        if connected is None or connected.warmed_for == plan or not self.uses(connected.device_id):
            return
        try:
            async with asyncio.timeout(WARM_WITHIN_S):
                await connected.connection.warm_up(plan)
        except Exception as error:
            log.warning("replica %s has not run its full batches: %s: %s", name, type(error).__name__, error)
        if self._connected.get(name) is connected:  # it may have gone meanwhile
            self._connected[name] = replace(connected, warmed_for=plan)

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        connected = self._connected.get(replica)
        if connected is None:
            raise ConnectionError(f"replica {replica} has gone")
        with self._lent(order) as sent:
            async for reply in connected.connection.run(sent):
                yield reply

    def suspect(self, replica: str) -> None:
        """End the replica if it still hangs after some time. If it is only slow, the dispatcher gives it less work."""

        def end_if_stuck(connection: ReplicaConnection) -> None:
            self._suspects.remove(replica)
            connection.end_if_stuck(STUCK_S)

        if replica not in self._suspects and (connected := self._connected.get(replica)):
            self._suspects.add(replica)
            asyncio.get_running_loop().call_later(STUCK_S, end_if_stuck, connected.connection)

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    async def close(self) -> None:
        """Close the connections; the replicas themselves belong to Serve."""
        for connected in self._connected.values():
            connected.connection.retire()
        self._exchange.close()

    @contextmanager
    def _lent(self, order: Order) -> Iterator[Order]:
        """The order as it is sent: with small inputs as one part, or with references to large ones held here.

        Replicas need no words, which could be longer than a message may be.
        """
        packed = [part for part in order.parts if isinstance(part, Packed)]
        sent = structs.replace(order, by_value_bytes=self._by_value_bytes)
        if sum(part.size_bytes for part in packed) <= self._by_value_bytes:
            yield structs.replace(sent, parts=tuple(joined(order.parts)))
            return
        held = [self._holdings.hold(join([part]), order.hold_s) for part in packed]
        shares = iter([Share(batch, np.arange(len(batch))) for batch in held])
        try:
            parts = tuple(next(shares) if isinstance(part, Packed) else part for part in sent.parts)
            yield structs.replace(sent, parts=parts)
        finally:
            self._holdings.drop(batch.key for batch in held)

    # The set of replicas

    def _watch(self, group: str) -> None:
        self._handles[group] = serve.get_deployment_handle(DEPLOYMENT, group)
        self._was_listed[group] = asyncio.Event()
        loop = asyncio.get_running_loop()

        def changed(replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._changed, group, replicas)

        router.watch(group, changed)

    def _changed(self, group: str, replicas: frozenset[str]) -> None:
        self._listed[group] = replicas
        self._was_listed[group].set()
        if gone := [
            name for name, connected in self._connected.items() if connected.group == group and name not in replicas
        ]:
            for name in gone:
                self._connected.pop(name).connection.retire()
            self._report(group)
        for name in replicas - self._connected.keys() - self._connecting.keys():
            self._connecting[name] = asyncio.get_running_loop().create_task(self._connect(group, name))

    async def _connect(self, group: str, name: str) -> None:
        """Connect to a replica. If that fails, try again later for as long as Serve lists it.

        It warms up before it is used, unless its group has no other one.
        """
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                connected = await self._open_connection(group, name)
        except Exception as error:
            log.warning("replica %s cannot be reached: %s: %s", name, type(error).__name__, error)
            self._doubt(group)
        else:
            self._connected[name] = connected
            self._warming.add(name)
            self._changed(group, self._listed[group])  # the replica may have gone meanwhile
            self._report(group)
            await self._warm_up(name)
            self._warming.discard(name)
            self._report(group)
        finally:
            del self._connecting[name]

    async def _open_connection(self, group: str, name: str) -> _Connected:
        address: ReplicaAddress = await self._handles[group].options(session_id=name).whereabouts.remote()
        if address.replica != name:
            raise ConnectionError("another replica answered instead")
        if differ(address.weights, self._weights):
            raise UserError(
                f"it runs other weights ({address.weights}) than this front knows ({self._weights}): every node needs "
                "the same files"
            )
        connection = await connect_to(self._wire, address, lambda: self._lose(group, name), self._name, self.drop)
        return _Connected(group, connection, address.device_id)

    def _lose(self, group: str, name: str) -> None:
        """Stop using a replica that does not answer, even if Serve lists it; try again after some time."""
        if self._connected.pop(name, None):
            self._report(group)
            self._doubt(group)

    def _doubt(self, group: str) -> None:
        asyncio.get_running_loop().call_later(TRUSTED_AFTER_S, lambda: self._changed(group, self._listed[group]))

    def _report(self, group: str) -> None:
        here = {name: each.device_id for name, each in self._connected.items() if each.group == group}
        warm = {name: device_id for name, device_id in here.items() if name not in self._warming}
        used = warm if any(map(self.uses, warm.values())) else here
        self._warming -= used.keys()
        self._on_change(group, used)
