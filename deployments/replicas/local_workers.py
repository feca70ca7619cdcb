"""Replicas in this process: one thread each. For a machine without Ray, and for one device whose splits take turns."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from deployments.replicas.split import Departed, Order, SplitReplica, Stayed

_END = object()


class LocalWorkers:
    """Runs each replica's launches one after another, on a thread of its own."""

    def __init__(self, replicas: Mapping[str, SplitReplica]) -> None:
        self._replicas = dict(replicas)
        self._since_s: dict[str, float] = {}  # when each replica began the launch that it computes
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in replicas}

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        """What the thread yields is here as soon as it is known there."""
        loop = asyncio.get_running_loop()
        replies: asyncio.Queue[object] = asyncio.Queue()

        def work() -> None:
            self._since_s[replica] = time.monotonic()
            for reply in _guarded(self._replicas[replica].run(order)):
                loop.call_soon_threadsafe(replies.put_nowait, reply)
            del self._since_s[replica]

        self._threads[replica].submit(work)
        while (reply := await replies.get()) is not _END:
            if isinstance(reply, Exception):
                raise reply
            assert isinstance(reply, Departed | Stayed)
            yield reply

    def computes_for_s(self, replica: str) -> float:
        """How long its present launch takes already."""
        since_s = self._since_s.get(replica)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def suspect(self, replica: str) -> None:
        """A thread cannot be ended: who waits for it goes on waiting."""

    def drop(self, address: str, key: str) -> None:
        for replica in self._replicas.values():
            replica.holdings.drop([key])

    async def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _guarded(replies: Iterator[Departed | Stayed]) -> Iterator[object]:
    """An exception is a reply too, and the end is always told."""
    try:
        yield from replies
    except Exception as error:
        yield error
    yield _END
