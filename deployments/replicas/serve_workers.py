"""Replicas on Ray Serve: Serve says who there is and where, orders go to them straight.

Each group is an application of its own, found by name, never bound.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ray import serve

from deployments.replicas import router
from deployments.replicas.exchange import Exchange
from deployments.replicas.holdings import Holdings, Share
from deployments.replicas.line import Line, Whereabouts, line_to
from deployments.replicas.placed import DEPLOYMENT, node_address
from deployments.replicas.split import Departed, Order, Stayed
from deployments.replicas.wire import Packed, join

log = logging.getLogger(__name__)
STUCK_S = 5.0  # a launch that still runs so long after it was given up will never end
MEET_WITHIN_S = 5.0
BELIEVED_AFTER_S = 2.0  # Serve finds out within a second or so whether a replica is alive


@dataclass(frozen=True)
class _Met:
    """A replica that takes our orders."""

    group: str
    line: Line


class ServeWorkers:
    """`on_change` is called with (group, replicas) whenever others can be reached than before."""

    def __init__(self, on_change: Callable[[str, Collection[str]], None], by_value_bytes: int) -> None:
        self._on_change = on_change
        self._by_value_bytes = by_value_bytes
        self._holdings = Holdings()
        self._exchange = Exchange(self._holdings)
        self._met: dict[str, _Met] = {}  # by replica
        self._meetings: dict[str, asyncio.Task[None]] = {}  # by replica
        self._handles: dict[str, Any] = {}  # by group
        self._told: dict[str, frozenset[str]] = {}  # what Serve said last, by group
        self._heard: dict[str, asyncio.Event] = {}  # that it has said something
        self._suspects: dict[str, asyncio.TimerHandle] = {}

    async def open(self) -> None:
        await self._exchange.open(node_address())

    async def join(self, group: str) -> None:
        """Know a group's replicas from now on. Returns when those that it has now can be reached."""
        if group not in self._handles:
            self._watch(group)
        await self._handles[group].whereabouts.remote()  # the first call makes Serve look for the replicas
        await self._heard[group].wait()
        meetings = [self._meetings[name] for name in self._told[group] if name in self._meetings]
        await asyncio.gather(*meetings)

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        met = self._met.get(replica)
        if met is None:
            raise ConnectionError(f"replica {replica} has gone")
        with self._lent(order) as sent:
            async for reply in met.line.run(sent):
                yield reply

    def suspect(self, replica: str) -> None:
        """One that was only slow lives on; the dispatcher gives it less to do."""
        if replica not in self._suspects and (met := self._met.get(replica)):
            self._suspects[replica] = asyncio.get_running_loop().call_later(STUCK_S, self._end_if_stuck, replica, met)

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    async def close(self) -> None:
        """Serve owns the replicas."""
        for met in self._met.values():
            met.line.retire()
        self._exchange.close()

    @contextmanager
    def _lent(self, order: Order) -> Iterator[Order]:
        """What is too large to go along is held here meanwhile, for the replica to fetch; what is not goes as one."""
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
        met.line.end_if_stuck(STUCK_S)

    # Who there is

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
                self._met.pop(name).line.retire()
            self._tell(group)
        for name in replicas - self._met.keys() - self._meetings.keys():
            self._meetings[name] = asyncio.get_running_loop().create_task(self._meet(group, name))

    async def _meet(self, group: str, name: str) -> None:
        """Whoever cannot be reached is asked again later, if Serve still knows it."""
        try:
            async with asyncio.timeout(MEET_WITHIN_S):
                line = await self._line_to(group, name)
        except Exception as error:
            log.info("replica %s cannot be reached: %r", name, error)
            self._doubt(group)
        else:
            self._met[name] = _Met(group, line)
            self._changed(group, self._told[group])  # it may have gone meanwhile
            self._tell(group)
        finally:
            del self._meetings[name]

    async def _line_to(self, group: str, name: str) -> Line:
        where: Whereabouts = await self._handles[group].options(session_id=name).whereabouts.remote()
        if where.replica != name:
            raise ConnectionError("another answered in its place")
        return await line_to(where, lambda: self._lose(group, name))

    def _lose(self, group: str, name: str) -> None:
        """It does not answer, whatever Serve still says: others work in its place until Serve looks closer."""
        if self._met.pop(name, None):
            self._tell(group)
            self._doubt(group)

    def _doubt(self, group: str) -> None:
        asyncio.get_running_loop().call_later(BELIEVED_AFTER_S, lambda: self._changed(group, self._told[group]))

    def _tell(self, group: str) -> None:
        self._on_change(group, [name for name, met in self._met.items() if met.group == group])
