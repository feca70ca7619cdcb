"""What exits reach, as a table and as a picture."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from deployments.exits import reach
from deployments.models.ramps import ExitRules, RampRule, policy_at

INK, EARLY, FULL = "#1f2933", "#2a6fbb", "#d1495b"


def exit_table(rules: ExitRules, num_labels: int) -> Table:
    """One row a ramp. A threshold that can never fire, or always does, is marked."""
    title = f"exits by {rules.policy.removeprefix('deployments.exits:')}, {rules.kind} ramps"
    table = Table(title=title, caption=summary(rules), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    headings = ("block", "threshold", "leaves", "goes on", "right\nof these", "right\nof all", "ECE", "calibrated")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fires", no_wrap=True)
    inside = 1.0
    for rule in rules.ramps:
        fires = reach(policy_at(rules.policy), rule.threshold, num_labels, len(rules.ramps))
        table.add_row(*_cells(rule, inside), "" if fires == "sometimes" else fires)
        inside = rule.survival or 0.0
    table.add_row(str(len(rules.ramps)), "(head)", _share(inside), "", "", _share(rules.full_accuracy))
    return table


def summary(rules: ExitRules) -> str:
    """Two lines: what is gained and what it costs."""
    of = "accuracy" if rules.notes.get("targets") == "labels" else "agreement with the full network"
    return (
        f"{of} {_share(rules.exit_accuracy)} with exits, {_share(rules.full_accuracy)} in full\n"
        f"an input runs {_share(rules.mean_depth_share)} of the blocks on average"
    )


def advice(rules: ExitRules, allowed: float) -> str | None:
    """What to say when the thresholds are not what was hoped for: more was lost than allowed, or nobody leaves early.

    >>> print(advice(ExitRules(full_accuracy=0.95, exit_accuracy=0.92, notes={"calibrated_on": 120}), 0.01))
    3.0% were lost, not the 1.0% allowed: thresholds were chosen on 120 inputs; give more, or allow less
    >>> print(advice(ExitRules(mean_depth_share=1.0, notes={"calibrated_on": 120}), 0.01))
    no input leaves early: of 120 inputs, too few to be sure that no more than 1.0% are lost; give more, or allow more
    """
    lost = (rules.full_accuracy or 0.0) - (rules.exit_accuracy or 0.0)
    count = rules.notes.get("calibrated_on")
    if lost > allowed:
        return (
            f"{lost:.1%} were lost, not the {allowed:.1%} allowed: thresholds were chosen on {count} inputs; "
            "give more, or allow less"
        )
    if rules.mean_depth_share == 1.0:
        return (
            f"no input leaves early: of {count} inputs, too few to be sure that no more than {allowed:.1%} are lost; "
            "give more, or allow more"
        )
    return None


def _cells(rule: RampRule, inside: float) -> tuple[str, ...]:
    survival = rule.survival or 0.0
    return (
        str(rule.block),
        f"{rule.threshold:.4g}",
        _share(inside - survival),
        _share(survival),
        _share(rule.exit_accuracy),
        _share(rule.accuracy),
        _number(rule.ece_before),
        _number(rule.ece_after),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def draw_exits(rules: ExitRules, path: Path) -> None:
    """Accuracy and survival over depth, one above the other."""
    from matplotlib.figure import Figure

    depth = len(rules.ramps) + 1
    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_accuracy(above, rules)
    _draw_survival(below, rules)
    below.set_xlabel(f"blocks run, of {depth}")
    below.set_xticks(range(0, depth + 1, max(1, depth // 12)))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(axis="y", color="#e4e7eb")
        axes.set_axisbelow(True)
    figure.suptitle(summary(rules), fontsize=11, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _survival(rules: ExitRules) -> list[float]:
    """The share of inputs that enter each block."""
    return [1.0, *(rule.survival or 0.0 for rule in rules.ramps)]


def _draw_accuracy(axes: Any, rules: ExitRules) -> None:
    depth = len(rules.ramps) + 1
    blocks = [rule.block + 1 for rule in rules.ramps]
    axes.plot(blocks, [rule.accuracy for rule in rules.ramps], "o-", color=EARLY, label="a ramp, of all inputs")
    leaving = {"color": INK, "alpha": 0.3, "linewidths": 0, "clip_on": False, "zorder": 3}
    right = [math.nan if rule.exit_accuracy is None else rule.exit_accuracy for rule in rules.ramps]
    areas = [20 + 600 * (before - after) for before, after in pairwise(_survival(rules))]
    axes.scatter(blocks, right, s=areas, **leaving)
    axes.scatter([], [], s=60, label="a ramp, of those that leave there (area: how many)", **leaving)
    axes.plot([0, depth], [rules.full_accuracy] * 2, color=FULL, label="the full network")
    axes.plot([0, depth], [rules.exit_accuracy] * 2, color=INK, linestyle=":", label="the network with exits")
    axes.set_ylabel("right answers")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="lower left", bbox_to_anchor=(-0.01, 1.0))


def _draw_survival(axes: Any, rules: ExitRules) -> None:
    survival = _survival(rules)
    axes.bar([block + 0.5 for block in range(len(survival))], survival, width=0.96, color=EARLY, alpha=0.85)
    if len(survival) <= 24:
        for block, share in enumerate(survival):
            axes.annotate(f"{share:.0%}", (block + 0.5, share), ha="center", va="bottom", fontsize=9, color=INK)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("inputs still inside")
