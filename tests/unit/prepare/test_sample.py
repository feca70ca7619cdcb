"""Samples: uniform, labelled as the head numbers them, in parts that never mix."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.prepare.data import Row, rows
from isobatch.deployments.prepare.records import NamedNumber
from isobatch.deployments.prepare.sample import LabelNames, Parts, draw, labels_of, not_trained_on
from isobatch.deployments.tasks import LABELS, SCORING, TOKENS
from isobatch.profiles.errors import UserError

FILE = Path("reviews.csv")
NAMES = LabelNames(["negative", "positive"])


def table(count: int) -> list[Row]:
    return [Row(number, f"text {number}", number % 2) for number in range(1, count + 1)]


@given(count=st.integers(5, 500), seed=st.integers(0, 5))
def test_parts_cover_everything_once(count: int, seed: int) -> None:
    parts = Parts.of(count, seed)
    together = np.concatenate((parts.train, parts.calibrate, parts.test))
    assert sorted(together.tolist()) == list(range(count))


def test_every_row_has_the_same_chance() -> None:
    draws = Counter(value for seed in range(200) for value in draw(table(100), FILE, NAMES, 50, seed).values)
    assert len(draws) == 100
    assert max(draws.values()) < 2 * 100
    assert abs(sum(draws[f"text {number}"] for number in range(1, 51)) / sum(draws.values()) - 0.5) < 0.03


def test_a_sample_is_reproducible_and_holds_no_row_twice() -> None:
    sample = draw(table(300), FILE, NAMES, 100, seed=1)
    assert len(set(sample.values)) == len(sample) == 100
    assert sample.values == draw(table(300), FILE, NAMES, 100, seed=1).values
    assert sample.values != draw(table(300), FILE, NAMES, 100, seed=2).values


def test_what_ramps_were_not_trained_on_is_known_again() -> None:
    sample = draw(table(300), FILE, NAMES, 100, seed=1)
    notes = {"rows": 100, "seed": 1}
    values = [row.value for row in table(300)]
    assert not_trained_on(values, notes) == [sample.values[row] for row in sample.parts.test]


def test_copies_of_pictures_are_counted_without_a_second_copy_of_each() -> None:
    """The pictures of 20,000 rows may fill the memory."""
    pictures = [np.full((100, 1000), number % 50, np.uint8) for number in range(100)]
    sample = draw([Row(place, each, place % 2) for place, each in enumerate(pictures)], FILE, NAMES, 100)
    tracemalloc.start()
    different, (_, peak_bytes) = sample.different, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert different == 50
    assert peak_bytes < 5 * pictures[0].nbytes


@pytest.mark.parametrize("one", ["1", "1.0", 1, 1.0])
def test_other_names_of_labels_are_known_however_their_numbers_are_written(one: object) -> None:
    swapped = LabelNames(["negative", "positive"], {"0": "1", "1": "0"})
    assert swapped.number(one) == 0
    assert NAMES.number(one) == 1


def test_labels_of_one_name_are_told_apart_by_their_numbers_or_refused() -> None:
    names = LabelNames(["crane", "gull", "crane"])
    assert [names.number(each) for each in NamedNumber.of(names.names, [0, 1, 2])] == [0, 1, 2]
    assert [names.number(each) for each in (2, "gull")] == [2, 1]
    with pytest.raises(UserError, match="2 of the head's labels are named 'crane': correct id2label"):
        names.number("crane")


def test_negative_numbers_as_pandas_writes_them_are_names() -> None:
    assert [LabelNames(["-1", "0", "1"]).number(label) for label in ("-1.0", -1.0, "0.0", 1.0)] == [0, 0, 1, 2]


def test_labels_stay_with_their_texts() -> None:
    sample = draw(table(300), FILE, NAMES, 100)
    assert [int(str(value).split()[1]) % 2 for value in sample.values] == sample.labels.tolist()
    assert draw([Row(number, f"text {number}", None) for number in range(60)], FILE, NAMES, 100).labels is None


@pytest.mark.parametrize(
    ("label", "number"), [("positive", 1), ("Negative ", 0), (1, 1), ("1", 1), ("0.0", 0), (1.0, 1)]
)
def test_labels_by_name_or_number(label: object, number: int) -> None:
    assert NAMES.number(label) == number


def test_names_that_differ_in_capitals_alone_are_told_apart() -> None:
    names = LabelNames(["US", "us", "Other"], {"them": "us"})
    assert [names.number(label) for label in ("US", "us", "OTHER", "them")] == [0, 1, 2, 1]


def test_labels_by_names_that_the_user_has_given() -> None:
    names = LabelNames(["NEGATIVE", "POSITIVE"], {"bad": "0", "Good": "positive", "1": "0"})
    assert [names.number(label) for label in ("Bad", "good", "negative", 1, 0)] == [0, 1, 0, 0, 0]
    with pytest.raises(UserError, match=r"--labels bad=2: the head knows NEGATIVE, POSITIVE or 0..1"):
        LabelNames(["NEGATIVE", "POSITIVE"], {"bad": "2"})


def test_numbers_of_a_file_are_names_where_the_head_names_its_labels_by_other_numbers() -> None:
    stars = LabelNames(("1", "2", "3"))
    assert [stars.number(label) for label in (1, "2", 3.0, 0)] == [0, 1, 2, None]
    with pytest.raises(UserError, match=r"row 7: label '0' does not fit the head; it knows 1, 2, 3; --labels 0=NUMBER"):
        labels_of([Row(6, "", "1"), Row(7, "", "0")], FILE, stars)
    assert [LabelNames(("1", "2", "3"), {"0": "1", "1": "2"}).number(label) for label in (0, 1)] == [0, 1]
    assert [LabelNames(("0", "1")).number(label) for label in (0, "1", 1.0, 2)] == [0, 1, 1, None]


def named_by_datasets(folder: Path, cells: list[Any], names: list[str], texts: str = "text") -> Path:
    """A Parquet file as the library `datasets` writes it: numbers, and their names beside the columns' types."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    of_label: dict[str, Any] = {"names": names, "_type": "ClassLabel"}
    if isinstance(cells[0], list):
        of_label = {"feature": of_label, "_type": "List"}
    described = {"info": {"features": {texts: {"dtype": "string", "_type": "Value"}, "label": of_label}}}
    table = arrow.table({texts: [["a"] if texts == "tokens" else "a"] * len(cells), "label": cells})
    path = folder / "a.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(described)}), path)
    return path


