"""Keeps what a part of a benchmark has measured, so that an interrupted run goes on with the next part."""

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

Figures = Mapping[str, float] | Iterable[tuple[str, float]]
SECONDS: list[float] = []  # what each part of this run took, whenever it was measured


def place_of(claim: str, *about: str, module: str = "run") -> Path:
    """Where something is kept on this machine, as long as the code behind a module of the benchmark stays the same."""
    code = json.dumps([*about, _code_behind(claim, module)])
    return cache_directory() / f"bench-{claim}" / sha256(code.encode()).hexdigest()[:16]


@cache
def _code_behind(claim: str, module: str) -> dict[str, str]:
    return code_behind(f"experiments/{claim}/{module}.py")


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """What is kept there as JSON; if there is nothing, what is measured now."""
    if path.is_file():
        return json.loads(path.read_text())
    result = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(result))
    draft.replace(path)  # whole, even if the run is interrupted
    return result


def kept_part(
    claim: str, part: str, options: str, again: bool, measure: Callable[[], Figures], console: Console
) -> dict[str, float]:
    """The figures of a part, as the same code measured them on this machine before, or measured now."""
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
