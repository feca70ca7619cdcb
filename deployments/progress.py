"""How far what takes long has come, on standard error: a bar on a terminal, elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

from rich.console import Console
from rich.progress import track

FIRST_S = 2.0
EVERY_S = 5.0

Item = TypeVar("Item")


def show(
    items: Iterable[Item], what: str, total: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterable[Item]:
    """The items, while it shows how many of them are done."""
    console = Console(stderr=True)
    if console.is_terminal:
        return track(items, what, total, console=console, transient=True)
    return _in_lines(items, what, len(items) if total is None and isinstance(items, Sized) else total, clock)


@contextmanager
def busy(what: str, clock: Callable[[], float] = time.monotonic, ended: Callable[[], Event] = Event) -> Iterator[None]:
    """Show that something goes on whose steps nobody counts."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
        return
    end = ended()
    telling = Thread(target=_tell_until, args=(end, what, clock), daemon=True)
    telling.start()
    try:
        yield
    finally:
        end.set()
        telling.join()


def _tell_until(end: Event, what: str, clock: Callable[[], float]) -> None:
    began_s, wait_s = clock(), FIRST_S
    while not end.wait(wait_s):
        print(f"{what}: {clock() - began_s:.0f} s so far", file=sys.stderr, flush=True)
        wait_s = EVERY_S


def _in_lines(items: Iterable[Item], what: str, total: int | None, clock: Callable[[], float]) -> Iterator[Item]:
    began_s = clock()
    due_s = began_s + FIRST_S
    for done, item in enumerate(items):
        if (now_s := clock()) >= due_s:
            so_far = f"{done:,}" if total is None else f"{done:,} of {total:,}"
            print(f"{what}: {so_far} after {now_s - began_s:.0f} s", file=sys.stderr, flush=True)
            due_s = now_s + EVERY_S
        yield item
