"""The inputs that ramps are made from: a uniform sample of a file, in three parts that never mix."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.prepare.data import Row
from deployments.tasks import CLASSIFICATION, Task
from profiles.errors import UserError

Indices = NDArray[np.int64]

Item = TypeVar("Item")

MIN_ROWS = 50
TRAIN_SHARE, TEST_SHARE = 0.6, 0.35  # the rest calibrates


@dataclass(frozen=True)
class Parts:
    """Positions in a sample. Ramps are trained on one part. Temperatures and the order in which thresholds are tried
    come from it and the second. The promise is tested on the third, and all that is reported is measured there."""

    train: Indices
    calibrate: Indices
    test: Indices

    @classmethod
    def of(cls, count: int, seed: int = 0) -> "Parts":
        """Six tenths to train, a twentieth to calibrate, the others to test.

        >>> [len(part) for part in (Parts.of(100).train, Parts.of(100).calibrate, Parts.of(100).test)]
        [60, 5, 35]
        """
        order = np.random.default_rng(seed).permutation(count)
        train, calibrate, test = np.split(order, [int(count * TRAIN_SHARE), count - int(count * TEST_SHARE)])
        return cls(train, calibrate, test)

    @property
    def each(self) -> tuple[Indices, ...]:
        return self.train, self.calibrate, self.test


@dataclass(frozen=True)
class Sample:
    """Inputs, their labels as the head numbers them (None: not known), and the parts they are in.

    Where the words of texts are labelled, `labels` holds those of all words, and each text has so many (`words`).
    """

    values: Sequence[Any]
    labels: Indices | None
    parts: Parts
    words: Indices | None = None

    def __len__(self) -> int:
        return len(self.values)


def sampled(found: Iterable[Item], most: int, seed: int = 0) -> list[Item]:
    """At most so many, each with the same chance, in one pass: a sorted file is no reason for a wrong sample.

    >>> sampled(range(10), 20) == list(range(10)), len(sampled(range(1000), 20)), max(sampled(range(1000), 20)) > 500
    (True, 20, True)
    """
    kept: list[Item] = []
    random = Random(seed)
    for count, each in enumerate(found, start=1):
        place = len(kept) if len(kept) < most else random.randrange(count)
        if place < most:
            kept[place : place + 1] = [each]
    return kept


@dataclass(frozen=True)
class LabelNames:
    """What the labels of a file mean: the head's own names and numbers, and other names that the user has given.

    Where names are other numbers than the head's ("1" to "5" stars), numbers of a file are names.

    >>> LabelNames(("NEGATIVE", "POSITIVE"), {"bad": "negative"}).number("Bad")
    0
    """

    names: Sequence[str]
    others: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for other, told in self.others.items():
            if self._own(told) is None:
                raise UserError(f"--labels {other}={told}: the head knows {self.told}")

    def number(self, label: Any) -> int | None:
        """The head's number of a label, or None if it has none."""
        text = str(label).strip()
        return self._own({name.lower(): told for name, told in self.others.items()}.get(text.lower(), text))

    @property
    def told(self) -> str:
        numbers = f" or 0..{len(self.names) - 1}" if self._numbered else ""
        return ", ".join(self.names[:10]) + (" ..." if len(self.names) > 10 else "") + numbers

    @property
    def _numbered(self) -> bool:
        """Whether a number can only be the head's."""
        own = all(name == str(number) for number, name in enumerate(self.names))
        return own or not any(_whole(name).isdecimal() for name in self.names)

    def _own(self, text: str) -> int | None:
        if text in self.names:  # names may differ in capitals alone
            return self.names.index(text)
        folded, number = [name.lower() for name in self.names], _whole(text)
        if text.lower() in folded:
            return folded.index(text.lower())
        if not number.isdecimal():
            return None
        if self._numbered:
            return int(number) if int(number) < len(self.names) else None
        return folded.index(number) if number in folded else None


def _whole(text: str) -> str:
    """A number without what pandas writes behind it."""
    return text.removesuffix(".0")


def draw(
    found: Iterable[Row], source: Path, names: LabelNames, most: int, seed: int = 0, task: Task = CLASSIFICATION
) -> Sample:
    """Keep at most this many rows, each with the same chance, in one pass over a file of any size."""
    kept = sampled(found, most, seed)
    if len(kept) < MIN_ROWS:
        raise UserError(f"{source}: has {len(kept) or 'no'} rows; at least {MIN_ROWS} are needed")
    labels = labels_of(kept, source, names, task)
    if labels is not None and len(set(labels.tolist())) == 1:
        raise UserError(f"{source}: every label is {kept[0].label!r}: ramps need at least two classes to tell apart")
    return Sample([row.value for row in kept], labels, Parts.of(len(kept), seed), words_of(kept, labels, task))


def labels_of(kept: Sequence[Row], source: Path, names: LabelNames, task: Task = CLASSIFICATION) -> Indices | None:
    """The labels of these rows, or of all their words, as the head numbers them; None where the file has none."""
    if not kept or kept[0].label is None:
        return None
    return _of_words(kept, source, names) if task.by_token else _of_rows(kept, source, names)


def _of_rows(kept: Sequence[Row], source: Path, names: LabelNames) -> Indices:
    if several := next((row for row in kept if isinstance(row.label, list)), None):
        raise UserError(
            f"{source}: row {several.number}: has a label for each word, and this network answers a text as a whole"
        )
    found = [names.number(row.label) for row in kept]
    for row, number in zip(kept, found, strict=True):
        if number is None:
            there = {str(each.label).strip() for each in kept}
            hint = None
            if len(there) > len(names.names):
                hint = f": it has {len(names.names)} classes, the file {len(there)}"
            raise _no_label(f"{source}: row {row.number}", row.label, names, hint)
    return np.array(found, np.int64)


def _of_words(kept: Sequence[Row], source: Path, names: LabelNames) -> Indices:
    for row in kept:
        where = f"{source}: row {row.number}"
        if not isinstance(row.label, list):
            raise UserError(
                f"{where}: has one label for a whole text, and this network labels words: give words with a label "
                "each, in columns such as tokens and ner_tags, or in a CoNLL file"
            )
    return np.concatenate([_numbers(row.label, f"{source}: row {row.number}", names) for row in kept])


def words_of(kept: Sequence[Row], labels: Indices | None, task: Task) -> Indices | None:
    """How many labelled words each row has; None where none are."""
    if labels is None or not task.by_token:
        return None
    return np.array([len(row.label) for row in kept], np.int64)


def _numbers(labels: Sequence[Any], where: str, names: LabelNames) -> Indices:
    found = [names.number(label) for label in labels]
    for place, (label, number) in enumerate(zip(labels, found, strict=True), start=1):
        if number is None:
            raise _no_label(f"{where}: word {place}", label, names)
    return np.array(found, np.int64)


def _no_label(where: str, label: Any, names: LabelNames, hint: str | None = None) -> UserError:
    hint = hint or f"; --labels {label}=NUMBER,OTHER=NUMBER says what its labels are to the head"
    return UserError(f"{where}: label {str(label).strip()!r} does not fit the head; it knows {names.told}{hint}")
