"""Replicas in this process, with a thread each: used by a front without a plan, and inside a Serve replica."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue

from deployments.replica.split import SplitReplica
from deployments.transport.orders import Departed, Order, Stayed

Said = Departed | Stayed | Exception


class _Device:
    """A replica and its thread, always the same one, as libraries keep state for each thread."""

    def __init__(self, name: str, replica: SplitReplica) -> None:
        self._replica = replica
        self._orders: SimpleQueue[tuple[Order, asyncio.AbstractEventLoop, asyncio.Queue[Said]] | None] = SimpleQueue()
        self.since_s: float | None = None  # when the present launch began
        threading.Thread(target=self._compute, name=name, daemon=True).start()

    def submit(self, order: Order) -> "asyncio.Queue[Said]":
        """A queue in which replies appear as soon as they are known; `Stayed` or an exception comes last."""
        replies: asyncio.Queue[Said] = asyncio.Queue()
        self._orders.put((order, asyncio.get_running_loop(), replies))
        return replies

    def end(self) -> None:
        self._orders.put(None)

    def _compute(self) -> None:
        while self._compute_one():
            pass

    def _compute_one(self) -> bool:
        """Compute one launch; returns whether to go on. It is a function so that no variable keeps the last launch."""
        if not (given := self._orders.get()):
            return False
        order, loop, replies = given
        self.since_s = time.monotonic()
        for reply in _guarded(self._replica.run(order)):
            with suppress(RuntimeError):  # the event loop has been closed, so no caller waits for this reply
                loop.call_soon_threadsafe(replies.put_nowait, reply)
        self.since_s = None
        return True


class LocalWorkers:
    """Runs the launches of each replica one after another, on a thread of its own."""

    def __init__(self, replicas: Mapping[str, SplitReplica]) -> None:
        self._replicas = dict(replicas)
        self._devices = {name: _Device(name, replica) for name, replica in replicas.items()}

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        replies = self._devices[replica].submit(order)
        while not isinstance(reply := await replies.get(), Stayed):
            if isinstance(reply, Exception):
                try:
                    raise reply
                finally:
                    del reply  # an exception's traceback refers to this frame: that cycle would keep memory for a while
            yield reply
        yield reply

    def computes_for_s(self, replica: str) -> float:
        """How long its present launch has taken so far."""
        since_s = self._devices[replica].since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def suspect(self, replica: str) -> None:
        """Do nothing, since a thread cannot be ended."""

    def drop(self, address: str, key: str) -> None:
        for replica in self._replicas.values():
            replica.holdings.drop([key])

    async def close(self) -> None:
        for device in self._devices.values():
            device.end()


def _guarded(replies: Iterator[Departed | Stayed]) -> Iterator[Said]:
    try:
        yield from replies
    except Exception as error:
        yield error
