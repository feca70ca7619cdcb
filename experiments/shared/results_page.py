"""Writes experiments/results/README.md, which has every figure, and the tables of docs/results.md, which has a few.

`make results` writes both again, as every benchmark does at its end, and prints how much code has changed.
`make results BUDGET=60` first repeats benchmarks whose code has changed, for 60 minutes, the shortest first.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from experiments.shared.headlines import FOUND, HEADLINES, Headline, command
from experiments.shared.version import changes, code_of

EXPERIMENTS = Path(__file__).parents[1]
RESULTS = EXPERIMENTS / "results"
PAGE, FIGURES = EXPERIMENTS.parent / "docs" / "results.md", RESULTS / "README.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
AGES = "## How old they are\n"
HEAD = """# All figures

`make results` writes this page from the files beside it; `make bench-NAME` measures.
[docs/results.md](../../docs/results.md) says what the figures mean and where they were measured. A figure in bold
misses its aim. *The same* means the figure of the row above.
"""
HEAD_OF_AGES = """
A results file keeps a hash of every function and class that its benchmark may reach by imports; comments and docstrings
do not count. Where some are changed or new since, the figures are those of older code; where more than 30 % are, no
table shows them. As of the last `make results`:
"""
NUMBERS = {"measured", "paper", "here"}
OUTDATED = 0.3  # no table shows a claim if more than this share of its functions and classes has changed since
Kept = dict[str, dict[str, float]]


def shown() -> Kept:
    """The figures of every measured claim, without outdated claims."""
    kept = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    return {claim: of_claim["figures"] for claim, of_claim in kept.items() if not is_outdated(claim, of_claim)}


def is_outdated(claim: str, kept: dict[str, str]) -> bool:
    """Whether too much of a claim's code has changed since the measurement."""
    counts = _changes(claim, kept)
    return counts is None or counts[0] > OUTDATED * counts[1]


def figures(kept: Kept) -> str:
    """experiments/results/README.md without the ages: a table for every claim."""
    return "\n".join(_lines(kept))


def _lines(kept: Kept) -> Iterator[str]:
    yield HEAD
    for title, headlines in HEADLINES.items():
        yield f"## {title}\n"
        for claim, of_claim in groupby(headlines, key=lambda each: each.claim):
            if claim not in kept:
                yield f"`make {command(claim)}` was not measured on today's code.\n"
                continue
            rows = [each.cells(kept[claim].get(each.figure)) for each in of_claim]
            yield from _table((f"`make {command(claim)}`", "measured", "aim", "paper"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table without the columns that are empty, and with numbers at the right."""
    used = [place for place in range(len(head)) if any(row[place] for row in rows)]
    yield "| " + " | ".join(head[place] for place in used) + " |"
    yield "|" + "|".join("---:" if head[place] in NUMBERS else "---" for place in used) + "|"
    yield from (f"| {' | '.join(row[place] for place in used)} |" for row in rows)
    yield ""


def summary(kept: Kept) -> Iterator[str]:
    """The tables of docs/results.md: some figures, the papers' figures, and missed aims."""
    known = {(each.claim, each.figure): each for of_title in HEADLINES.values() for each in of_title}
    result = [(known[key], kept[key[0]].get(key[1])) for key in FOUND if key[0] in kept]
    yield "\n### Found\n"
    yield from _table(
        ("figure", "measured", "aim", "`make`"),
        [(*each.cells(value)[:3], f"`{command(each.claim)}`") for each, value in result],
    )
    papers = [each for each in known.values() if each.paper is not None and each.claim in kept]
    yield "### The papers' figures\n"
    yield from _table(
        ("figure", "paper", "here", "`make`"),
        [(*each.cells_of_paper(kept[each.claim].get(each.figure)), f"`{command(each.claim)}`") for each in papers],
    )
    yield "### Missed\n"
    yield from _table(("`make`", "aims met", "missed"), list(_missed(known.values(), kept)))
    if hidden := sorted({command(each.claim) for each in known.values()} - {command(claim) for claim in kept}):
        names = "`, `".join(hidden)
        yield f"Not shown, as more than 30 % of their code has changed since they were measured: `{names}`.\n"


def _missed(headlines: Iterable[Headline], kept: Kept) -> Iterator[tuple[str, str, str]]:
    """A row for each measured claim that missed an aim."""
    for claim, of_claim in groupby(sorted(headlines, key=lambda each: each.claim), key=lambda each: each.claim):
        aimed = [each for each in of_claim if each.aim is not None and each.figure in kept.get(claim, {})]
        missed = [each.missed(value) for each in aimed if not each.met(value := kept[claim][each.figure])]
        if missed:
            yield f"`{command(claim)}`", f"{len(aimed) - len(missed)} of {len(aimed)}", "; ".join(missed)


def page(text: str, kept: Kept) -> str:
    """docs/results.md with new tables from the kept figures."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(summary(kept)) + "\n" + END + after


def ages() -> Iterator[str]:
    """A table of each claim's date and machine, and of changes to its code since."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        machine = kept["machine"]
        processor = ", ".join([machine.get("processor", "not noted"), *machine.get("flags", ())])
        counts = _changes(path.stem, kept)
        noted = "not noted" if counts is None else f"{counts[0]}/{counts[1]}"
        rows.append((f"`{command(path.stem)}`", kept["date"], processor, kept.get("commit") or "not noted", noted))
    yield AGES + HEAD_OF_AGES
    yield from _table(
        ("make", "measured on", "processor", "commit", "functions and classes that are changed or new since"), rows
    )


def _changes(claim: str, kept: dict[str, str]) -> tuple[int, int] | None:
    """How many of a claim's functions and classes have changed since its measurement, and of how many; None: not
    recorded."""
    marks = dict(each.rsplit("=", 1) for each in kept.get("code", "").split())
    return changes(marks, code_of(claim)) if marks else None


def stale() -> list[tuple[float, str]]:
    """The claims without figures or with changed code, and their seconds (infinite: unknown), the shortest first."""
    result = []
    for claim in (path.parent.name for path in EXPERIMENTS.glob("*/run.py")):
        path = RESULTS / f"{claim}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        counts = _changes(claim, kept)
        if counts is None or counts[0]:
            result.append((kept.get("seconds", math.inf), claim))
    return sorted(result)


def measure_stale(budget_s: float) -> list[str]:
    """Measure stale claims while the budget lasts, and return the others."""
    until_s, left = time.monotonic() + budget_s, []
    for seconds, claim in stale():
        rest_s = until_s - time.monotonic()
        if (seconds if math.isfinite(seconds) else 0.0) >= rest_s or not _measure(claim, rest_s):
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


def write() -> None:
    kept = shown()
    FIGURES.write_text("\n".join([figures(kept), *ages()]))
    PAGE.write_text(page(PAGE.read_text(), kept))


if __name__ == "__main__":
    if minutes := float(" ".join(sys.argv[1:]) or 0):
        print("not measured: " + (", ".join(measure_stale(60 * minutes)) or "nothing"))
    write()
    print("\n".join(ages()))
