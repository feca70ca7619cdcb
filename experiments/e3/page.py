"""Writes docs/e3.md, its pictures and their values (tables.md) from the rows that were measured."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from experiments.e3.measuring import ALL_RAMPS, EARLY, FULL, OURS, SERIAL, E3Setting, planned
from experiments.e3.suite import BACKENDS, FIGURES, E3Figure
from experiments.shared import shortfalls
from isobatch.optimizer.objective import Objective

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "e3.md"
BLUE, PALE, ORANGE, GREY = "#1b6ca8", "#7fb3d5", "#d98c3f", "#999999"
COLOURS = {OURS: BLUE, SERIAL: PALE, EARLY: ORANGE, FULL: GREY, ALL_RAMPS: PALE}
Row = Mapping[str, Any]
LOST = {  # short names of restrictions
    shortfalls.WAITING: "waiting",
    shortfalls.FEW: "few devices",
    shortfalls.LAUNCHES: "launches",
    shortfalls.RAMPS: "ramps",
    shortfalls.LATENCY: "SLO",
    shortfalls.APART: "kinds",
}
ENOUGH = 0.95  # of the bound: above it, losses are not listed
LEAST = 0.005  # of the bound: the least loss in lists
TABLES = Path(__file__).with_name("tables.md")
HEAD = """# E3's figures, on published curves

E3's evaluation (SOSP '24), repeated in simulation. `make experiments` measures what is missing and writes this page.
The values behind the pictures are in `experiments/e3/tables.md`.

