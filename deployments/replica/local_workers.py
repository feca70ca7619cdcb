"""Replicas in this process, each on its own thread: used by a front without a plan, and inside a Serve replica."""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from isobatch.deployments.own_cores import as_computing
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order, Stayed

log = logging.getLogger(__name__)
Result = TypeVar("Result")
WorkQueue = SimpleQueue[Callable[[], None] | None]  # the work of a thread; None: the end
WorkerReply = Departed | Stayed | Exception
Replies = asyncio.Queue[WorkerReply]
MOST_WARMING_S = 120.0  # the time for a full batch, which may compile; after it, its replica counts as hung


async def result_on(queue: WorkQueue, work: Callable[[], Result]) -> Result:
    """The result of this work on the thread of a queue. If its caller gives up before, it does not begin."""
    done = Future[Result]()

    def do() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    queue.put(do)
    return await asyncio.wrap_future(done)


class LocalWorkers:
    """Runs the launches of each replica one after another, on that replica's thread.

    It is always the same thread, because libraries keep state for each thread.
    """

    def __init__(self, replicas: Mapping[str, SplitReplica], most_warming_s: float = MOST_WARMING_S) -> None:
        self._replicas = dict(replicas)
        self._work: dict[str, WorkQueue] = {name: SimpleQueue() for name in replicas}
        self._most_warming_s = most_warming_s
        # When the current launch began, by replica; of other work, when its time is over.
        self._began_s: dict[str, float] = {}
        for name in replicas:
            threading.Thread(target=self._compute, args=(name,), name=name, daemon=True).start()

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        replies: Replies = asyncio.Queue()  # each reply as soon as it is known
        self._work[replica].put(partial(self._answer, replica, order, asyncio.get_running_loop(), replies))
        while not isinstance(reply := await replies.get(), Stayed):
            if isinstance(reply, Exception):
                try:
                    raise reply
                finally:
                    del reply  # its traceback refers to this frame: such a cycle waits for garbage collection
            yield reply
        yield reply

    async def between_launches(self, replica: str, work: Callable[[], None]) -> None:
        """Have a replica's thread do something else; returns when it is done."""

        def timed() -> None:
            self._began_s[replica] = time.monotonic() + self._most_warming_s
            try:
                work()
            finally:
                del self._began_s[replica]

        await result_on(self._work[replica], timed)

    def computes_for_s(self, replica: str) -> float:
        """How long the replica's current launch has taken so far; of other work, how much longer than it may take."""
        began_s = self._began_s.get(replica)
        return 0.0 if began_s is None else max(0.0, time.monotonic() - began_s)

    def suspect(self, replica: str) -> None:
        """Do nothing: a thread cannot be ended."""

    def drop(self, address: str, key: str) -> None:
        for replica in self._replicas.values():
            replica.holdings.drop([key])

    async def close(self) -> None:
        for work in self._work.values():
            work.put(None)

    def _compute(self, name: str) -> None:
        with as_computing():
            while self._compute_one(name):
                pass

    def _compute_one(self, name: str) -> bool:
        """Compute one launch; returns whether to continue. Its variables end with it, so none keeps the last launch."""
        if not (work := self._work[name].get()):
            return False
        work()
        return True

    def _answer(self, name: str, order: Order, loop: asyncio.AbstractEventLoop, replies: Replies) -> None:
        self._began_s[name] = time.monotonic()
        for reply in _guarded(self._replicas[name].run(order)):
            with suppress(RuntimeError):  # the event loop is closed, so no caller waits for this reply
                loop.call_soon_threadsafe(replies.put_nowait, reply)
        del self._began_s[name]


def _guarded(replies: Iterator[Departed | Stayed]) -> Iterator[WorkerReply]:
    try:
        yield from replies
    except Exception as error:
        end_if_gpu_failed()
        yield error


def end_if_gpu_failed() -> None:
    """End this process if its GPU has failed, since nothing more could be computed in it. Serve then starts another."""
    torch = sys.modules.get("torch")  # virtual devices do not import it
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        log.exception("the GPU has failed, so this process ends")
        os._exit(1)
