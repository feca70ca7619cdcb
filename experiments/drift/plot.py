"""The picture of goodput over time with every change of plan, as E3's figure 16."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.drift.suite import Suite
from isobatch.cluster.controller.rehearsal import Replanned
from isobatch.cluster.load.workloads import Floats
from isobatch.cluster.simulator.report import Report

COLOURS = {"best plan": "#333333", "first plan": "#7fb3d5", "early exit": "#d98c3f", "no exits": "#999999"}


def draw(suite: Suite, controlled: Replanned, staying: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the picture; `staying` are the goodputs of plans that do not change, mix by mix."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    edges = [*suite.starts_s, suite.seconds]
    for name, per_s in staying.items():
        steps = [per_s[0], *per_s]
        style = {"linestyle": ":"} if name == "best plan" else {}
        axes.step([edge / 60 for edge in edges], steps, color=COLOURS[name], label=name, **style)
    axes.plot(*_goodput(controlled.report), color="#1b6ca8", label="with the controller")
    for start_s, until_s, easy in zip(edges, edges[1:], suite.easy_shares, strict=False):
        axes.text((start_s + until_s) / 120, 0, f"{easy:.0%} easy", ha="center", va="bottom", fontsize=8)
    for event in controlled.changes:
        axes.axvline(event.at_s / 60, color="#bb3333", linewidth=0.7, alpha=0.6)
    axes.set(xlabel="simulated minutes (red: another plan)", ylabel="answered in time per second", ylim=(0, None))
    axes.set_title(f"BERT-base on {suite.devices}, simulated, SLO {suite.slo_s * 1e3:g} ms", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _goodput(report: Report) -> tuple[Floats, Floats]:
    per_window = report.tally.good
    each_s = report.tally.seconds / len(per_window)
    return (np.arange(len(per_window)) + 0.5) * each_s / 60, per_window / each_s
