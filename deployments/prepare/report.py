"""The figures of exits as a table, as sentences, and as a picture."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isobatch.deployments.exits import reach
from isobatch.deployments.models.ramps import ClassFigures, ExitRules, policy_at
from isobatch.deployments.prepare.sample import TEST_SHARE, Sample
from isobatch.deployments.tasks import CLASSIFICATION, Task
from isobatch.profiles.confidence import least_promise, rows_needed
from isobatch.profiles.losses import MICRO_F1, NDCG, EntityF1, Labels
from isobatch.profiles.picture import BLUE, DARK, ORANGE, plain
from isobatch.profiles.promise import ExitPromise

SURE = 2.0  # standard errors beyond which a difference is not chance
MAX_SHOWN = 20  # rows of the table: the classes that lose most
DIFFERENT_SHARE = 0.9  # of the inputs: with fewer that are no copies, a promise needs a warning
NOTABLE_DROP = 0.02  # a class is worth a warning if its recall falls by this much more than the mean over all inputs


def by_class(truth: Labels, full: Labels, exits: Labels) -> tuple[ClassFigures, ...]:
    """The figures of every class in `truth`; `full` and `exits` are the answers without and with exits.

    A mean over all inputs may hide that a rare class pays for the others. Where an input may have several labels, all
    three are inputs x labels.
    """
    counted = _counts_of_one(truth, full, exits) if truth.ndim == 1 else _counts_of_several(truth, full, exits)
    return tuple(
        ClassFigures(
            label=label,
            inputs=inputs,
            full_recall=before / inputs,
            recall=after / inputs,
            full_f1=2 * before / (inputs + full_answers),
            f1=2 * after / (inputs + answers),
            lost=before - both,
            won=after - both,
        )
        for label, (inputs, full_answers, answers, before, after, both) in enumerate(counted.T.tolist())
        if inputs
    )


def _counts_of_one(truth: Labels, full: Labels, exits: Labels) -> NDArray[np.int64]:
    """By label: inputs with it, answers in full and with exits, and answers that are right in full, with exits, and in
    both. Counting needs little memory, as pixels are many."""
    size, in_full, with_exits = 1 + int(max(each.max() for each in (truth, full, exits))), full == truth, exits == truth
    each = (truth, full, exits, truth[in_full], truth[with_exits], truth[in_full & with_exits])
    return np.array([np.bincount(labels[labels >= 0], minlength=size) for labels in each])


def _counts_of_several(truth: Labels, full: Labels, exits: Labels) -> NDArray[np.int64]:
    """The same where an input may have several labels."""
    members, before, after = (each > 0 for each in (truth, full, exits))
    each = (members, before, after, members & before, members & after, members & before & after)
    return np.array([flags.sum(axis=0) for flags in each])


def class_table(
    classes: Sequence[ClassFigures], names: Sequence[str], answered: str = "inputs", entities: EntityF1 | None = None
) -> Table:
    """One row per class: at most 20, those whose recall falls most. `answered`: the plural of what has a label."""
    shown = sorted(classes, key=lambda each: each.recall - each.full_recall)[:MAX_SHOWN]
    title = "by class" if len(shown) == len(classes) else f"by class: the {len(shown)} of {len(classes)} that lose most"
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title_justify="left")
    table.caption, table.caption_justify = str(entities) if entities else None, "left"
    table.add_column("class")
    for heading in (answered, "recall\nin full", "recall\nwith exits", "F1\nin full", "F1\nwith exits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in sorted(shown, key=lambda figures: figures.label):
        figures = (each.full_recall, each.recall, each.full_f1, each.f1)
        table.add_row(Text(names[each.label]), f"{each.inputs:,}", *(f"{figure:.1%}" for figure in figures))
    return table


def warnings(
    classes: Sequence[ClassFigures], names: Sequence[str], labelled: bool = True, task: Task = CLASSIFICATION
) -> Iterator[str]:
    """Warnings that a mean over all inputs hides: a network no better than guessing, and classes that lose most."""
    if not classes:
        return
    if task.by_label:
        yield from _paying(classes, names, task.answered) if labelled else ()
        return
    count = sum(each.inputs for each in classes)
    right = sum(each.full_recall * each.inputs for each in classes) / count
    most = max(classes, key=lambda each: each.inputs)
    if not labelled:
        if len(classes) == 1:
            yield f"the network answers {names[most.label]!r} to every input: exits have nothing to keep"
        return
    guessed, by_chance = most.inputs / count, 1 / len(names)
    if by_chance - right > SURE * (by_chance * (1 - by_chance) / count) ** 0.5:
        yield (
            f"the full network answers {right:.1%} right, fewer than by chance: are labels swapped? --labels gives the "
            "head's name or number of each label of the file"
        )
        return
    if right - guessed <= SURE * (right * (1 - right) / count) ** 0.5:
        yield (
            f"the most frequent class alone ({names[most.label]!r}) gets {guessed:.1%}, the full network {right:.1%}: "
            "exits cost little because it tells classes apart no better than that"
        )
    yield from _paying(classes, names, task.answered)


def _paying(classes: Sequence[ClassFigures], names: Sequence[str], answered: str) -> Iterator[str]:
    mean_lost = sum(each.lost - each.won for each in classes) / sum(each.inputs for each in classes)
    for each in classes:
        drop = each.full_recall - each.recall
        if drop > mean_lost + NOTABLE_DROP and each.lost - each.won > SURE * (each.lost + each.won) ** 0.5:
            of_all = f"{each.full_recall:.1%} of its {each.inputs:,} {answered}"
            yield (
                f"{names[each.label]!r} pays for the others: {of_all} are answered right in full, "
                f"{each.recall:.1%} with exits"
            )


def unseen(classes: Sequence[ClassFigures], names: Sequence[str]) -> str | None:
    """A sentence on the classes that a promise does not cover, if there are any.

    >>> unseen((), ["good", "bad"])
    "nothing is promised of 'good', 'bad': the promise was tested on no input of this class"
    """
    missing = [repr(name) for label, name in enumerate(names) if label not in {each.label for each in classes}]
    if not missing:
        return None
    listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return f"nothing is promised of {listed}: the promise was tested on no input of this class"


def exit_table(rules: ExitRules, num_labels: int) -> Table:
    """One row per ramp. A threshold that never or always fires is marked."""
    title = f"exits by {rules.policy.removeprefix('isobatch.deployments.exits:')}, {rules.kind} ramps"
    table = Table(title=title, caption=summary(rules), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    right = "error" if rules.of_scores else "right"
    judged = f"{right}\nof these", f"{right}\nof all"
    headings = ("block", "threshold", "leaves", "goes on", *judged, "ECE", "calibrated")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fires", no_wrap=True)
    inside = 1.0
    for rule in rules.ramps:
        fires = reach(policy_at(rules.policy), rule.threshold, num_labels, len(rules.ramps))
        survival = rule.survival or 0.0
        shares = inside - survival, survival, *(_rightness(rules, each) for each in (rule.exit_accuracy, rule.accuracy))
        errors = ("-" if each is None else f"{each:.3f}" for each in (rule.ece_before, rule.ece_after))
        cells = (str(rule.block), f"{rule.threshold:.4g}", *map(_share, shares), *errors)
        table.add_row(*cells, "" if fires == "sometimes" else fires)
        inside = survival
    in_full = _share(_rightness(rules, rules.full_accuracy))
    table.add_row(str(len(rules.ramps)), "(head)", _share(inside), "", "", in_full)
    return table


def summary(rules: ExitRules) -> str:
    """Lines on the accuracy with exits, and on the share of blocks that inputs run."""
    of_scores = rules.of_scores
    exits, full = (_share(_rightness(rules, each)) for each in (rules.exit_accuracy, rules.full_accuracy))
    right = f"{'error of scores' if of_scores else 'accuracy'} {exits} with exits, {full} in full"
    parts = [right] if rules.notes.get("targets") == "labels" else []
    if rules.agreement is not None:
        same = "are" if rules.tolerance is None else f"are within {rules.tolerance:.3g} of"
        parts.append(f"{_share(rules.agreement)} of the answers {same} the full network's")
    lines = [", ".join(parts), *([str(rules.ndcg)] if rules.ndcg else [])]
    return "\n".join([*lines, f"an input runs {_share(rules.mean_depth_share)} of the blocks on average"])


def promise_text(promise: ExitPromise) -> str:
    """The promise, and the number of inputs that such a promise needs, unless fewer have shown it."""
    text = f"promised of other inputs of this kind: {promise}"
    if promise.max_loss == 0:
        return text
    least = least_promise(promise.deciding, promise.confidence)
    needed = rows_needed(promise.max_loss, promise.confidence)
    if promise.lost < 0 and promise.deciding < needed:
        return text
    inputs = _counting(promise, "inputs of each class")
    return (
        f"{text}\nto promise at most {_percent(promise.max_loss)}, at least {needed:,} {inputs} must be tested; "
        f"{promise.deciding:,} can show {_percent(least)} at best"
    )


def copies(sample: Sample) -> str | None:
    """A warning if many inputs are copies of others: they make a promise look surer than it is."""
    if sample.different >= DIFFERENT_SHARE * len(sample):
        return None
    only = f"only {sample.different:,} of {len(sample):,} inputs are different"
    return f"{only}: the promise holds only if requests repeat as often; else leave copies out"


def advice(rules: ExitRules) -> str | None:
    """Advice if nothing can be promised, or no input leaves early; None otherwise."""
    if rules.promise is None:
        return f"nothing is promised: {rules.policy} lets inputs leave at every threshold that was tried"
    if rules.mean_depth_share != 1.0:
        return None
    promise, allowed = rules.promise, _percent(rules.promise.max_loss)
    if promise.max_loss == 0:
        return "no input leaves early: that nothing at all is lost can hardly be shown; allow a little"
    needed = rows_needed(promise.max_loss, promise.confidence)
    if promise.deciding >= needed:
        other = ", or try --ramp pooler" if rules.tolerance is None else ""
        return f"no input leaves early: the ramps err too often to promise {allowed}; allow more{other}"
    share = promise.deciding / promise.rows
    tested = f"{promise.deciding} {_counting(promise, 'inputs of the rarest class')}"
    return (
        f"no input leaves early: {tested} to test it on are too few to promise {allowed}; "
        f"give {math.ceil(needed / TEST_SHARE / share):,} rows or more, "
        f"or allow {_percent(least_promise(promise.deciding, promise.confidence))}"
    )


def _counting(promise: ExitPromise, by_class: str) -> str:
    """What decides on a promise: inputs, where all count alike."""
    if promise.counted is None:
        return "inputs"
    return {MICRO_F1: "inputs with labels", NDCG: "lists"}.get(promise.metric, by_class)


def _rightness(rules: ExitRules, right: float | None) -> float | None:
    """A share of right answers as it is shown; of scores, the mean error."""
    return 1 - right if rules.of_scores and right is not None else right


def outdone(rules: ExitRules) -> str | None:
    """A warning if a ramp alone is clearly better than the full network, which then is probably badly trained."""
    best = max(rules.ramps, key=lambda rule: rule.accuracy or 0.0, default=None)
    if best is None or best.accuracy is None or rules.full_accuracy is None or rules.promise is None:
        return None
    if rules.of_scores:  # then it is no share of inputs
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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


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
    axes.set_ylabel("1 - error of scores" if rules.of_scores else "right answers")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="lower left", bbox_to_anchor=(-0.01, 1.0))


def _draw_survival(axes: Any, rules: ExitRules) -> None:
    survival = _survival(rules)
    axes.bar(range(len(survival)), survival, width=0.96, color=BLUE, alpha=0.85)
    if len(survival) <= 24:
        for block, share in enumerate(survival):
            axes.annotate(f"{share:.0%}", (block, share), ha="center", va="bottom", fontsize=9, color=DARK)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("inputs that enter the block")
