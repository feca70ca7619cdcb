"""The progress of long tasks, on standard error: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, track

FIRST_LINE_S = 2.0  # a task that ends sooner prints nothing
EVERY_S = 5.0  # between further lines

Item = TypeVar("Item")


def show(
    items: Iterable[Item], what: str, total: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterable[Item]:
    """Yield the items and show how many of them are done."""
    console = Console(stderr=True)
    if console.is_terminal:
        return track(items, what, total, console=console, transient=True)
    return _in_lines(items, what, len(items) if total is None and isinstance(items, Sized) else total, clock)


@contextmanager
def bar(what: str, total: float) -> Iterator[Callable[..., None]]:
    """Show the part of `total` that is done. Yields a function that gets this part, and the present step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with busy(what) as show_step:

            def note(done: float, share: float = 0.0, step: str = "") -> None:
                show_step(f"{what} {step}".rstrip() + f", {(done + share) / total:.0%} done")

            yield note
        return
    with Progress(console=console, transient=True) as shown:
        task = shown.add_task(what, total=total)

        def move(done: float, share: float = 0.0, step: str = "") -> None:
            """`share`: of the next unit, beside those that are done."""
            shown.update(task, completed=done + share, description=f"{what} {step}")

        yield move


@contextmanager
def busy(
    what: str, clock: Callable[[], float] = time.monotonic, ended: Callable[[], Event] = Event
) -> Iterator[Callable[[str], None]]:
    """Show that a task without countable steps is running. Yields a function that names its present step."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return
    end, steps = ended(), deque([what], maxlen=1)
    printing = Thread(target=_print_until, args=(end, steps, clock), daemon=True)
    printing.start()
    try:
        yield steps.append
    finally:
        end.set()
        printing.join()


def _print_until(end: Event, steps: Sequence[str], clock: Callable[[], float]) -> None:
    began_s, wait_s = clock(), FIRST_LINE_S
    while not end.wait(wait_s):
        print(f"{steps[-1]}: {clock() - began_s:.0f} s so far", file=sys.stderr, flush=True)
        wait_s = EVERY_S


def _in_lines(items: Iterable[Item], what: str, total: int | None, clock: Callable[[], float]) -> Iterator[Item]:
    began_s = clock()
    due_s = began_s + FIRST_LINE_S
    for done, item in enumerate(items):
        if (now_s := clock()) >= due_s:
            so_far = f"{done:,}" if total is None else f"{done:,} of {total:,}"
            print(f"{what}: {so_far} after {now_s - began_s:.0f} s", file=sys.stderr, flush=True)
            due_s = now_s + EVERY_S
        yield item
