"""Keeps what a part of a benchmark has measured, so that an interrupted run goes on with the next part."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from rich.console import Console

from experiments.shared.version import code_of
from isobatch.deployments.folders import cache_directory

Figures = Mapping[str, float] | Iterable[tuple[str, float]]


def place_of(claim: str, *about: str) -> Path:
    """Where something is kept on this machine, as long as the code of the benchmark stays the same."""
    code = json.dumps([*about, code_of(claim)])
    return cache_directory() / f"bench-{claim}" / sha256(code.encode()).hexdigest()[:16]


def kept_part(
    claim: str, part: str, options: str, again: bool, measure: Callable[[], Figures], console: Console
) -> dict[str, float]:
    """The figures of a part, as the same code measured them on this machine before, or measured now."""
    path = place_of(claim, part, options).with_suffix(".json")
    if path.is_file() and not again:
        console.print(f"{part}: measured before (again=1 measures it anew)")
        kept: dict[str, float] = json.loads(path.read_text())
        return kept
    console.print(f"{part}: measuring")
    began_s, figures = time.monotonic(), dict(measure())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures))
    console.print(f"{part}: measured in {time.monotonic() - began_s:.0f} s")
    return figures
