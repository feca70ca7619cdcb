"""What exits reach, as a table and as a picture."""

from pathlib import Path
from typing import Any

from rich.table import Table

from deployments.exits import reach
from deployments.models.ramps import ExitRules, RampRule, policy_at

INK, EARLY, FULL = "#1f2933", "#2a6fbb", "#d1495b"


def exit_table(rules: ExitRules, num_labels: int) -> Table:
    """One row a ramp. What can never or must always fire is said."""
    title = f"exits by {rules.policy.removeprefix('deployments.exits:')}, {rules.kind} ramps"
    table = Table(title=title, title_justify="left", caption=summary(rules), caption_justify="left")
    table.add_column("after block", justify="right")
    for heading in ("threshold", "leave here", "go on", "right of these", "right of all", "ECE", "calibrated"):
        table.add_column(heading, justify="right")
    table.add_column("fires")
    inside = 1.0
    for rule in rules.ramps:
        table.add_row(
            *_cells(rule, inside), reach(policy_at(rules.policy), rule.threshold, num_labels, len(rules.ramps))
        )
        inside = rule.survival or 0.0
    table.add_section()
    last = len(rules.ramps)
    table.add_row(str(last), "(head)", _share(inside), "", "", _share(rules.full_accuracy), "", "", "always")
    return table


def summary(rules: ExitRules) -> str:
    """One line: what is gained and what it costs."""
    of = "agreement with the full network" if rules.notes.get("targets") != "labels" else "accuracy"
    return (
        f"{of} {_share(rules.exit_accuracy)} with exits, {_share(rules.full_accuracy)} in full; "
        f"an input runs {_share(rules.mean_depth_share)} of the blocks on average"
    )


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
    below.set_xticks(range(depth + 1) if depth <= 24 else range(0, depth + 1, depth // 12))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(axis="y", color="#e4e7eb")
        axes.set_axisbelow(True)
    figure.suptitle(summary(rules).replace("; ", "\n"), fontsize=10, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _draw_accuracy(axes: Any, rules: ExitRules) -> None:
    blocks = [rule.block + 1 for rule in rules.ramps]
    axes.plot(
        blocks, [rule.accuracy for rule in rules.ramps], "o-", color=EARLY, label="a ramp, asked about all inputs"
    )
    left = [(rule.block + 1, rule.exit_accuracy) for rule in rules.ramps if rule.exit_accuracy is not None]
    axes.plot(
        *zip(*left, strict=True), "s", color=INK, markerfacecolor="none", label="a ramp, of those that leave at it"
    )
    axes.axhline(rules.full_accuracy, color=FULL, label="the full network")
    axes.axhline(rules.exit_accuracy, color=INK, linestyle=":", label="with exits")
    axes.set_ylabel("right answers")
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _draw_survival(axes: Any, rules: ExitRules) -> None:
    """Steps: the share of inputs that each block runs on."""
    survival = [1.0, *(rule.survival for rule in rules.ramps)]
    axes.bar([block + 0.5 for block in range(len(survival))], survival, width=0.96, color=EARLY, alpha=0.85)
    for block, share in enumerate(survival):
        axes.annotate(f"{share:.0%}", (block + 0.5, share), ha="center", va="bottom", fontsize=9, color=INK)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("inputs still inside")
