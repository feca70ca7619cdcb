"""Entities in texts whose words are labelled: found whole or not at all, as those judge who serve such networks.

An entity is found if its kind, its first word and its last are. F1 is counted over the entities of all texts, as
seqeval and the CoNLL tasks do it. How sure it is comes from what each text adds to it (its influence, to first order).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deployments.tasks import NOWHERE, OUTSIDE, Tag
from profiles.losses import EntityF1, Floats, Indices, Interval, Labels, Loss

LabelledWords = tuple[int, int, str]  # the first of its words, the last, and its kind


def entities(labels: Labels, counts: Indices, names: Sequence[str]) -> frozenset[LabelledWords]:
    """Those of all texts, which have so many words each.

    >>> names = ("O", "B-PER", "I-PER")
    >>> sorted(entities(np.array([1, 2, 0, 2, 2]), np.array([4, 1]), names))
    [(0, 1, 'PER'), (3, 3, 'PER'), (4, 4, 'PER')]
    """
    found, before = list[LabelledWords](), NOWHERE
    tags, firsts = [Tag.of(name) for name in names], set((np.cumsum(counts) - counts).tolist())
    for word, label in enumerate(labels.tolist()):
        tag = tags[label]
        if word not in firsts and tag.follows(before):
            found[-1] = (found[-1][0], word, tag.kind)
        elif tag.kind:
            found.append((word, word, tag.kind))
        before = tag
    return frozenset(found)


@dataclass(frozen=True)
class EntityScore:
    """In each text: entities that are right, and those that there are or that are answered, the right ones twice."""

    right: Floats
    both: Floats

    @classmethod
    def of(cls, truth: frozenset[LabelledWords], said: frozenset[LabelledWords], counts: Indices) -> "EntityScore":
        text = np.repeat(np.arange(len(counts)), counts)

        def per_text(some: frozenset[LabelledWords]) -> Floats:
            firsts = np.array([first for first, *_ in some], np.int64)
            return np.bincount(text[firsts], minlength=len(counts)).astype(np.float64)

        return cls(per_text(truth & said), per_text(truth) + per_text(said))

    @property
    def f1(self) -> float:
        return float(2 * self.right.sum() / self.both.sum())

    @property
    def influence(self) -> Floats:
        """By how much each text raises the score, as a share of what an average text could."""
        drifts: Floats = (2 * self.right - self.f1 * self.both) / self.both.mean()
        return drifts


def entity_f1(truth: Labels, full: Labels, exits: Labels, counts: Indices, names: Sequence[str]) -> EntityF1 | None:
    """F1 of the answers in full and with exits; None: there are no entities to find."""
    if OUTSIDE not in names or not (there := entities(truth, counts, names)):
        return None
    before, after = (EntityScore.of(there, entities(said, counts, names), counts) for said in (full, exits))
    in_full, with_exits = (_interval(each.f1, each.influence) for each in (before, after))
    lost = _interval(before.f1 - after.f1, before.influence - after.influence)
    return EntityF1(in_full, with_exits, lost, len(there))


def _interval(mean: float, influence: Floats) -> Interval:
    """As wide as if one text more had lost all that it has."""
    return Interval.of(mean, Loss(mean, mean**2 + float(influence.var()), len(influence)).error)
