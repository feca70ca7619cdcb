"""Run one benchmark: `python -m experiments.bench NAME` measures the claim in `experiments/NAME/run.py`.

A claim is a folder with `run.py`, whose `measure()` returns its figures by name. Here they are printed as a table and
written to `experiments/results/NAME.json` with the machine and the date, so that every quoted number has a command.

A part of one is run by naming what is smaller, as `measure()` calls it: `python -m experiments.bench replan changes=6`.
Its figures are printed, not kept.
"""

import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.shared import results_page
from experiments.shared import version as version_of
from experiments.shared.results_page import EXPERIMENTS, RESULTS
from isobatch.profiles.errors import UserError


def claims() -> list[str]:
    """The names that can be measured."""
    return sorted(path.parent.name for path in EXPERIMENTS.glob("*/run.py"))


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    packages = {name: version(name) for name in ("numpy", "torch", "ray")}
    return {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version(), **packages}


def _processor() -> str:
    """Its model, where Linux tells; its architecture elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def write(name: str, figures: Mapping[str, float], folder: Path = RESULTS) -> Path:
    """Keep the figures beside the machine, the date and the code that they belong to."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {figure: float(f"{value:.5g}") for figure, value in figures.items()}
    code = " ".join(f"{module}={mark}" for module, mark in version_of.code_of(name).items())
    result = {"figures": rounded, "machine": machine(), "date": datetime.now(UTC).date().isoformat(), "code": code}
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def table(name: str, figures: Mapping[str, float]) -> Table:
    result = Table("figure", "value", title=f"bench-{name}")
    for figure, value in figures.items():
        result.add_row(figure, f"{value:,.4g}")
    return result


def smaller(parts: Sequence[str]) -> dict[str, int | str]:
    """
    >>> smaller(["changes=6", "parts=changes"])
    {'changes': 6, 'parts': 'changes'}
    """
    pairs = (each.split("=", 1) for each in parts)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def _end(number: int, _: object) -> None:
    """End as Ctrl-C ends it: what was started is stopped. That is not interrupted by more of the same."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _end)
    name, *parts = arguments or [""]
    if name not in claims() or not all("=" in each for each in parts):
        usage = "python -m experiments.bench NAME [WHAT=SMALLER ...], with NAME one of"
        print(f"usage: {usage}: {', '.join(claims())}", file=sys.stderr)
        return 2
    try:
        figures = import_module(f"experiments.{name}.run").measure(**smaller(parts))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    console.print(table(name, figures))
    if parts:
        print(f"not written to {RESULTS.name}/{name}.json: {' '.join(parts)} makes this a part of the benchmark")
        return 0
    console.print(f"written to {write(name, figures)}")
    results_page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
