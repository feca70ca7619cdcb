"""The inputs that ramps are made from: a uniform sample of a file, in three parts that never mix."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.prepare.data import Row
from profiles.errors import UserError

Indices = NDArray[np.int64]

Item = TypeVar("Item")

MIN_ROWS = 50


@dataclass(frozen=True)
class Parts:
    """Positions in a sample. Ramps are trained on one part, temperatures and thresholds chosen on the second, and what
    is reported is measured on the third."""

    train: Indices
    calibrate: Indices
    report: Indices

    @classmethod
    def of(cls, count: int, seed: int = 0) -> "Parts":
        """Six tenths to train, two to calibrate, two to report.

        >>> [len(part) for part in (Parts.of(100).train, Parts.of(100).calibrate, Parts.of(100).report)]
        [60, 20, 20]
        """
        order = np.random.default_rng(seed).permutation(count)
        train, calibrate, report = np.split(order, [count * 6 // 10, count * 8 // 10])
        return cls(train, calibrate, report)


@dataclass(frozen=True)
class Sample:
    """Inputs, their labels as the head numbers them (None: not known), and the parts they are in."""

    values: Sequence[Any]
    labels: Indices | None
    parts: Parts

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


def draw(found: Iterable[Row], source: Path, label_names: Sequence[str], most: int, seed: int = 0) -> Sample:
    """Keep at most this many rows, each with the same chance, in one pass over a file of any size."""
    kept = sampled(found, most, seed)
    numbers = {name.lower(): number for number, name in enumerate(label_names)}
    if len(kept) < MIN_ROWS:
        raise UserError(f"{source}: has {len(kept) or 'no'} rows; at least {MIN_ROWS} are needed")
    labels = _labels(kept, source, numbers, label_names)
    return Sample([row.value for row in kept], labels, Parts.of(len(kept), seed))


def _labels(kept: Sequence[Row], source: Path, numbers: Mapping[str, int], names: Sequence[str]) -> Indices | None:
    if kept[0].label is None:
        return None
    labels = np.array([label_number(row, source, numbers, names) for row in kept], np.int64)
    if len(set(labels.tolist())) == 1:
        raise UserError(f"{source}: every label is {kept[0].label!r}: ramps need at least two classes to tell apart")
    return labels


def label_number(row: Row, source: Path, numbers: Mapping[str, int], names: Sequence[str]) -> int:
    """A label by the head's name for it or by its number."""
    text = str(row.label).strip()
    if text.lower() in numbers:
        return numbers[text.lower()]
    if text.removesuffix(".0").isdecimal() and (number := int(text.removesuffix(".0"))) < len(names):
        return number
    fitting = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
    raise UserError(
        f"{source}: row {row.number}: label {text!r} does not fit the head; it knows {fitting} or 0..{len(names) - 1}"
    )
