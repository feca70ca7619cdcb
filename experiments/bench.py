"""Run one benchmark: `python -m experiments.bench NAME` measures the claim in `experiments/NAME/run.py`.

A claim is a folder with `run.py`, whose `measure()` returns its figures by name. Here they are printed as a table and
written to `experiments/results/NAME.json` with the machine, the date and the commit, so that every quoted number has a
command.

Arguments of `measure()` make a benchmark smaller: `python -m experiments.bench replan changes=6`. Such figures are
printed, not kept. `on=amx` keeps figures of another machine in a file of their own (`NAME@amx.json`).
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.shared import results_page
from experiments.shared import version as version_of
from experiments.shared.headlines import HEADLINES
from experiments.shared.kept_parts import SECONDS
from experiments.shared.machine import end_as_by_ctrl_c, processor, processor_flags
from experiments.shared.results_page import EXPERIMENTS, RESULTS
from isobatch.profiles.errors import UserError


def claims() -> list[str]:
    """The names that can be measured."""
    return sorted(path.parent.name for path in EXPERIMENTS.glob("*/run.py"))


def commit_of_tree(root: Path = EXPERIMENTS.parent) -> str:
    """The commit that was measured, with a plus if files differ from it; empty outside of git."""
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=8", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changes else "")


@dataclass(frozen=True)
class Conditions:
    """Where and when figures were measured. `load`: how many programs needed a core in the minute before."""

    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))
    commit: str = field(default_factory=commit_of_tree)
    began_s: float = field(default_factory=time.monotonic)

    def fields(self) -> dict[str, object]:
        """The conditions as a results file keeps them, at the end of the measurement."""
        machine = {"processor": processor(), "flags": processor_flags(), "cores": os.cpu_count(), "load": self.load}
        packages = {name: version(name) for name in ("numpy", "torch", "ray")}
        return {
            "machine": {**machine, "python": platform.python_version(), **packages},
            "date": datetime.now(UTC).date().isoformat(),
            "commit": self.commit,
            "seconds": round(max(time.monotonic() - self.began_s, sum(SECONDS))),
        }


def write(name: str, figures: Mapping[str, float], conditions: Conditions, folder: Path = RESULTS) -> Path:
    """Write the figures with their conditions and hashes of the code."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {figure: float(f"{value:.5g}") for figure, value in figures.items()}
    code = " ".join(f"{module}={mark}" for module, mark in version_of.code_of(name).items())
    result = {"figures": rounded, **conditions.fields(), "code": code}
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def table(name: str, figures: Mapping[str, float]) -> Table:
    """The figures beside their aims; figures that miss an aim are bold."""
    aims = {each.figure: each for group in HEADLINES.values() for each in group if each.claim == name}
    result = Table("figure", "value", "aim", title=f"bench-{name}")
    for figure, value in figures.items():
        aim = aims.get(figure)
        missed = aim is not None and not aim.met(value)
        result.add_row(figure, f"{value:,.4g}", aim.cells(value)[2] if aim else "", style="bold" if missed else "")
    return result


def smaller(parts: Sequence[str]) -> dict[str, int | str]:
    """
    >>> smaller(["changes=6", "parts=changes"])
    {'changes': 6, 'parts': 'changes'}
    """
    pairs = (each.split("=", 1) for each in parts)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def main(arguments: list[str]) -> int:
    end_as_by_ctrl_c()
    name, *parts = arguments or [""]
    if name not in claims() or not all("=" in each for each in parts):
        usage = "python -m experiments.bench NAME [WHAT=SMALLER ...], with NAME one of"
        print(f"usage: {usage}: {', '.join(claims())}", file=sys.stderr)
        return 2
    conditions = Conditions()
    options = smaller(parts)
    claim = f"{name}@{machine}" if (machine := options.pop("on", "")) else name
    try:
        figures = import_module(f"experiments.{name}.run").measure(**options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    console.print(table(claim, figures))
    if options:
        print(f"not written to {RESULTS.name}/{claim}.json: {' '.join(parts)} makes this a part of the benchmark")
        return 0
    console.print(f"written to {write(claim, figures, conditions)}")
    results_page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