NLI = ["entailment", "neutral", "contradiction"]


@pytest.mark.parametrize(
    ("head", "others", "expected"),
    [
        (["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], {}, [2, 1, 0]),
        (["LABEL_0", "LABEL_1", "LABEL_2"], {}, [0, 1, 2]),  # these say nothing
        (["0", "1", "2"], {}, [0, 1, 2]),
        (["yes", "no"], {"entailment": "0", "neutral": "no", "contradiction": "no"}, [0, 1, 1]),
        (["yes", "no"], {"0": "yes", "1": "no", "2": "no"}, [0, 1, 1]),
    ],
)
def test_numbers_that_a_file_names_are_the_labels_of_these_names(
    tmp_path: Path, head: list[str], others: dict[str, str], expected: list[int]
) -> None:
    path = named_by_datasets(tmp_path, [0, 1, 2], NLI)
    assert labels_of(list(rows(path)), path, LabelNames(head, others)).tolist() == expected


def test_named_numbers_of_words_and_of_several_labels_and_of_scores(tmp_path: Path) -> None:
    tags, names = ["O", "B-PER", "B-LOC"], LabelNames(["O", "B-LOC", "B-PER"])
    for cells, texts, task, expected in (
        ([[1], [2]], "tokens", TOKENS, [2, 1]),
        ([[1, 2], [0]], "text", LABELS, [[0, 1, 1], [1, 0, 0]]),
        ([1, 0], "text", SCORING, [1.0, 0.0]),
    ):
        path = named_by_datasets(tmp_path, cells, tags, texts)
        assert labels_of(list(rows(path)), path, names, task).tolist() == expected


@pytest.mark.parametrize(
    ("names", "cell", "head", "sentence"),
    [
        (NLI, 2, ["yes", "no"], "'contradiction' does not fit the head; it knows yes, no or 0..1; --labels contrad"),
        (["1", "2", "3"], 1, ["1 star", "2 stars", "3 stars"], "label '2' does not fit the head; it knows 1 star"),
        (NLI, -1, ["entailment", "neutral", "contradiction"], "label '-1' does not fit the head"),
    ],
)
def test_named_numbers_whose_names_the_head_does_not_know_are_refused(
    tmp_path: Path, names: list[str], cell: int, head: list[str], sentence: str
) -> None:
    path = named_by_datasets(tmp_path, [cell], names)
    with pytest.raises(UserError, match=sentence):
        labels_of(list(rows(path)), path, LabelNames(head))


def test_a_row_without_a_label_among_others_that_have_one_is_refused() -> None:
    labelled = table(60)
    for place in (0, 6):
        some = [*labelled[:place], Row(place + 1, "a text", None), *labelled[place + 1 :]]
        with pytest.raises(UserError, match=f"row {place + 1}: has no label: give it one, or leave this row out"):
            draw(some, FILE, NAMES, 300)


@pytest.mark.parametrize("label", [2, -1, "neutral", 0.5])
def test_labels_that_do_not_fit_the_head(label: object) -> None:
    with pytest.raises(UserError, match=r"row 7: label .* does not fit the head; it knows negative, positive or 0..1"):
        labels_of([Row(6, "", "0"), Row(7, "", label)], FILE, NAMES)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows; at least 50"),
        (table(49), "has 49 rows; at least 50"),
        ([Row(number, "", 1) for number in range(60)], "every label is 1"),
        (table(7) * 42 + table(6), "only 7 of its 300 rows are different; at least 50 are needed"),
        ([*table(60), Row(61, "a text", " ")], r"reviews.csv: row 61: its label is empty: give it one"),
    ],
)
def test_rows_that_are_no_sample_are_refused(rows: list[Row], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw(rows, FILE, NAMES, 300)
