"""Writes docs/e3.md and its pictures from the rows that were measured."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.e3.suite import BACKENDS, OURS, E3Figure
from experiments.shared.gains import COLOURS, DOCS

PAGE = DOCS / "e3.md"
HEAD = """# E3's figures, on published curves

Written by `make experiments` (`make bench-e3`) from `experiments/e3/results`. Goodput is the highest rate at which 99 %
of Poisson arrivals are answered within the SLO, found by bisection in the simulator, with the product's own dispatcher;
plans are the planner's, baselines too; devices take the times of curves fitted to published ones
([docs/profiles.md](profiles.md#devices-that-nobody-measured-here)), in half precision. The bound is what no system can
exceed by the same times. The paper's other figures are not made yet; of what its figures 16, 20 and 21 show see
[docs/replanning.md](replanning.md), [docs/planner.md](planner.md) and [docs/profiles.md](profiles.md).
"""


def write(found: Mapping[E3Figure, list[dict[str, Any]]], *, whole: bool) -> None:
    for figure, rows in found.items():
        draw(figure, rows)
    if whole:
        PAGE.write_text("\n".join(_lines(found)) + "\n")


def _lines(found: Mapping[E3Figure, list[dict[str, Any]]]) -> Iterator[str]:
    yield HEAD
    for figure, rows in found.items():
        systems = list(dict.fromkeys(row["system"] for row in rows))
        others = [system for system in systems if system != OURS]
        yield f"## Figure {int(figure.name[3:])}: {figure.title}\n\n**The paper**: {figure.paper}\n"
        yield f"**Here**: {_seen(rows, others)} {figure.differs}\n\n![{figure.title}](e3-{figure.name}.png)\n"
        over = " | ".join(f"over {other}" for other in others)
        yield f"| backend | {figure.axis} | {' | '.join(systems)} | {over} | share of the bound |"
        yield "|---" * (4 + len(systems) + len(others) - 1) + "|"
        for backend in BACKENDS:
            for x in dict.fromkeys(row["x"] for row in rows):
                here = {row["system"]: row for row in rows if (row["backend"], row["x"]) == (backend, x)}
                rates = [f"{here[system]['goodput_per_s']:,.0f}" for system in systems]
                gains = [_ratio(here[OURS], here[system]) for system in others]
                yield f"| {' | '.join([backend, x, *rates, *gains])} | {here[OURS]['share']:.0%} |"
        yield ""


def _ratio(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{ours['goodput_per_s'] / other['goodput_per_s']:.2f}" if other["goodput_per_s"] else "-"


def _seen(rows: list[dict[str, Any]], others: list[str]) -> str:
    told = []
    for backend, name in zip(BACKENDS, ("eager PyTorch", "ONNX Runtime"), strict=True):
        best = []
        for system in others:
            pairs = [
                (ours["goodput_per_s"], row["goodput_per_s"])
                for ours in rows
                for row in rows
                if (ours["backend"], ours["system"], ours["x"]) == (backend, OURS, row["x"])
                and (row["backend"], row["system"]) == (backend, system)
            ]
            best.append(f"{max((a / b for a, b in pairs if b), default=0.0):.2f} times {system}")
        told.append(f"up to {' and '.join(best)} by {name}")
    return f"{', '.join(told)}."[0].upper() + f"{', '.join(told)}."[1:]


def draw(figure: E3Figure, rows: list[dict[str, Any]]) -> None:
    """Bars by what stands on the axis, one panel for each backend."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.4), layout="constrained")
    systems = list(dict.fromkeys(row["system"] for row in rows))
    for axes, backend in zip(picture.subplots(1, len(BACKENDS)), BACKENDS, strict=True):
        here = [row for row in rows if row["backend"] == backend]
        xs = list(dict.fromkeys(row["x"] for row in here))
        for index, system in enumerate(systems):
            heights = [row["goodput_per_s"] for row in here if row["system"] == system]
            at = [place + 0.25 * (index - (len(systems) - 1) / 2) for place in range(len(xs))]
            axes.bar(at, heights, 0.24, color=COLOURS[system], label=system)
        bound = [row["goodput_per_s"] / row["share"] if row["share"] else 0.0 for row in here if row["system"] == OURS]
        axes.plot(range(len(xs)), bound, "k_", markersize=28, label="bound")
        axes.set_xticks(range(len(xs)), xs)
        axes.set(xlabel=figure.axis, ylabel="goodput (inputs per second)", title=f"{figure.title}, {backend}")
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    picture.savefig(DOCS / f"e3-{figure.name}.png", dpi=110)
