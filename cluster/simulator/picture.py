"""The picture of a simulated run: load and goodput, latency, and refused inputs over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.load.workloads import Floats
from cluster.simulator.report import Report
from cluster.simulator.tally import Tally
from profiles.picture import BLUE, DARK, ORANGE, RED, plain, plain_logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))  # of the time axis, with their seconds
MANY = 3  # a run of fewer than this many of a unit is shown in the next smaller one


def draw(report: Report, slo_s: float, path: Path, changes_s: Sequence[float] = ()) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tally = report.tally
    unit_s, unit = next((each for each in UNITS if tally.seconds >= MANY * each[0]), UNITS[-1])
    at = (np.arange(len(tally.arrived)) + 0.5) * tally.seconds / len(tally.arrived) / unit_s
    figure, axes = plt.subplots(3, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
    for draw_one, each in zip((_load, _latency, _lost), axes, strict=True):
        draw_one(each, at, tally, slo_s)
        for number, at_s in enumerate(changes_s):
            each.axvline(at_s / unit_s, color=RED, linewidth=0.7, alpha=0.5, label="" if number else "new plan")
        each.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
        plain(each)
    axes[-1].set_xlabel(f"simulated {unit}")
    figure.suptitle(f"{report.goodput_per_s:,.0f} inputs per second within {slo_s * 1e3:g} ms, simulated", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _load(axes: "Axes", at: Floats, tally: Tally, slo_s: float) -> None:
    axes.fill_between(at, tally.arrived * _per_s(tally), color="#dddddd", label="arrive")
    axes.plot(at, tally.good * _per_s(tally), color=BLUE, label="answered in time")
    axes.set(ylabel="inputs per second", ylim=(0, None))


def _latency(axes: "Axes", at: Floats, tally: Tally, slo_s: float) -> None:
    axes.axhline(slo_s * 1e3, color=RED, linewidth=0.8, label="SLO")
    axes.plot(at, tally.quantiles_s(0.5) * 1e3, color=BLUE, label="p50")
    axes.plot(at, tally.quantiles_s(0.99) * 1e3, color=ORANGE, label="p99")
    axes.set(ylabel="latency (ms)", yscale="log")
    plain_logarithmic(axes.yaxis)


def _lost(axes: "Axes", at: Floats, tally: Tally, slo_s: float) -> None:
    for name, colour in (("refused", ORANGE), ("expired", RED), ("failed", DARK)):
        axes.plot(at, getattr(tally, name) * _per_s(tally), color=colour, label=name)
    axes.set(ylabel="not answered, per second", ylim=(0, max(1.0, axes.get_ylim()[1])))


def _per_s(tally: Tally) -> float:
    return len(tally.arrived) / tally.seconds
