"""The effect of exits on each class: a mean over all inputs may hide that a rare class pays for the others."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isobatch.deployments.models.ramps import ClassFigures
from isobatch.profiles.losses import EntityF1, Labels

SURE = 2.0  # standard errors beyond which a difference is not chance
MAX_SHOWN = 20  # rows of the table: the classes that lose most
NOTABLE_DROP = 0.02  # a class is worth a warning if its recall falls by this much more than the mean over all inputs


def by_class(truth: Labels, full: Labels, exits: Labels) -> tuple[ClassFigures, ...]:
    """The figures of every class in `truth`; `full` and `exits` are the answers without and with exits."""
    return tuple(
        ClassFigures(
            label=label,
            inputs=int((members := truth == label).sum()),
            full_recall=float((full[members] == label).mean()),
            recall=float((exits[members] == label).mean()),
            full_f1=_f1(members, full == label),
            f1=_f1(members, exits == label),
            lost=int((members & (full == label) & (exits != label)).sum()),
            won=int((members & (full != label) & (exits == label)).sum()),
        )
        for label in np.unique(truth).tolist()
    )


def _f1(members: NDArray[np.bool_], answered_so: NDArray[np.bool_]) -> float:
    return float(2 * (members & answered_so).sum() / (members.sum() + answered_so.sum()))


def class_table(
    classes: Sequence[ClassFigures],
    names: Sequence[str],
    answered: str = "inputs",
    entities: EntityF1 | None = None,
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
    classes: Sequence[ClassFigures], names: Sequence[str], labelled: bool = True, answered: str = "inputs"
) -> Iterator[str]:
    """Warnings that a mean over all inputs hides: a network no better than guessing, and classes that lose most."""
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
    mean_lost = sum(each.lost - each.won for each in classes) / count
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
