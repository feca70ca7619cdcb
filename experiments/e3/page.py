"""Writes docs/e3.md and its pictures from the rows that were measured."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from experiments.e3.measuring import ALL_RAMPS, OURS, SERIAL, E3Setting, planned
from experiments.e3.suite import BACKENDS, FIGURES, E3Figure
from experiments.shared import gains
from experiments.shared.gains import DOCS
from optimizer.objective import Objective
from optimizer.pipelines import shortfalls

PAGE = DOCS / "e3.md"
COLOURS = {**gains.COLOURS, SERIAL: gains.COLOURS["serial"], ALL_RAMPS: "#7fb3d5"}
Row = Mapping[str, Any]
LOST = {  # in a word or two
    shortfalls.WAITING: "waiting",
    shortfalls.FEW: "few devices",
    shortfalls.LAUNCHES: "launches",
    shortfalls.RAMPS: "ramps",
    shortfalls.LATENCY: "SLO",
    shortfalls.APART: "kinds",
}
ENOUGH, LEAST = 0.95, 0.005  # of the bound: where nothing is told of what is lost; the smallest part that is told
HEAD = """# E3's figures, on published curves

Written by `make experiments` (`make bench-e3`) from `experiments/e3/results`. Goodput is the highest rate at which 99 %
of Poisson arrivals are answered within the SLO, found to 1 % in the simulator (runs of 30 SLOs, in which up to 3 % too
much passes, for all systems alike), with the product's own dispatcher; plans are the planner's, baselines too;
devices take the times of curves fitted to published ones
([docs/profiles.md](profiles.md#devices-that-nobody-measured-here)), in half precision. The bound is what no system can
exceed by the same times. In the tables "over" is how many times better isobatch is: more inputs, less time, fewer
dollars. Figures 7 and 13 have the paper's fleets; the others have 4 of its 16 V100, as what one device answers hardly
depends on how many others there are (figures 7 and 16 show both), and simulating them takes a quarter of the time.

Where isobatch keeps less than 95 % of the bound, "lost" says to what, in shares of the bound that add up. The planner
is asked again with one restriction after the other lifted (`isobatch plan --shortfalls` does so for any plan):
*waiting* is what the simulator sustains less than the plan's devices compute, as inputs come in bursts; *few devices*,
what a hundred times as many could do better each; *launches*, what a launch and a hand-over cost; *ramps*, what open
ones take and who runs on behind closed ones; *SLO*, what no limit of time would add; *kinds*, what several kinds could
share.

Not here: figures 10 to 12 (decoders, [docs/decoding.md](decoding.md)), 20 (how long planning takes,
[docs/planner.md](planner.md)) and 21 (the forecast, [docs/profiles.md](profiles.md#forecasting)), which are measured on
other things than these curves.
"""


def write(found: Mapping[E3Figure, Sequence[Row]], old: Collection[E3Figure], *, whole: bool) -> None:
    """`old`: those whose code or settings have changed since they were measured."""
    for figure, rows in found.items():
        draw(figure, rows)
    if whole:
        PAGE.write_text("\n".join(_lines(found, old)) + "\n")


def ratio(figure: E3Figure, rows: Sequence[Row], other: Row) -> float | None:
    """How many times better isobatch is than this row, at its place; None where one of them cannot do it."""
    (ours,) = (
        row["value"]
        for row in rows
        if (row["backend"], row["x"], row["system"]) == (other["backend"], other["x"], OURS)
    )
    if not (ours and other["value"]):
        return None
    better: float = other["value"] / ours if figure.less_is_better else ours / other["value"]
    return better


def _lines(found: Mapping[E3Figure, Sequence[Row]], old: Collection[E3Figure]) -> Iterator[str]:
    yield HEAD
    there = {figure.number for figure in found}
    if missing := [str(figure.number) for figure in FIGURES if figure.number not in there]:
        yield f"Not measured yet, by `make experiments`: {', '.join(missing)}.\n"
    for figure, rows in found.items():
        yield f"## Figure {figure.number}: {figure.title}\n\n**The paper**: {figure.paper}\n"
        since = "(Code or settings have changed since.)" if figure in old else ""
        yield f"**Here**: {' '.join(filter(None, (_seen(figure, rows), figure.differs, since)))}\n"
        yield f"![{figure.title}](e3-{figure.name}.png)\n"
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
    """To what goodput is lost; nothing is said of plans that are made for other inputs than come."""
    setting: E3Setting = dict(figure.settings)[row["x"]]
    if row["share"] >= ENOUGH or setting.expected:
        return ""
    facts = setting.facts(row["backend"])
    plan = planned(setting, facts, row["backend"], OURS)
    fixed = setting.batch if setting.fixed else None
    asked = Objective(slo_s=setting.slo_s, max_batch=setting.batch, fixed_batch=fixed)
    found = shortfalls.shortfalls(plan, facts, asked, row["value"]) if plan else ()
    return ", ".join(f"{LOST[each.why]} {each.share:.0%}" for each in found if each.share >= LEAST)


def _number(value: float) -> str:
    """
    >>> _number(25470.0), _number(31.42), _number(0.0)
    ('25,470', '31.4', '-')
    """
    if not value:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seen(figure: E3Figure, rows: Sequence[Row]) -> str:
    """By how much isobatch is better at least and at most, by backend."""
    told = []
    for backend, name in zip(BACKENDS, ("eager PyTorch", "ONNX Runtime"), strict=True):
        here = [row for row in rows if row["backend"] == backend]
        spans = []
        for system in dict.fromkeys(row["system"] for row in here if row["system"] != OURS):
            better = [
                each for row in here if row["system"] == system and (each := ratio(figure, here, row)) is not None
            ]
            spans.append(f"{_span(better)} over {system}")
        told.append(f"by {name} {' and '.join(spans)}")
    said = "; ".join(told)
    return f"{said[0].upper()}{said[1:]}."


def _span(better: Sequence[float]) -> str:
    """
    >>> _span([1.31, 1.2, 1.5]), _span([1.0, 1.0]), _span([])
    ('1.20 to 1.50 times', '1.00 times', 'no number')
    """
    ends = dict.fromkeys(f"{end(better):.2f}" for end in (min, max)) if better else ()
    return f"{' to '.join(ends)} times" if ends else "no number"


def draw(figure: E3Figure, rows: Sequence[Row]) -> None:
    """Bars by what stands on the axis, one panel for each backend."""
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
