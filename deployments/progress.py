"""Progress bars on standard error, shown only on a terminal."""

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def show(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    console = Console(stderr=True)
    return track(items, what, total, console=console, transient=True, disable=not console.is_terminal)
