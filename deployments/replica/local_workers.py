"""Replicas in this process, each on its own thread: used by a front without a plan, and inside a Serve replica."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue

from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order, Stayed

WorkerReply = Departed | Stayed | Exception


class _Device:
    """A replica and its thread. It is always the same thread, because libraries keep state for each thread."""

    def __init__(self, name: str, replica: SplitReplica) -> None:
        self._replica = replica
        self._orders: SimpleQueue[tuple[Order, asyncio.AbstractEventLoop, asyncio.Queue[WorkerReply]] | None] = (
            SimpleQueue()
        )
        self.since_s: float | None = None  # when the current launch began
        threading.Thread(target=self._compute, name=name, daemon=True).start()

    def submit(self, order: Order) -> "asyncio.Queue[WorkerReply]":
        """A queue that receives each reply as soon as it is known; `Stayed` or an exception comes last."""
        replies: asyncio.Queue[WorkerReply] = asyncio.Queue()
        self._orders.put((order, asyncio.get_running_loop(), replies))
        return replies

    def end(self) -> None:
        self._orders.put(None)

    def _compute(self) -> None:
        while self._compute_one():
            pass

    def _compute_one(self) -> bool:
        """Compute one launch; returns whether to go on. Its variables end with it, so none keeps the last launch."""
        if not (submitted := self._orders.get()):
            return False
        order, loop, replies = submitted
        self.since_s = time.monotonic()
        for reply in _guarded(self._replica.run(order)):
            with suppress(RuntimeError):  # the event loop is closed, so no caller waits for this reply
                loop.call_soon_threadsafe(replies.put_nowait, reply)
        self.since_s = None
        return True


class LocalWorkers:
    """Runs the launches of each replica one after another, on that replica's thread."""

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
                    del reply  # its traceback refers to this frame: such a cycle waits for garbage collection
            yield reply
        yield reply

    def computes_for_s(self, replica: str) -> float:
        """How long the replica's current launch has taken so far."""
        since_s = self._devices[replica].since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def suspect(self, replica: str) -> None:
        """Do nothing: a thread cannot be ended."""

    def drop(self, address: str, key: str) -> None:
        for replica in self._replicas.values():
            replica.holdings.drop([key])

    async def close(self) -> None:
        for device in self._devices.values():
            device.end()


def _guarded(replies: Iterator[Departed | Stayed]) -> Iterator[WorkerReply]:
    try:
        yield from replies
    except Exception as error:
        yield error
