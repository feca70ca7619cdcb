"""Writes the tables of docs/results.md: the figures that matter from experiments/results, with what was aimed at.

`make results` writes it anew, as every benchmark does when it has ended, and tells what code has changed since.
`make results BUDGET=60` first measures for 60 minutes what changed code has made old, the shortest benchmarks first.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from experiments.shared.headlines import HEADLINES, command
from experiments.shared.version import changed, code_of

EXPERIMENTS = Path(__file__).parents[1]
RESULTS = EXPERIMENTS / "results"
PAGE = EXPERIMENTS.parent / "docs" / "results.md"
BEGIN, END = "<!-- headlines -->\n", "<!-- end of headlines -->\n"
AGES, END_OF_AGES = "<!-- ages -->\n", "<!-- end of ages -->\n"


def _kept() -> dict[str, dict[str, float]]:
    """The figures of every claim that was measured."""
    return {path.stem: json.loads(path.read_text())["figures"] for path in RESULTS.glob("*.json")}


def tables() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    kept = _kept()
    for title, headlines in HEADLINES.items():
        yield f"\n### {title}"
        for claim, of_claim in groupby(headlines, key=lambda each: each.claim):
            figures = kept.get(claim, {})
            yield from _table(f"`make {command(claim)}`", [each.cells(figures.get(each.figure)) for each in of_claim])
    yield "\n"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A table without the columns that are empty."""
    used = [place for place in range(4) if place == 0 or any(row[place] for row in rows)]
    yield "\n| " + " | ".join((title, "measured", "aim", "paper")[place] for place in used) + " |"
    yield f"|{'|'.join(('---', '---:', '---', '---:')[place] for place in used)}|"
    yield from (f"| {' | '.join(row[place] for place in used)} |" for row in rows)


def page(text: str) -> str:
    """The page with its tables made anew from the kept figures."""
    return _between(text, BEGIN, END, tables())


def ages() -> str:
    """A table of when and where each claim was measured, and how much of the code that it needs has changed since."""
    return "\n".join(_ages())


def _ages() -> Iterator[str]:
    yield "\n| make | measured on | processor | commit | modules that are changed or new since |\n|---|---|---|---|---|"
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        machine = kept["machine"]
        processor = ", ".join([machine.get("processor", "not noted"), *machine.get("flags", ())])
        changes = _changes(path.stem, kept)
        noted = "not noted" if changes is None else f"{changes[0]}/{changes[1]}"
        commit = kept.get("commit") or "not noted"
        yield f"| `{command(path.stem)}` | {kept['date']} | {processor} | {commit} | {noted} |"
    yield "\n"


def _changes(claim: str, kept: dict[str, str]) -> tuple[int, int] | None:
    """How many modules of a claim have changed since it was measured, and how many it has; None if it is not known."""
    marks = dict(each.rsplit("=", 1) for each in kept.get("code", "").split())
    now = code_of(claim)
    return (len(changed(marks, now)), len(now)) if marks else None


def stale(results: Path = RESULTS) -> list[tuple[float, str]]:
    """The claims that were never measured or whose code has changed since, with the seconds that they took: the
    shortest first. Infinite: nobody knows how long it takes."""
    found = []
    for claim in (path.parent.name for path in EXPERIMENTS.glob("*/run.py")):
        path = results / f"{claim}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        changes = _changes(claim, kept)
        if changes is None or changes[0]:
            found.append((kept.get("seconds", math.inf), claim))
    return sorted(found)


def measure_stale(
    budget_s: float,
    claims: Sequence[tuple[float, str]],
    measure: Callable[[str, float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Measure these claims while the budget lasts, and return those that were not measured. `measure` gets a claim and
    the seconds that it may take."""
    until_s, left = clock() + budget_s, []
    for seconds, claim in claims:
        rest_s = until_s - clock()
        if (seconds if math.isfinite(seconds) else 0.0) >= rest_s or not measure(claim, rest_s):
            left.append(claim)
    return left


def _measure(claim: str, within_s: float) -> bool:
    print(f"measuring {claim}", file=sys.stderr)
    with subprocess.Popen([sys.executable, "-m", "experiments.bench", claim], cwd=EXPERIMENTS.parent) as bench:
        try:
            return bench.wait(within_s) == 0
        except subprocess.TimeoutExpired:
            bench.terminate()
            return False


def _between(text: str, begin: str, end: str, what: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + what + end + after


def write() -> None:
    PAGE.write_text(_between(page(PAGE.read_text()), AGES, END_OF_AGES, ages()))


if __name__ == "__main__":
    if minutes := float(" ".join(sys.argv[1:]) or 0):
        print("not measured: " + (", ".join(measure_stale(60 * minutes, stale(), _measure)) or "nothing"))
    write()
    print(ages())
