"""The figures of exits as a table, as sentences, and as a picture."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from isobatch.deployments.exits import reach
from isobatch.deployments.models.ramps import ExitRules, RampRule, policy_at
from isobatch.deployments.prepare.classes import SURE
from isobatch.deployments.prepare.sample import TEST_SHARE
from isobatch.profiles.confidence import least_promise, rows_needed
from isobatch.profiles.picture import BLUE, DARK, ORANGE, plain
from isobatch.profiles.promise import ExitPromise


def exit_table(rules: ExitRules, num_labels: int) -> Table:
    """One row per ramp. A threshold that never or always fires is marked."""
    title = f"exits by {rules.policy.removeprefix('isobatch.deployments.exits:')}, {rules.kind} ramps"
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
    """Two lines: the accuracy with exits, and the share of blocks that inputs run."""
    full = f"accuracy {_share(rules.exit_accuracy)} with exits, {_share(rules.full_accuracy)} in full"
    parts = [full] if rules.notes.get("targets") == "labels" else []
    if rules.agreement is not None:
        parts.append(f"{_share(rules.agreement)} of the answers are the full network's")
    return f"{', '.join(parts)}\nan input runs {_share(rules.mean_depth_share)} of the blocks on average"


def promise_text(promise: ExitPromise) -> str:
    """The promise, and the number of inputs that such a promise needs."""
    text = f"promised of other inputs of this kind: {promise}"
    if promise.max_loss == 0:
        return text
    least = least_promise(promise.deciding, promise.confidence)
    needed = rows_needed(promise.max_loss, promise.confidence)
    inputs = "inputs" if promise.counted is None else "inputs of each class"
    return (
        f"{text}\nto promise at most {_percent(promise.max_loss)}, at least {needed:,} {inputs} must be tested; "
        f"{promise.deciding:,} can show {_percent(least)} at best"
    )


def advice(rules: ExitRules) -> str | None:
    """Advice if nothing can be promised, or no input leaves early; None otherwise.

    >>> promise = ExitPromise(metric="accuracy", max_loss=0.01, confidence=0.95, rows=120, lost=0.0, bound=0.0)
    >>> print(advice(ExitRules(mean_depth_share=1.0, promise=promise)))
    no input leaves early: 120 inputs to test it on are too few to promise 1 %; give 855 rows or more, or allow 2.5 %
    >>> advice(ExitRules(mean_depth_share=1.0, promise=promise.model_copy(update={"counted": 30})))[23:85]
    '30 inputs of the rarest class to test it on are too few to pro'
    >>> print(advice(ExitRules(mean_depth_share=1.0, promise=promise.model_copy(update={"rows": 3000}))))
    no input leaves early: the ramps err too often to promise 1 %; allow more, or try --ramp pooler
    >>> print(advice(ExitRules(mean_depth_share=1.0, promise=promise.model_copy(update={"max_loss": 0.0}))))
    no input leaves early: that nothing at all is lost can hardly be shown; allow a little
    """
    if rules.promise is None:
        return f"nothing is promised: {rules.policy} lets inputs leave at every threshold that was tried"
    if rules.mean_depth_share != 1.0:
        return None
    promise, allowed = rules.promise, _percent(rules.promise.max_loss)
    if promise.max_loss == 0:
        return "no input leaves early: that nothing at all is lost can hardly be shown; allow a little"
    needed = rows_needed(promise.max_loss, promise.confidence)
    if promise.deciding >= needed:
        return f"no input leaves early: the ramps err too often to promise {allowed}; allow more, or try --ramp pooler"
    share = promise.deciding / promise.rows
    rarest = "" if promise.counted is None else " of the rarest class"
    return (
        f"no input leaves early: {promise.deciding} inputs{rarest} to test it on are too few to promise {allowed}; "
        f"give {math.ceil(needed / TEST_SHARE / share):,} rows or more, "
        f"or allow {_percent(least_promise(promise.deciding, promise.confidence))}"
    )


def outdone(rules: ExitRules) -> str | None:
    """A warning if a ramp alone is clearly better than the full network, which then is probably badly trained.

    >>> promise = ExitPromise(metric="accuracy", max_loss=0.01, confidence=0.95, rows=1400, lost=-0.03, bound=0.0)
    >>> ramps = (RampRule(block=0, threshold=0.9, accuracy=0.85), RampRule(block=1, threshold=0.9, accuracy=0.82))
    >>> print(outdone(ExitRules(ramps=ramps, full_accuracy=0.81, promise=promise)))
    the ramp after block 0 alone is right in 85.0%, the full network in 81.0%: was it trained for long enough?
    >>> outdone(ExitRules(ramps=ramps, full_accuracy=0.84, promise=promise))
    """
    best = max(rules.ramps, key=lambda rule: rule.accuracy or 0.0, default=None)
    if best is None or best.accuracy is None or rules.full_accuracy is None or rules.promise is None:
        return None
    spread = rules.full_accuracy * (1 - rules.full_accuracy) + best.accuracy * (1 - best.accuracy)
    if best.accuracy - rules.full_accuracy <= SURE * (spread / rules.promise.rows) ** 0.5:
        return None
    return (
        f"the ramp after block {best.block} alone is right in {best.accuracy:.1%}, the full network in "
        f"{rules.full_accuracy:.1%}: was it trained for long enough?"
    )


def _percent(share: float) -> str:
    """A share in percent, rounded up, as a smaller allowance would be refused.

    >>> _percent(0.01), _percent(0.024656)
    ('1 %', '2.5 %')
    """
    return f"{math.ceil(1e3 * share - 1e-9) / 10:g} %" if share >= 0.001 else f"{100 * share:.2g} %"


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
    from matplotlib.ticker import PercentFormatter

    depth = len(rules.ramps) + 1
    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_accuracy(above, rules)
    _draw_survival(below, rules)
    below.set_xlabel("block, counted from 0 as in the table")
    below.set_xticks(range(0, depth, max(1, depth // 12)))
    for axes in (above, below):
        plain(axes)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))  # as many digits as needed to tell ticks apart
        axes.grid(axis="y", color="#e4e7eb")
        axes.set_axisbelow(True)
    figure.suptitle(summary(rules), fontsize=11, color=DARK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _survival(rules: ExitRules) -> list[float]:
    """The share of inputs that enter each block."""
    return [1.0, *(rule.survival or 0.0 for rule in rules.ramps)]


def _draw_accuracy(axes: Any, rules: ExitRules) -> None:
    blocks, ends = [rule.block for rule in rules.ramps], [-0.5, len(rules.ramps) + 0.5]
    axes.plot(blocks, [rule.accuracy for rule in rules.ramps], "o-", color=BLUE, label="a ramp, of all inputs")
    leaving = {"color": DARK, "alpha": 0.3, "linewidths": 0, "clip_on": False, "zorder": 3}
    right = [math.nan if rule.exit_accuracy is None else rule.exit_accuracy for rule in rules.ramps]
    areas = [20 + 600 * (before - after) for before, after in pairwise(_survival(rules))]
    axes.scatter(blocks, right, s=areas, **leaving)
    axes.scatter([], [], s=60, label="a ramp, of those that leave there (area: how many)", **leaving)
    axes.plot(ends, [rules.full_accuracy] * 2, color=ORANGE, label="the full network")
    axes.plot(ends, [rules.exit_accuracy] * 2, color=DARK, linestyle=":", label="the network with exits")
    axes.set_ylabel("right answers")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="lower left", bbox_to_anchor=(-0.01, 1.0))


def _draw_survival(axes: Any, rules: ExitRules) -> None:
    survival = _survival(rules)
    axes.bar(range(len(survival)), survival, width=0.96, color=BLUE, alpha=0.85)
    if len(survival) <= 24:
        for block, share in enumerate(survival):
            axes.annotate(f"{share:.0%}", (block, share), ha="center", va="bottom", fontsize=9, color=DARK)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("inputs that enter the block")
