"""Writes the tables of docs/results.md: the figures that matter from experiments/results, with what was aimed at.

`make results` writes it anew, as every benchmark does when it has ended, and tells what code has changed since.
"""

import json
from collections.abc import Iterator, Sequence
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
    """A table of when each claim was measured, and how much of the code that it depends on has changed since."""
    return "\n".join(_ages())


def _ages() -> Iterator[str]:
    yield "\n| make | measured on | modules that are changed or new since |\n|---|---|---|"
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        marks = dict(each.rsplit("=", 1) for each in kept.get("code", "").split())
        now = code_of(path.stem)
        changes = f"{len(changed(marks, now))}/{len(now)}" if marks else "not noted"
        yield f"| `{command(path.stem)}` | {kept['date']} | {changes} |"
    yield "\n"


def _between(text: str, begin: str, end: str, what: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + what + end + after


def write() -> None:
    PAGE.write_text(_between(page(PAGE.read_text()), AGES, END_OF_AGES, ages()))


if __name__ == "__main__":
    write()
    print(ages())
