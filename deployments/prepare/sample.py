"""The inputs that ramps are made from: a uniform sample of a file in three disjoint parts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.map_tasks import Keypoints, PixelClassification
from isobatch.deployments.points import on_maps
from isobatch.deployments.prepare.data import Row, label_picture
from isobatch.deployments.prepare.records import NamedNumber
from isobatch.deployments.tasks import CLASSIFICATION, Task
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Sides

Indices = NDArray[np.int64]

Item = TypeVar("Item")

MIN_ROWS = 50  # fewer rows show too little to make ramps from
# The shares of rows for training and for the test; the other rows calibrate.
TRAIN_SHARE = 0.6
TEST_SHARE = 0.35


class Parts(NamedTuple):
    """Positions in a sample: ramps are trained on one part, and another part is added for calibration.

    Temperatures and the order in which thresholds are tried come from both. The third part tests the promise, and all
    reported figures are measured on it.
    """

    train: Indices
    calibrate: Indices
    test: Indices

    @classmethod
    def of(cls, count: int, seed: int = 0) -> "Parts":
        """A random split: 60 % to train, 5 % to calibrate, 35 % to test.

        >>> [len(part) for part in Parts.of(100)]
        [60, 5, 35]
        """
        order = np.random.default_rng(seed).permutation(count)
        train, calibrate, test = np.split(order, [int(count * TRAIN_SHARE), count - int(count * TEST_SHARE)])
        return cls(train, calibrate, test)

    @classmethod
    def of_lists(cls, lists: Indices, seed: int = 0) -> "Parts":
        """The same with whole lists in each part. `lists`: the number of each row's list, from 0."""
        parts = cls.of(int(lists.max()) + 1, seed)
        return cls(*(np.flatnonzero(np.isin(lists, part)) for part in parts))


@dataclass(frozen=True)
class Sample:
    """Inputs, their labels as the head numbers them (None: unknown), and the parts of the sample.

    If words are labelled, `labels` holds the labels of all words, and `words` is the number of words of each text. If
    an input has several labels, `labels` is inputs x the head's labels: 1 if it has this one, else 0. If pixels are
    labelled, it is inputs x pixels of the network's map; -1 where a pixel has no label. Of points it is inputs x points
    x 2: x and y on the heat maps, NaN where a point has no label. Where inputs have a score,
    `labels` are the true ones, or how relevant documents are: `lists` then is the number of each one's list.
    """

    values: Sequence[Any]
    labels: NDArray[Any] | None
    parts: Parts
    words: Indices | None = None
    lists: Indices | None = None
    task: Task = CLASSIFICATION
    rows: Sequence[Row] = ()  # of the file, in the same order

    def __len__(self) -> int:
        return len(self.values)

    @property
    def different(self) -> int:
        """The number of inputs, where copies of an input count once."""
        return len({_identity(value) for value in self.values})


def sampled(items: Iterable[Item], most: int, seed: int = 0) -> list[Item]:
    """At most `most` items, each with the same chance, in one pass (reservoir sampling), so sorted files do no harm.

    >>> sampled(range(10), 20) == list(range(10)), len(sampled(range(1000), 20)), max(sampled(range(1000), 20)) > 500
    (True, 20, True)
    """
    sample: list[Item] = []
    random = Random(seed)
    for count, item in enumerate(items, start=1):
        place = len(sample) if len(sample) < most else random.randrange(count)
        if place < most:
            sample[place : place + 1] = [item]
    return sample


def not_trained_on(items: Iterable[Item], notes: Mapping[str, str | int | float]) -> list[Item]:
    """The items of the test part, for the rows of the file that ramps with these notes were made from."""
    sample = sampled(items, int(notes["rows"]), int(notes["seed"]))
    return [sample[row] for row in Parts.of(len(sample), int(notes["seed"])).test]


