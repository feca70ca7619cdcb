"""Keeps the figures of each part of a benchmark, so that an interrupted run continues with the next part."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.shared.version import code_behind
from isobatch.deployments.folders import cache_directory
from isobatch.profiles.files import write_whole

Figures = Mapping[str, float] | Iterable[tuple[str, float]]
SECONDS: list[float] = []  # of each part, also of kept ones


def place_of(claim: str, *about: str, module: str = "run") -> Path:
    """A path in this machine's cache, which changes with the code behind a module of the benchmark."""
    code = json.dumps([*about, _code_behind(claim, module)])
    return cache_directory() / f"bench-{claim}" / sha256(code.encode()).hexdigest()[:16]


@cache
def _code_behind(claim: str, module: str) -> dict[str, str]:
    return code_behind(f"experiments/{claim}/{module}.py")


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """The JSON of this file; without the file, a new measurement, which is then kept."""
    if path.is_file():
        return json.loads(path.read_text())
    result = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result))
    return result


def kept_part(
    claim: str, part: str, options: str, again: bool, measure: Callable[[], Figures], console: Console
) -> dict[str, float]:
    """The figures of a part, kept by the same code on this machine, or measured now."""
    path = place_of(claim, part, options).with_suffix(".json")
    if again:
        path.unlink(missing_ok=True)
    console.print(f"{part}: " + ("measured before (again=1 measures it anew)" if path.is_file() else "measuring"))
    result = kept(path, lambda: _timed(measure))
    SECONDS.append(result["seconds"])
    console.print(f"{part}: {SECONDS[-1]:.0f} s")
    figures: dict[str, float] = result["figures"]
    return figures


def _timed(measure: Callable[[], Figures]) -> dict[str, Any]:
    began_s = time.monotonic()
    figures = dict(measure())
    return {"figures": figures, "seconds": time.monotonic() - began_s}
