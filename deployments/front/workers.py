"""Replicas on Ray Serve: Serve says which replicas exist and where, and orders go straight to them.

Each group is an application of its own, which is found by name instead of being bound.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ray import serve

from deployments.config import AppConfig
from deployments.front import router
from deployments.ray_facts import wire_of
from deployments.replica.loading import weights_in
from deployments.replica.serve_replica import DEPLOYMENT
from deployments.transport.exchange import Exchange
from deployments.transport.holdings import Holdings, Share
from deployments.transport.orders import Departed, Order, Stayed
from deployments.transport.packed import Packed, join
from deployments.transport.replica_connection import ReplicaAddress, ReplicaConnection, connect_to
from profiles.errors import UserError
from profiles.files import differ

log = logging.getLogger(__name__)
STUCK_S = 5.0  # a launch that still runs this long after it was given up is taken for hung
MEET_WITHIN_S = 5.0
BELIEVED_AFTER_S = 2.0  # the wait before Serve's list is trusted again: it notices a dead replica within about a second


@dataclass(frozen=True)
class _Met:
    """A replica with an open connection, over which it takes orders."""

    group: str
    connection: ReplicaConnection


class ServeWorkers:
    """Calls `on_change` with (group, replicas) whenever the set of reachable replicas changes."""

    def __init__(self, on_change: Callable[[str, Collection[str]], None], config: AppConfig, directory: str) -> None:
        self._on_change = on_change
        self._by_value_bytes = config.by_value_bytes
        self._wire, self._weights = wire_of(config), weights_in(config, directory)
        self._holdings = Holdings()
        self._exchange = Exchange(self._holdings)
        self._met: dict[str, _Met] = {}  # by replica
        self._meetings: dict[str, asyncio.Task[None]] = {}  # by replica
        self._handles: dict[str, Any] = {}  # by group
        self._told: dict[str, frozenset[str]] = {}  # the replicas that Serve last listed, by group
        self._heard: dict[str, asyncio.Event] = {}  # set once Serve has listed any, by group
        self._suspects: dict[str, asyncio.TimerHandle] = {}

    async def open(self) -> None:
        await self._exchange.open(self._wire)

    async def join(self, group: str) -> None:
        """Follow a group's replicas from now on. Returns when the present ones can be reached.

        Who gives up waiting for that ends no meeting: a slow replica is met a little later.
        """
        if group not in self._handles:
            self._watch(group)
        await self._handles[group].whereabouts.remote()  # the first call makes Serve look for the replicas
        await self._heard[group].wait()
        if meetings := [self._meetings[name] for name in self._told[group] if name in self._meetings]:
            await asyncio.wait(meetings)

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        met = self._met.get(replica)
        if met is None:
            raise ConnectionError(f"replica {replica} has gone")
        with self._lent(order) as sent:
            async for reply in met.connection.run(sent):
                yield reply

    def suspect(self, replica: str) -> None:
        """End the replica if it still hangs later; a slow one lives on, and the dispatcher gives it less work."""
        if replica not in self._suspects and (met := self._met.get(replica)):
            self._suspects[replica] = asyncio.get_running_loop().call_later(STUCK_S, self._end_if_stuck, replica, met)

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    async def close(self) -> None:
        """Close the connections; the replicas themselves belong to Serve."""
        for met in self._met.values():
            met.connection.retire()
        self._exchange.close()

    @contextmanager
    def _lent(self, order: Order) -> Iterator[Order]:
        """The order as it is sent: small inputs travel along as one part, large ones are held here to be fetched."""
        packed = [part for part in order.parts if isinstance(part, Packed)]
        sent = replace(order, by_value_bytes=self._by_value_bytes)
        if sum(part.size_bytes for part in packed) <= self._by_value_bytes:
            yield replace(sent, parts=(join(packed),)) if len(packed) == len(order.parts) else sent
            return
        held = [self._holdings.hold(part, order.hold_s) for part in packed]
        shares = iter([Share(each, np.arange(len(each))) for each in held])
        try:
            yield replace(sent, parts=tuple(next(shares) if isinstance(part, Packed) else part for part in sent.parts))
        finally:
            self._holdings.drop(each.key for each in held)

    def _end_if_stuck(self, replica: str, met: _Met) -> None:
        del self._suspects[replica]
        met.connection.end_if_stuck(STUCK_S)

    # Which replicas exist

    def _watch(self, group: str) -> None:
        self._handles[group] = serve.get_deployment_handle(DEPLOYMENT, group)
        self._heard[group] = asyncio.Event()
        loop = asyncio.get_running_loop()

        def changed(replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._changed, group, replicas)

        router.watch(group, changed)

    def _changed(self, group: str, replicas: frozenset[str]) -> None:
        self._told[group] = replicas
        self._heard[group].set()
        if gone := [name for name, met in self._met.items() if met.group == group and name not in replicas]:
            for name in gone:
                self._met.pop(name).connection.retire()
            self._tell(group)
        for name in replicas - self._met.keys() - self._meetings.keys():
            self._meetings[name] = asyncio.get_running_loop().create_task(self._meet(group, name))

    async def _meet(self, group: str, name: str) -> None:
        """Open a connection to a replica; if it cannot be reached, try again later while Serve still lists it."""
        try:
            async with asyncio.timeout(MEET_WITHIN_S):
                connection = await self._connect_to(group, name)
        except Exception as error:
            log.warning("replica %s cannot be reached: %s: %s", name, type(error).__name__, error)
            self._doubt(group)
        else:
            self._met[name] = _Met(group, connection)
            self._changed(group, self._told[group])  # the replica may have gone meanwhile
            self._tell(group)
        finally:
            del self._meetings[name]

    async def _connect_to(self, group: str, name: str) -> ReplicaConnection:
        where: ReplicaAddress = await self._handles[group].options(session_id=name).whereabouts.remote()
        if where.replica != name:
            raise ConnectionError("another answered in its place")
        if differ(where.weights, self._weights):
            raise UserError(
                f"it runs other weights ({where.weights}) than this front knows ({self._weights}): every node needs "
                "the same files"
            )
        return await connect_to(self._wire, where, lambda: self._lose(group, name))

    def _lose(self, group: str, name: str) -> None:
        """Stop using a replica that does not answer, even if Serve still lists it; try it again a little later."""
        if self._met.pop(name, None):
            self._tell(group)
            self._doubt(group)

    def _doubt(self, group: str) -> None:
        asyncio.get_running_loop().call_later(BELIEVED_AFTER_S, lambda: self._changed(group, self._told[group]))

    def _tell(self, group: str) -> None:
        self._on_change(group, [name for name, met in self._met.items() if met.group == group])