@dataclass(frozen=True)
class LabelNames:
    """The meaning of a file's labels: the head's own names and numbers, and other names that the user gives.

    If the head's names are numbers of their own ("1" to "5" stars), numbers in a file are names. `separator` stands
    between the labels of an input that has several. `from_one`: in maps of labels 0 is no label, and the head's first
    label is 1.

    >>> LabelNames(("NEGATIVE", "POSITIVE"), {"bad": "negative"}).number("Bad")
    0
    """

    names: Sequence[str]
    others: Mapping[str, str] = field(default_factory=dict)
    separator: str = ","
    from_one: bool = False

    def __post_init__(self) -> None:
        for other, name in self.others.items():
            if self._own(name) is None:
                raise UserError(f"--labels {other}={name}: the head knows {self.listed}")

    def number(self, label: Any) -> int | None:
        """A number that the file names is the label of that name, unless the head's labels have no names."""
        others, text = {other.lower(): name for other, name in self.others.items()}, str(label).strip()
        if not isinstance(label, NamedNumber):
            given = others.get(text.lower(), others.get(_without_decimals(text.lower())))
            return self._own(text if given is None else given)
        number = str(int(label))
        given = others.get(text.lower(), others.get(number))
        if not given and text in self.names[int(label) : int(label) + 1]:  # another label may have this name too
            return int(label)
        nameless = all(name.upper() in (str(place), f"LABEL_{place}") for place, name in enumerate(self.names))
        return self._named(text) if not (given or nameless or text == number) else self._own(given or number)

    @property
    def listed(self) -> str:
        """The labels that the head knows, for error messages."""
        numbers = f" or 0..{len(self.names) - 1}" if self._numbered else ""
        return ", ".join(self.names[:10]) + (" ..." if len(self.names) > 10 else "") + numbers

    @property
    def _numbered(self) -> bool:
        """Whether a number in a file is the head's number of a label, not its name."""
        own = all(name == str(number) for number, name in enumerate(self.names))
        return own or not any(_without_decimals(name).isdecimal() for name in self.names)

    def _own(self, text: str) -> int | None:
        number = _without_decimals(text)
        if (named := self._named(text)) is not None or not (self._numbered and number.isdecimal()):
            return named
        return int(number) if int(number) < len(self.names) else None

    def _named(self, text: str) -> int | None:
        if (count := self.names.count(text)) > 1:
            raise UserError(f"{count} of the head's labels are named {text!r}: correct id2label in its config.json")
        if count:  # exact matches first, as names may differ only in capitals
            return self.names.index(text)
        folded, number = [name.lower() for name in self.names], _without_decimals(text)
        wanted = number if number.removeprefix("-").isdecimal() else text.lower()
        return folded.index(wanted) if wanted in folded else None


def _without_decimals(text: str) -> str:
    """A whole number without the ".0" that pandas writes."""
    return text.removesuffix(".0")


