"""Replicas on Ray Serve: Serve lists the replicas and their addresses, and orders go to them directly.

Each group is a Serve application of its own, which the front finds by its name.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from ray import serve

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front import router
from isobatch.deployments.ray_facts import wire_of
from isobatch.deployments.replica.loading import weights_in
from isobatch.deployments.replica.serve_replica import DEPLOYMENT
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings, Share
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.packed import Packed, join
from isobatch.deployments.transport.replica_connection import ReplicaAddress, ReplicaConnection, connect_to
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import differ

log = logging.getLogger(__name__)
# A launch that still runs this long after it was given up counts as hung, and its replica is ended.
STUCK_S = 5.0
# The time to connect to a replica.
CONNECT_WITHIN_S = 5.0
# The wait before Serve's list is trusted again. Serve notices a dead replica within about a second.
TRUSTED_AFTER_S = 2.0


@dataclass(frozen=True)
class _Connected:
    """A replica with an open connection for orders."""

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
        self._connected: dict[str, _Connected] = {}  # by replica
        self._connecting: dict[str, asyncio.Task[None]] = {}  # by replica
        self._handles: dict[str, Any] = {}  # by group
        self._listed: dict[str, frozenset[str]] = {}  # Serve's last list of replicas, by group
        self._was_listed: dict[str, asyncio.Event] = {}  # set once Serve has listed replicas, by group
        self._suspects: dict[str, asyncio.TimerHandle] = {}

    async def open(self) -> None:
        await self._exchange.open(self._wire)

    async def join(self, group: str) -> None:
        """Follow a group's replicas from now on. Returns when the front is connected to the present ones.

        Connecting goes on if the caller stops waiting.
        """
        if group not in self._handles:
            self._watch(group)
        await self._handles[group].whereabouts.remote()  # the first call makes Serve look for the replicas
        await self._was_listed[group].wait()
        if connecting := [self._connecting[name] for name in self._listed[group] if name in self._connecting]:
            await asyncio.wait(connecting)

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        connected = self._connected.get(replica)
        if connected is None:
            raise ConnectionError(f"replica {replica} has gone")
        with self._lent(order) as sent:
            async for reply in connected.connection.run(sent):
                yield reply

    def suspect(self, replica: str) -> None:
        """End the replica if it still hangs after some time. If it is only slow, the dispatcher gives it less work."""
        if replica not in self._suspects and (connected := self._connected.get(replica)):
            self._suspects[replica] = asyncio.get_running_loop().call_later(
                STUCK_S, self._end_if_stuck, replica, connected
            )

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    async def close(self) -> None:
        """Close the connections; the replicas themselves belong to Serve."""
        for connected in self._connected.values():
            connected.connection.retire()
        self._exchange.close()

    @contextmanager
    def _lent(self, order: Order) -> Iterator[Order]:
        """The order as it is sent: with small inputs as one part, or with references to large ones held here."""
        packed = [part for part in order.parts if isinstance(part, Packed)]
        sent = replace(order, by_value_bytes=self._by_value_bytes)
        if sum(part.size_bytes for part in packed) <= self._by_value_bytes:
            yield replace(sent, parts=(join(packed),)) if len(packed) == len(order.parts) else sent
            return
        held = [self._holdings.hold(part, order.hold_s) for part in packed]
        shares = iter([Share(batch, np.arange(len(batch))) for batch in held])
        try:
            yield replace(sent, parts=tuple(next(shares) if isinstance(part, Packed) else part for part in sent.parts))
        finally:
            self._holdings.drop(batch.key for batch in held)

    def _end_if_stuck(self, replica: str, connected: _Connected) -> None:
        del self._suspects[replica]
        connected.connection.end_if_stuck(STUCK_S)

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
        """Connect to a replica. If that fails, try again later for as long as Serve lists it."""
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                connection = await self._open_connection(group, name)
        except Exception as error:
            log.warning("replica %s cannot be reached: %s: %s", name, type(error).__name__, error)
            self._doubt(group)
        else:
            self._connected[name] = _Connected(group, connection)
            self._changed(group, self._listed[group])  # the replica may have gone meanwhile
            self._report(group)
        finally:
            del self._connecting[name]

    async def _open_connection(self, group: str, name: str) -> ReplicaConnection:
        address: ReplicaAddress = await self._handles[group].options(session_id=name).whereabouts.remote()
        if address.replica != name:
            raise ConnectionError("another replica answered instead")
        if differ(address.weights, self._weights):
            raise UserError(
                f"it runs other weights ({address.weights}) than this front knows ({self._weights}): every node needs "
                "the same files"
            )
        return await connect_to(self._wire, address, lambda: self._lose(group, name))

    def _lose(self, group: str, name: str) -> None:
        """Stop using a replica that does not answer, even if Serve lists it; try again after some time."""
        if self._connected.pop(name, None):
            self._report(group)
            self._doubt(group)

    def _doubt(self, group: str) -> None:
        asyncio.get_running_loop().call_later(TRUSTED_AFTER_S, lambda: self._changed(group, self._listed[group]))

    def _report(self, group: str) -> None:
        self._on_change(group, [name for name, connected in self._connected.items() if connected.group == group])