- **Devices** take times of curves that are fitted to published ones, in half precision
  ([profiles.md](profiles.md#devices-that-nobody-measured-here)). Figures 7 and 13 have the paper's fleets, the others
  4 of its 16 V100.
- **Goodput** is the highest rate at which 99 % of Poisson arrivals are answered within the SLO, with the dispatcher
  that serves. Plans, those of the baselines too, are the planner's; in figure 24, where batches are free, the best of
  several in simulation.
- **1.27-2.08 over early exit** means: isobatch is 1.27 to 2.08 times better, which is more inputs, less time or fewer
  dollars. *Early exit* has all ramps open, and its batches shrink; *no exits* is the full network. The *bound* in the
  pictures is what no system can exceed with the same times.

Figures 10 to 12 (decoders), 20 (time to plan) and 21 (the forecast) are measured on other things:
[decoding.md](decoding.md), [planner.md](planner.md), [profiles.md](profiles.md#forecasting).
"""
TABLES_HEAD = """# The values behind docs/e3.md

"Over" is how many times better isobatch is. Where isobatch keeps less than 95 % of the bound, "lost" says why, in
shares of the bound: *waiting*, since inputs come in bursts; *few devices*, what a hundred times as many could do better
each; *launches*, what launches and hand-overs cost; *ramps*, what open ramps take, and inputs that run on behind closed
ones; *SLO*, what no limit of time would add; *kinds*, what several kinds could share.
"""


def write(measured: Mapping[E3Figure, Sequence[Row]], old: Collection[E3Figure], *, whole: bool) -> None:
    """Write the page, pictures and tables. `old`: figures whose code or settings have changed since."""
    for figure, rows in measured.items():
        draw(figure, rows)
    if whole:
        PAGE.write_text("\n".join(_lines(measured, old)))
        TABLES.write_text("\n".join(_tables(measured)))


def ratio(figure: E3Figure, rows: Sequence[Row], other: Row) -> float | None:
    """How many times better isobatch is than this row; None if either of them has no value."""
    (ours,) = (
        row["value"]
        for row in rows
        if (row["backend"], row["x"], row["system"]) == (other["backend"], other["x"], OURS)
    )
    if not (ours and other["value"]):
        return None
    better: float = other["value"] / ours if figure.less_is_better else ours / other["value"]
    return better


def _lines(measured: Mapping[E3Figure, Sequence[Row]], old: Collection[E3Figure]) -> Iterator[str]:
    yield HEAD
    there = {figure.number for figure in measured}
    if missing := [str(figure.number) for figure in FIGURES if figure.number not in there]:
        yield f"Not measured yet, by `make experiments`: {', '.join(missing)}.\n"
    if older := [str(figure.number) for figure in measured if figure in old]:
        yield f"Measured by older code or settings: figures {', '.join(older)}.\n"
    for figure, rows in measured.items():
        here = " ".join(filter(None, (_gains(figure, rows), figure.differs)))
        yield f"## Figure {figure.number}: {figure.title}\n"
        yield fill(f"**Paper:** {figure.paper} **Here:** {here}", 120, break_on_hyphens=False) + "\n"
        yield f"![Figure {figure.number}](e3-{figure.name}.png)\n"


def _tables(measured: Mapping[E3Figure, Sequence[Row]]) -> Iterator[str]:
    yield TABLES_HEAD
    for figure, rows in measured.items():
        yield f"## Figure {figure.number}: {figure.title}\n"
        yield from _table(figure, rows)
        yield ""


def _table(figure: E3Figure, rows: Sequence[Row]) -> Iterator[str]:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    bounded = any(row["share"] is not None for row in rows)
    over = [f"over {system}" for system in systems if system != OURS]
    head = ["backend", figure.axis, *systems, *over, *(["share of the bound", "lost"] if bounded else [])]
    yield f"{figure.unit[0].upper()}{figure.unit[1:]}:\n\n| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for backend in BACKENDS:
        for x in dict.fromkeys(row["x"] for row in rows):
            here = [row for row in rows if (row["backend"], row["x"]) == (backend, x)]
            better = [ratio(figure, here, row) for row in here if row["system"] != OURS]
            cells = [
                *(_number(row["value"]) for row in here),
                *("-" if each is None else f"{each:.2f}" for each in better),
            ]
            ours = [row for row in here if row["system"] == OURS and bounded]
            bound = [each for row in ours for each in (f"{row['share']:.0%}", _lost(figure, row))]
            yield f"| {' | '.join([backend, x, *cells, *bound])} |"


def _lost(figure: E3Figure, row: Row) -> str:
    """The restrictions that cost goodput; empty for plans that expect other exits than those of the inputs."""
    setting: E3Setting = dict(figure.settings)[row["x"]]
    if row["share"] >= ENOUGH or setting.expected:
        return ""
    facts = setting.facts(row["backend"])
    plan = planned(setting, facts, row["backend"], OURS)
    fixed = setting.batch if setting.fixed else None
    terms = Objective(slo_s=setting.slo_s, max_batch=setting.batch, fixed_batch=fixed)
    result = shortfalls.shortfalls(plan, facts, terms, row["value"]) if plan else ()
    return ", ".join(f"{LOST[each.why]} {each.share:.0%}" for each in result if each.share >= LEAST)


def _number(value: float) -> str:
    """
    >>> _number(25470.0), _number(31.42), _number(0.0)
    ('25,470', '31.4', '-')
    """
    if not value:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gains(figure: E3Figure, rows: Sequence[Row]) -> str:
    """The smallest and largest gain over each system, by backend."""
    sentences = []
    for backend, name in zip(BACKENDS, ("Eager PyTorch", "ONNX Runtime"), strict=True):
        of_backend = [row for row in rows if row["backend"] == backend]
        spans = []
        for system in dict.fromkeys(row["system"] for row in of_backend if row["system"] != OURS):
            ratios = [ratio(figure, of_backend, row) for row in of_backend if row["system"] == system]
            spans.append(f"{_span([each for each in ratios if each is not None])} over {system}")
        sentences.append(f"{name}: {', '.join(spans)}.")
    return " ".join(sentences)


def _span(better: Sequence[float]) -> str:
    """
    >>> _span([1.31, 1.2, 1.5]), _span([1.0, 1.0]), _span([])
    ('1.20-1.50', '1.00', 'no number')
    """
    ends = dict.fromkeys(f"{end(better):.2f}" for end in (min, max)) if better else ()
    return "-".join(ends) or "no number"


def draw(figure: E3Figure, rows: Sequence[Row]) -> None:
    """Draw the bars of each point of the axis, with a panel for each backend."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.4), layout="constrained")
    systems = list(dict.fromkeys(row["system"] for row in rows))
    wide = 0.75 / len(systems)
    for axes, backend in zip(picture.subplots(1, len(BACKENDS)), BACKENDS, strict=True):
        here = [row for row in rows if row["backend"] == backend]
        xs = list(dict.fromkeys(row["x"] for row in here))
        for index, system in enumerate(systems):
            heights = [row["value"] for row in here if row["system"] == system]
            at = [place + wide * (index - (len(systems) - 1) / 2) for place in range(len(xs))]
            axes.bar(at, heights, 0.96 * wide, color=COLOURS[system], label=system)
        bound = [row["value"] / row["share"] for row in here if row["system"] == OURS and row["share"]]
        if len(bound) == len(xs):
            axes.plot(range(len(xs)), bound, "k_", markersize=28, label="bound")
        axes.set_xticks(
            range(len(xs)), [x.replace(", ", ",\n") for x in xs], fontsize=7 if max(map(len, xs)) > 6 else 9
        )
        axes.set(xlabel=figure.axis, ylabel=figure.unit, title=f"Figure {figure.number}, {backend}")
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    picture.savefig(DOCS / f"e3-{figure.name}.png", dpi=110)
