"""Simulations on all cores: calls run ahead in other processes, and their results come in order, as those of `map`."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import parent_process
from typing import Protocol, Self, TypeVar

from isobatch.deployments.own_cores import usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


class Each(Protocol):
    """Calls a function for each item, and yields the results in order. It may take items before they are needed."""

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]: ...


class Cores:
    """A process for each core; on a single core, calls run in this process."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or usable_cores()
        self._processes = ProcessPoolExecutor(self._count, initializer=_end_with_parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.shutdown(cancel_futures=True)

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if self._count == 1:
            yield from map(function, items)
            return
        ahead = deque[Future[Result]]()
        try:
            for item in items:
                ahead.append(self._processes.submit(function, item))
                if len(ahead) > self._count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:  # what is still ahead is not needed
            for later in ahead:
                later.cancel()


def _end_with_parent() -> None:
    """Leave Ctrl-C to the parent, and end when the parent has ended for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
