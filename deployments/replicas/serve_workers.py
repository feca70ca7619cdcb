"""Replicas on Ray Serve: one application per group of replicas, found by name, never bound."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError

from deployments.replicas import router
from deployments.replicas.exchange import Exchange
from deployments.replicas.holdings import Holdings, Share
from deployments.replicas.placed import DEPLOYMENT, node_address
from deployments.replicas.split import Departed, Order, Stayed
from deployments.replicas.wire import Packed

STUCK_S = 5.0  # a launch that still runs so long after it was given up will never end
BELIEVED_AFTER_S = 2.0  # Serve finds out within a second or so whether a replica is alive


@dataclass(frozen=True)
class _Calls:
    """The ways to reach one replica of a group."""

    group: str
    straight: Any
    streamed: Any
    end_if_stuck: Any


class ServeWorkers:
    """`on_change` is called with (group, replicas) whenever Serve starts or loses some. A group is an application."""

    def __init__(self, on_change: Callable[[str, Collection[str]], None], by_value_bytes: int) -> None:
        self._on_change = on_change
        self._by_value_bytes = by_value_bytes
        self._holdings = Holdings()
        self._exchange = Exchange(self._holdings)
        self._calls: dict[str, _Calls] = {}  # by replica
        self._handles: dict[str, Any] = {}  # by group
        self._arrived: dict[str, asyncio.Event] = {}
        self._told: dict[str, frozenset[str]] = {}  # what Serve said last
        self._suspects: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        await self._exchange.open(node_address())

    async def join(self, group: str) -> None:
        """Know a group's replicas from now on. Returns when it has some."""
        arrived = self._arrived.get(group) or self._watch(group)
        await self._handles[group].ping.remote()  # the first call makes Serve look for the replicas
        await arrived.wait()

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        calls = self._calls.get(replica)
        if calls is None:
            raise ConnectionError(f"replica {replica} has gone")
        try:
            with self._lent(order) as sent:
                if sent.is_straight:
                    for reply in await calls.straight.remote(sent):
                        yield reply
                else:
                    async for reply in calls.streamed.remote(sent):
                        yield reply
        except RayActorError:
            self._lose(replica)
            raise

    def suspect(self, replica: str) -> None:
        if replica not in self._suspects and (calls := self._calls.get(replica)):
            task = self._suspects[replica] = asyncio.create_task(self._end_if_stuck(replica, calls))
            task.add_done_callback(lambda _: self._suspects.pop(replica))

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    async def close(self) -> None:
        """Serve owns the replicas."""
        self._exchange.close()

    @contextmanager
    def _lent(self, order: Order) -> Iterator[Order]:
        """What is too large to go along is held here meanwhile, for the replica to fetch."""
        packed = [part for part in order.parts if isinstance(part, Packed)]
        sent = replace(order, by_value_bytes=self._by_value_bytes)
        if sum(part.size_bytes for part in packed) <= self._by_value_bytes:
            yield sent
            return
        held = [self._holdings.hold(part, order.hold_s) for part in packed]
        shares = iter([Share(each, np.arange(len(each))) for each in held])
        try:
            yield replace(sent, parts=tuple(next(shares) if isinstance(part, Packed) else part for part in sent.parts))
        finally:
            self._holdings.drop(each.key for each in held)

    async def _end_if_stuck(self, replica: str, calls: _Calls) -> None:
        """One that was only slow lives on; the dispatcher gives it less to do."""
        await asyncio.sleep(STUCK_S)
        with suppress(Exception):  # it ends while it is asked, or has gone before
            await calls.end_if_stuck.remote(replica, STUCK_S)

    def _lose(self, replica: str) -> None:
        """It does not answer, whatever Serve still says: others work in its place until Serve looks closer."""
        if calls := self._calls.pop(replica, None):
            self._on_change(calls.group, [name for name, each in self._calls.items() if each.group == calls.group])
            asyncio.get_running_loop().call_later(BELIEVED_AFTER_S, self._believe, calls.group)

    def _believe(self, group: str) -> None:
        self._changed(group, self._handles[group], self._told[group])

    def _watch(self, group: str) -> asyncio.Event:
        handle = self._handles[group] = serve.get_deployment_handle(DEPLOYMENT, group)
        arrived = self._arrived[group] = asyncio.Event()
        loop = asyncio.get_running_loop()

        def changed(replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._changed, group, handle, replicas)
            loop.call_soon_threadsafe(arrived.set)

        router.watch(group, changed)
        return arrived

    def _changed(self, group: str, handle: Any, replicas: frozenset[str]) -> None:
        self._told[group] = replicas
        for gone in [name for name, calls in self._calls.items() if calls.group == group and name not in replicas]:
            del self._calls[gone]
        for name in replicas - self._calls.keys():
            chosen = handle.options(session_id=name, request_serialization="pickle", response_serialization="pickle")
            self._calls[name] = _Calls(group, chosen.run_straight, chosen.options(stream=True).run, chosen.end_if_stuck)
        self._on_change(group, replicas)