def sampled_lists(rows: Iterable[Row], source: Path, most: int, seed: int = 0) -> tuple[list[Row], Indices]:
    """Lists of documents with at most `most` documents, and the number of each one's list, from 0.

    The documents of a query follow each other. Lists whose documents are equally relevant are left out: in any order,
    nothing is lost.
    """
    seen = set[str]()

    def lists() -> Iterator[list[Row]]:
        for query, of_query in groupby(rows, lambda row: _query(row, source)):
            documents = list(of_query)
            if query in seen:
                where = f"{source}: row {documents[0].number}"
                again = f"the query {query[:60]!r} was there before"
                raise UserError(f"{where}: {again}: write the documents of a query one after another")
            seen.add(query)
            relevance = [_number(row, source) for row in documents]
            if min(relevance) < 0:
                row = documents[relevance.index(min(relevance))]
                raise UserError(f"{source}: row {row.number}: its relevance is {row.label}: it must be 0 or more")
            if len(set(relevance)) > 1:
                yield documents

    chosen = sampled(lists(), max(1, most // 2), seed)
    if not chosen:
        raise UserError(f"{source}: has no query with both a relevant and a less relevant document")
    Random(seed).shuffle(chosen)
    ends = np.cumsum([len(each) for each in chosen])
    fitting = chosen[: max(1, int((ends <= most).sum()))]
    numbers = np.repeat(np.arange(len(fitting)), [len(each) for each in fitting])
    return [row for each in fitting for row in each], numbers


def _query(row: Row, source: Path) -> str:
    if not isinstance(row.value, tuple):
        raise UserError(
            f"{source}: row {row.number}: --queries needs two texts, a query and a document: name their columns with "
            "--text-column and --text-pair-column"
        )
    if row.label is None:
        raise UserError(f"{source}: row {row.number}: has no relevance: name its column with --label-column")
    query: str = row.value[0]
    return query


def draw(
    rows: Iterable[Row], source: Path, names: LabelNames, most: int, seed: int = 0, task: Task = CLASSIFICATION,
    queries: bool = False,
) -> Sample:  # fmt: skip
    """A sample of at most `most` rows, each with the same chance, in one pass over a file of any size.

    `queries`: the rows are lists of documents, which stay whole.
    """
    lists = None
    if queries:
        chosen_rows, lists = sampled_lists(rows, source, most, seed)
        if (count := int(lists.max()) + 1) < MIN_ROWS:
            few = f"has {count} queries with both a relevant and a less relevant document among {len(lists):,} rows"
            raise UserError(f"{source}: {few}; at least {MIN_ROWS} are needed (--max-rows)")
    else:
        chosen_rows = sampled(rows, most, seed)
    if len(chosen_rows) < MIN_ROWS:
        raise UserError(f"{source}: has {len(chosen_rows) or 'no'} rows; at least {MIN_ROWS} are needed")
    labels = labels_of(chosen_rows, source, names, task)
    if not queries:
        check_scores(chosen_rows, labels, source, task)
    if labels is not None and (labels == labels[:1]).all():
        several = task.by_label or task.by_map
        same = "every row has the same labels" if several else f"every label is {chosen_rows[0].label!r}"
        needed = "scores that differ" if task.by_score else "at least two classes to tell apart"
        raise UserError(f"{source}: {same}: ramps need {needed}")
    sample = Sample(
        [row.value for row in chosen_rows],
        labels,
        Parts.of(len(chosen_rows), seed) if lists is None else Parts.of_lists(lists, seed),
        words_of(chosen_rows, labels, task),
        lists,
        task,
        chosen_rows,
    )
    if (different := sample.different) < MIN_ROWS:
        few = f"only {different} of its {len(sample)} rows are different"
        raise UserError(f"{source}: {few}; at least {MIN_ROWS} are needed, as copies of an input prove nothing")
    return sample


def check_scores(chosen_rows: Sequence[Row], labels: NDArray[Any] | None, source: Path, task: Task) -> None:
    """Raise UserError for a score that the network cannot give."""
    if task.by_score and not task.numbers and labels is not None and ((labels < 0) | (labels > 1)).any():
        wrong = chosen_rows[int(((labels < 0) | (labels > 1)).argmax())]
        raise UserError(
            f"{source}: row {wrong.number}: its score is {wrong.label}, but the network's are from 0 to 1: --queries "
            "is for lists of documents with any relevance"
        )


def _identity(value: Any) -> Any:
    """A value that is the same for equal inputs. That of a picture is small, as those of all rows are kept."""
    if isinstance(value, np.ndarray):
        return hash((value.shape, value.tobytes()))
    return tuple(value) if isinstance(value, list) else value


def labels_of(
    chosen_rows: Sequence[Row], source: Path, names: LabelNames, task: Task = CLASSIFICATION
) -> NDArray[Any] | None:
    """The labels of these rows, or of all their words, as the head numbers them; None if none of them has a label.

    Of inputs with several labels each, a row of 1 and 0 (see `Sample`); of inputs with a score, the true ones.
    """
    if not _have_labels(chosen_rows, source, names):
        return None
    if task.by_score:
        return np.array([_number(row, source) for row in chosen_rows], np.float32)
    if task.by_map or task.by_label:
        return np.array([_parts(row, source, names, task) for row in chosen_rows])
    if other := next((row for row in chosen_rows if isinstance(row.label, list) != task.by_token), None):
        problem = "has a label for each word, but this network gives one label to a text"
        if task.by_token:
            problem = (
                "has one label for a whole text, but this network labels words: give words with a label each, in "
                "columns such as tokens and ner_tags, or in a CoNLL file"
            )
        raise UserError(f"{source}: row {other.number}: {problem}")
    numbers = list[int]()
    for row in chosen_rows:
        for place, label in enumerate(row.label if task.by_token else [row.label], start=1):
            if (number := names.number(label)) is None:
                where = f"{source}: row {row.number}" + (f": word {place}" if task.by_token else "")
                in_file = set[str]() if task.by_token else {str(each.label).strip() for each in chosen_rows}
                raise _no_label(where, label, names, in_file)
            numbers.append(number)
    return np.array(numbers, np.int64)


def _have_labels(chosen_rows: Sequence[Row], source: Path, names: LabelNames) -> bool:
    """Whether these rows have labels. Raise UserError if only some have, or if --labels names those of none."""
    unlabelled = [row.number for row in chosen_rows if row.label is None]
    if len(unlabelled) < len(chosen_rows):
        if unlabelled:
            raise UserError(f"{source}: row {unlabelled[0]}: has no label: give it one, or leave this row out")
        return True
    if chosen_rows and names.others:
        raise UserError(f"{source}: has no column of labels, which --labels gives names: see --label-column")
    return False


def _parts(row: Row, source: Path, names: LabelNames, task: Task) -> NDArray[Any]:
    """The labels of an input that has several: its pixels, its points, or whether it has each label."""
    if isinstance(task, PixelClassification):
        return _on_grid(row, source, names, task.grid)
    return _points(row, source, names, task) if isinstance(task, Keypoints) else _flags(row, source, names)


def _number(row: Row, source: Path) -> float:
    """The true score of an input, or the relevance of a document."""
    with suppress(TypeError, ValueError):
        if math.isfinite(number := float(row.label)):
            return number
    raise UserError(f"{source}: row {row.number}: its score is {row.label!r}: it must be a number")


VOID, NO_LABEL = 255, -1  # of pixels without a label: in files, and here


def _on_grid(row: Row, source: Path, names: LabelNames, grid: tuple[int, int]) -> Indices:
    """The label of each pixel of the network's map: that of the map in the file at the same place.

    A map is an array, or a picture whose pixels are labels: its path, or its bytes as the library `datasets` has them.
    """
    where = f"{source}: row {row.number}"
    is_picture, sides = isinstance(row.label, str | bytes | dict), np.shape(row.value)[:2]
    labels = label_picture(where, source, row.label) if is_picture else np.asarray(row.label)
    if labels.ndim != 2 or labels.dtype.kind not in "iu" or not labels.size:
        raise UserError(f"{where}: its labels must be a map of height x width whole numbers, got {labels.shape}")
    if labels.shape == sides[::-1] != sides:
        turned = f"its labels are {labels.shape[0]} x {labels.shape[1]}, its picture is {sides[0]} x {sides[1]} upright"
        raise UserError(f"{where}: {turned}: turn the labels as the picture's EXIF data turn the picture")
    down, across = (
        ((np.arange(wanted) + 0.5) * (side / wanted)).astype(int)
        for wanted, side in zip(grid, labels.shape, strict=True)
    )
    chosen: Indices = labels[down][:, across].astype(np.int64).ravel()
    none = (chosen == VOID) & (len(names.names) <= VOID)
    if names.from_one:
        none, chosen = none | (chosen == 0), chosen - 1
    wrong = chosen[~none & ((chosen < 0) | (chosen >= len(names.names)))] + names.from_one
    if len(wrong):
        raise UserError(f"{where}: label {wrong[0]} of a pixel does not fit the head; it knows {names.listed}")
    return np.where(none, NO_LABEL, chosen)


def _points(row: Row, source: Path, names: LabelNames, task: Keypoints) -> NDArray[np.float32]:
    """The points of a picture on its heat maps, from x and y in the picture; a third number of 0: no such point."""
    where, count = f"{source}: row {row.number}", len(names.names)
    with suppress(TypeError, ValueError):
        points = np.asarray(row.label, np.float32).reshape(count, -1)
        if points.shape[1] in (2, 3):
            points[(points[:, 2:] == 0).any(axis=1)] = np.nan
            return on_maps(points[:, :2], Sides(*np.shape(row.value)[:2]), task.reads, task.grid)
    raise UserError(f"{where}: its label must be {count} points, each x and y, or x, y and 0 if it is not there")


def _flags(row: Row, source: Path, names: LabelNames) -> Indices:
    """For each of the head's labels, whether this row has it."""
    given = row.label.split(names.separator) if isinstance(row.label, str) else row.label
    labels, flags = given if isinstance(given, list) else [given], np.zeros(len(names.names), np.int64)
    for label in labels:
        if (number := names.number(label)) is not None:
            if flags[number] and _without_decimals(str(label).strip()) in ("0", "1"):
                where = f"{source}: row {row.number}: has the label {label} twice"
                raise UserError(f"{where}: name the labels that the input has, or write 0 and 1 in a column for each")
            flags[number] = 1
        elif len(labels) > 1 or str(label).strip():  # an empty cell: none of the labels
            between = f"; labels stand between {names.separator!r}: --label-separator names another sign"
            hint = between if isinstance(row.label, str) else ""
            raise UserError(f"{_no_label(f'{source}: row {row.number}', label, names, set())}{hint}")
    return flags


def words_of(chosen_rows: Sequence[Row], labels: Indices | None, task: Task) -> Indices | None:
    """The number of labelled words of each row; None if words are not labelled."""
    if labels is None or not task.by_token:
        return None
    return np.array([len(row.label) for row in chosen_rows], np.int64)


def _no_label(where: str, label: Any, names: LabelNames, in_file: set[str]) -> UserError:
    """The error for a label that the head does not have. `in_file`: all labels of the file, if each is of a text."""
    if not str(label).strip():
        return UserError(f"{where}: its label is empty: give it one, or leave this row out")
    quoted = f'"{label}"' if "," in str(label) else label
    hint = f"; --labels {quoted}=NUMBER,OTHER=NUMBER gives the head's numbers of the file's labels"
    if len(in_file) > len(names.names):
        hint = f": it has {len(names.names)} classes, the file {len(in_file)}"
    return UserError(f"{where}: label {str(label).strip()!r} does not fit the head; it knows {names.listed}{hint}")
