"""What takes seconds to make is made once a run of tests: by the process that needs it first, for all of them."""

import fcntl
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

FOLDER = Path()  # of the run; tests/conftest.py sets it


def made_once(make: Callable[..., None]) -> Callable[..., Path]:
    """`make(folder, ...)` fills a folder. Without its first argument it returns a folder that is full, and is called
    only if none with these arguments is there yet."""

    @cache
    @wraps(make)
    def folder(*arguments: Any) -> Path:
        place = FOLDER / "-".join([make.__module__.rpartition(".")[2], make.__name__, *map(str, arguments)])
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                unfinished = place.with_name(f"{place.name}.unfinished")
                unfinished.mkdir(exist_ok=True)
                make(unfinished, *arguments)
                unfinished.rename(place)
        return place

    return folder
