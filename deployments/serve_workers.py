"""Replicas on Ray Serve: one application per group of replicas, found by name, never bound."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any

from ray import serve

from deployments import router
from deployments.split import Departed, Order, Stayed

DEPLOYMENT = "split"  # the one deployment of a split application


@dataclass(frozen=True)
class _Calls:
    """The two ways to reach one replica of a group."""

    group: str
    straight: Any
    streamed: Any


class ServeWorkers:
    """`on_change` is called with (group, replicas) whenever Serve starts or loses some. A group is an application."""

    def __init__(self, on_change: Callable[[str, Collection[str]], None]) -> None:
        self._on_change = on_change
        self._calls: dict[str, _Calls] = {}  # by replica

    async def join(self, group: str) -> None:
        """Know a group's replicas from now on. Returns when it has some."""
        handle = serve.get_deployment_handle(DEPLOYMENT, group)
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        def changed(replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._changed, group, handle, replicas)
            loop.call_soon_threadsafe(arrived.set)

        router.watch(group, changed)
        await handle.ping.remote()  # the first call makes Serve look for the replicas
        await arrived.wait()

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        calls = self._calls.get(replica)
        if calls is None:
            raise ConnectionError(f"replica {replica} has gone")
        if order.is_straight:
            for reply in await calls.straight.remote(order):
                yield reply
        else:
            async for reply in calls.streamed.remote(order):
                yield reply

    async def close(self) -> None:
        """Serve owns the replicas."""

    def _changed(self, group: str, handle: Any, replicas: frozenset[str]) -> None:
        for gone in [name for name, calls in self._calls.items() if calls.group == group and name not in replicas]:
            del self._calls[gone]
        for name in replicas - self._calls.keys():
            chosen = handle.options(session_id=name, request_serialization="pickle", response_serialization="pickle")
            self._calls[name] = _Calls(group, chosen.run_straight, chosen.options(stream=True).run)
        self._on_change(group, replicas)
