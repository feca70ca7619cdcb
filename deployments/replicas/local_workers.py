"""Replicas in this process: one thread each. For a machine without Ray, and for one device whose splits take turns."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from queue import SimpleQueue

from deployments.replicas.split import Departed, Order, SplitReplica, Stayed

Said = Departed | Stayed | Exception


class _Device:
    """A replica and its thread: always the same one, which libraries keep their state for."""

    def __init__(self, name: str, replica: SplitReplica) -> None:
        self._replica = replica
        self._orders: SimpleQueue[tuple[Order, asyncio.AbstractEventLoop, asyncio.Queue[Said]] | None] = SimpleQueue()
        self.since_s: float | None = None  # when it began the launch that it computes
        threading.Thread(target=self._compute, name=name, daemon=True).start()

    def submit(self, order: Order) -> "asyncio.Queue[Said]":
        """What the thread says is there as soon as it is known; `Stayed` or an exception comes last."""
        replies: asyncio.Queue[Said] = asyncio.Queue()
        self._orders.put((order, asyncio.get_running_loop(), replies))
        return replies

    def end(self) -> None:
        self._orders.put(None)

    def _compute(self) -> None:
        while self._compute_one():
            pass

    def _compute_one(self) -> bool:
        """Whether it goes on. In a function of its own: who waits for the next launch keeps nothing of the last."""
        if not (given := self._orders.get()):
            return False
        order, loop, replies = given
        self.since_s = time.monotonic()
        for reply in _guarded(self._replica.run(order)):
            loop.call_soon_threadsafe(replies.put_nowait, reply)
        self.since_s = None
        return True


class LocalWorkers:
    """Runs each replica's launches one after another, on a thread of its own."""

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
                    del reply  # it knows this frame: both, and what they hold, would stay until garbage is looked for
            yield reply
        yield reply

    def computes_for_s(self, replica: str) -> float:
        """How long its present launch takes already."""
        since_s = self._devices[replica].since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def suspect(self, replica: str) -> None:
        """A thread cannot be ended: who waits for it goes on waiting."""

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
