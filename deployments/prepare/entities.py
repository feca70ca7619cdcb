"""Entities in texts whose words are labelled, and the F1 score of answers over whole entities.

An answer has found an entity if its kind, its first word and its last word are right. F1 is counted over the entities
of all texts, as in seqeval and the CoNLL tasks. Its interval comes from the influence of each text, to first order.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.entities import NOWHERE, OUTSIDE, Tag
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import EntityF1, Floats, Indices, Interval, Labels, Loss, PooledF1

LabelledWords = tuple[int, int, str]  # an entity: its first word, its last word, and its kind


def entities(labels: Labels, counts: Indices, names: Sequence[str]) -> frozenset[LabelledWords]:
    """The entities of all texts. `counts` is the number of words of each text.

    >>> names = ("O", "B-PER", "I-PER")
    >>> sorted(entities(np.array([1, 2, 0, 2, 2]), np.array([4, 1]), names))
    [(0, 1, 'PER'), (3, 3, 'PER'), (4, 4, 'PER')]
    """
    complete, before = list[LabelledWords](), NOWHERE
    tags, firsts = [Tag.of(name) for name in names], set((np.cumsum(counts) - counts).tolist())
    for word, label in enumerate(labels.tolist()):
        tag = tags[label]
        if word not in firsts and tag.follows(before):
            complete[-1] = (complete[-1][0], word, tag.kind)
        elif tag.kind:
            complete.append((word, word, tag.kind))
        before = tag
    return frozenset(complete)


def _scored(truth: frozenset[LabelledWords], answers: frozenset[LabelledWords], counts: Indices) -> PooledF1:
    """The entities of each text: those that are found, and all that are answered or there."""
    text = np.repeat(np.arange(len(counts)), counts)
    right, true, answered = (
        np.bincount(text[np.array([first for first, *_ in chosen], np.int64)], minlength=len(counts)).astype(np.float64)
        for chosen in (truth & answers, truth, answers)
    )
    return PooledF1(right, true + answered)


def entity_f1(truth: Labels, full: Labels, exits: Labels, counts: Indices, names: Sequence[str]) -> EntityF1 | None:
    """F1 of the full network and with exits; None if the texts have no entities."""
    if OUTSIDE not in names or not (true_entities := entities(truth, counts, names)):
        return None
    before, after = (_scored(true_entities, entities(answers, counts, names), counts) for answers in (full, exits))
    lost = _interval(before.value - after.value, before.influence - after.influence)
    in_full, with_exits = (_interval(each.value, each.influence) for each in (before, after))
    return EntityF1(in_full, with_exits, lost, len(true_entities))


def _interval(mean: float, influence: Floats) -> Interval:
    """The interval of a score. It is as wide as if one more text had lost everything, as a margin for few texts."""
    return Interval.of(mean, Loss(mean, mean**2 + float(influence.var()), len(influence)).error)


MOST_UNSURE = (0, 1, 2, 4, 8)  # numbers of words per text that need not be sure, from which the best is chosen


def of_texts(words: ExitTable, counts: Indices, most_unsure: int, by_label: bool = False) -> ExitTable:
    """The table of texts from the table of all their words, in order. `counts`: the number of words of each text.

    `by_label`: the words are the labels of an input, answered yes (1) or no (0).
    """
    text, ends = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
    deciding = ends - counts + np.minimum(most_unsure, counts - 1)  # the deciding word, if the least sure is first
    first = np.full((words.num_ramps, len(counts)), len(words.candidates), np.uint8)
    has_words = counts > 0
    for ramp, each in enumerate(words.first):
        order = np.lexsort((-each.astype(np.int64), text))
        first[ramp, has_words] = each[order][deciding[has_words]]

    def sums(of_words: NDArray[Any]) -> NDArray[np.float64]:
        return np.array([np.bincount(text, weights=each, minlength=len(counts)) for each in of_words])

    def share(of_words: NDArray[Any]) -> NDArray[np.float32]:
        return np.where(has_words, sums(of_words) / np.maximum(counts, 1), 1.0).astype(np.float32)

    nothing, marks = np.zeros((words.num_ramps + 1, len(counts)), np.uint16), None
    if by_label:
        given = words.labels == 1
        there = np.where(given, words.right, 1 - words.right)  # the probability of yes
        marks = np.stack((sums(given * words.right), sums(given + there))).astype(np.float32)
    made = replace(words, first=first, right=share(words.right), labels=nothing, truth=nothing[0])
    return replace(made, agreed=share(words.agrees), marks=marks)


def of_words(labels: Indices, given: Indices, counts: Indices, numbers: Indices) -> Indices:
    """The labels of the answered words, from the labels of all words.

    Of each text's `given` words `counts` are answered: those with these `numbers`.

    >>> of_words(np.array([7, 8, 9, 5]), np.array([3, 1]), np.array([2, 1]), np.array([0, 2, 0])).tolist()
    [7, 9, 5]
    """
    starts = np.cumsum(given) - given
    answered: Indices = labels[np.repeat(starts, counts) + numbers]
    return answered
