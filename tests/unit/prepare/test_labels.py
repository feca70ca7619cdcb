"""Inputs with several labels: what is read of files, how they are counted, and that what is promised is kept."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from isobatch import load
from isobatch.cluster import evaluation as evaluating
from isobatch.deployments.prepare.data import Columns, rows, taken
from isobatch.deployments.prepare.entities import of_texts
from isobatch.deployments.prepare.report import by_class, warnings
from isobatch.deployments.prepare.sample import LabelNames, draw, labels_of
from isobatch.deployments.tasks import LABELS
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import PooledF1
from tests.helpers.exit_tables import CANDIDATES, check_promises
from tests.helpers.made_once import made_once
from tests.helpers.preparing import check_exits, command, prepare_network
from tests.helpers.tiny_labels import NAMES, Text, flagged, flags, label_network, listed, texts

FLAGS = Columns(flags=NAMES)
HEADER = ",".join(("text", *NAMES)) + "\n"


def read(path: Path, content: str, columns: Columns = FLAGS, **of_names: Any) -> list[list[int]]:
    path.write_text(content)
    labels = labels_of(list(rows(path, columns)), path, LabelNames(NAMES, **of_names), LABELS)
    return labels.tolist()


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.csv", HEADER + "a b,1,0,1,0\nc,0,0,0,0\n", {}),
        ("a.csv", 'text,labels\na b,"art,sport"\nc,\n', {}),
        ("a.csv", "text,labels\na b,0; 2\nc,\n", {"separator": ";"}),
        ("a.tsv", "text\tlabels\na b\tArt|sport\nc\t\n", {"separator": "|"}),
        ("a.csv", "text,Sport,money,art,rare\na,1.0,0.0,True,false\nc,0,0,0,0\n", {}),
        ("a.jsonl", '{"text": "a", "labels": ["art", "sport"]}\n{"text": "c", "labels": []}\n', {}),
        ("a.jsonl", '{"text": "a", "labels": [2, 0]}\n{"text": "c", "labels": []}\n', {}),
        ("a.csv", "text,labels\na,pictures+sport\nc,\n", {"separator": "+", "others": {"pictures": "art"}}),
    ],
)
def test_labels_are_read_from_any_columns(tmp_path: Path, name: str, content: str, options: dict[str, Any]) -> None:
    assert read(tmp_path / name, content, **options) == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_one_label_is_a_list_of_one_and_no_label_is_no_labels(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", '{"text": "a", "label": 3}\n') == [[0, 0, 0, 1]]
    path = tmp_path / "b.csv"
    path.write_text("text\na\n")
    assert labels_of(list(rows(path, FLAGS)), path, LabelNames(NAMES), LABELS) is None
    with pytest.raises(UserError, match="has no column of labels, which --labels gives names: see --label-column"):
        labels_of(list(rows(path, FLAGS)), path, LabelNames(NAMES, {"other": NAMES[0]}), LABELS)
    path.write_text(HEADER + "a,1,0,0,0\n")
    assert taken(path, FLAGS) == "b.csv: text from 'text', labels from 4 columns of 0 and 1"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (HEADER + "a,1,0,2,0\n", "row 1: 'art' is '2': it must be 1 for an input with this label, else 0"),
        ("text,sport,art\na,1,0\n", "has columns of the labels 'sport', 'art', but none of 'money': each label needs"),
        ("text,labels\na,art;sport\n", "label 'art;sport' does not fit the head; it knows sport, money, art, rare"),
        ("text,labels\na,art;sport\n", "labels stand between ',': --label-separator names another sign"),
        ('text,labels\na,"art,,sport"\n', "row 1: its label is empty"),
        ("text,labels\na,4\n", "row 1: label '4' does not fit the head"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, content: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path / "a.csv", content)
    assert sentence in str(error.value)


def test_a_lone_number_is_one_label(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", '{"text": "a", "labels": 2}\n') == [[0, 0, 1, 0]]
    with pytest.raises(UserError, match="row 1: label '99' does not fit the head"):
        read(tmp_path / "b.jsonl", '{"text": "a", "labels": 99}\n')


def test_a_list_of_0_and_1_is_no_list_of_labels(tmp_path: Path) -> None:
    """Most programs that train such networks write 0.0 or 1.0 for each label."""
    for labels in ("[0.0, 1.0, 0.0, 0.0]", "[1, 0, 0, 1]", "[true, true, false, false]", '"0,1,0,0"'):
        with pytest.raises(UserError, match=r"row 1: (has the label [01]|label 'True')"):
            read(tmp_path / "a.jsonl", f'{{"text": "a", "labels": {labels}}}\n')
    for labels in ("art,art", "art, art", "art,Art"):
        assert read(tmp_path / "b.csv", f'text,labels\na,"{labels}"\n') == [[0, 0, 1, 0]]


def test_rows_that_are_all_alike_show_nothing(tmp_path: Path) -> None:
    path = listed(tmp_path / "a.csv", [(f"text {number}", ("art",)) for number in range(60)])
    with pytest.raises(UserError, match="every row has the same labels: ramps need at least two classes"):
        draw(rows(path), path, LabelNames(NAMES), 100, task=LABELS)


MANY, SPARSE = (0.05, 0.2, 0.8), (0.0, 0.0, 0.0, 0.5)  # shares of all labels that inputs have


def label_table(
    seed: int, count: int, labels: int = 4, ramps: int = 3, shares: tuple[float, ...] = MANY
) -> tuple[ExitTable, np.ndarray]:
    """The table of all labels, and the number of labels of each input; a few inputs have many."""
    random = np.random.default_rng(seed)
    hard = np.repeat(random.uniform(size=count), labels)
    sure = 1 - hard + random.normal(scale=0.15, size=(ramps, count * labels))
    first = np.clip(((1 - sure) * CANDIDATES).astype(int) + 1, 1, CANDIDATES).astype(np.uint8)
    truth = (random.random(count * labels) < np.repeat(random.choice(shares, count), labels)).astype(np.int64)
    wrong = random.random((ramps + 1, count * labels)) < hard * (1.1 - np.linspace(0.5, 1.0, ramps + 1)[:, None]) / 2
    answers = np.where(wrong, 1 - truth, truth)
    right = (answers == truth).astype(np.float32)
    costs = np.arange(1, ramps + 2) / (ramps + 1)
    return ExitTable(np.arange(CANDIDATES, dtype=float), first, right, answers, truth, costs), np.full(count, labels)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), count=st.integers(1, 12), labels=st.integers(2, 4))
def test_the_table_of_inputs_is_what_its_labels_say_one_by_one(seed: int, count: int, labels: int) -> None:
    each, counts = label_table(seed, count, labels)
    table = of_texts(each, counts, 0, by_label=True)
    for row in range(count):
        own = slice(row * labels, (row + 1) * labels)
        for ramp in range(3):
            for candidate in range(CANDIDATES):
                leaves = all(int(first) <= candidate for first in each.first[ramp, own])
                assert (table.first[ramp, row] <= candidate) == leaves
        for place in range(4):
            given_, there = each.labels[place, own], each.truth[own]
            assert table.right[place, row] == pytest.approx((given_ == there).mean())
            assert table.marks[0, place, row] == sum(a == b == 1 for a, b in zip(given_, there, strict=True))
            assert table.marks[1, place, row] == given_.sum() + there.sum()
    places = np.random.default_rng(seed).integers(0, 4, count)
    early = each.labels[np.repeat(places, labels), np.arange(count * labels)].reshape(count, -1)
    truth, full = each.truth.reshape(count, -1), each.labels[-1].reshape(count, -1)
    (lost,) = table.lost(places, "micro-f1")
    expected = [f1_score(truth, some, average="micro", zero_division=1.0) for some in (full, early)]
    assert lost.mean == pytest.approx(expected[0] - expected[1], abs=1e-6)
    assert lost.counted <= count


def test_what_a_table_shows_of_single_inputs_adds_up_to_the_loss_where_little_is_lost() -> None:
    each, counts = label_table(3, 4000)
    table = of_texts(each, counts, 0, by_label=True)
    places = np.where(np.random.default_rng(0).random(4000) < 0.1, 0, 3)
    added = table.losses("micro-f1")[places, np.arange(4000)].mean()
    assert added == pytest.approx(table.lost(places, "micro-f1")[0].mean, rel=0.05)
    some = table.only([1], table.costs).of(np.arange(10))
    assert some.marks.shape == (2, 2, 10)
    assert (some.losses("micro-f1")[1] == 0).all()


def test_the_standard_error_of_lost_micro_f1_is_that_of_many_draws() -> None:
    lost = []
    for seed in range(200):
        table = of_texts(*label_table(seed, 1500), 0, by_label=True)
        lost += table.lost(table.places(np.array([20, 20, 20])), "micro-f1")
    spread, estimated = np.std([each.mean for each in lost]), np.mean([each.error for each in lost])
    assert 0.9 * spread < estimated < 1.25 * spread, "a little more, as one loss more is assumed"


def test_an_input_counts_by_what_it_has() -> None:
    alike = PooledF1(np.ones(100), np.full(100, 2.0))
    assert alike.loss(alike).counted == 100
    few = np.where(np.arange(100) < 10, 1.0, 0.0)
    assert PooledF1(few, 2 * few).loss(PooledF1(few, 2 * few)).counted == pytest.approx(10, abs=1)
    nothing = PooledF1(np.zeros(3), np.zeros(3))
    assert (nothing.value, nothing.loss(nothing).mean) == (1.0, 0.0)


@pytest.mark.parametrize(("metric", "shares"), [("micro-f1", SPARSE), ("agreement", MANY)])
def test_a_promise_is_broken_no_more_often_than_its_confidence_says(metric: Any, shares: tuple[float, ...]) -> None:
    everything, random = of_texts(*label_table(7, 12_000, shares=shares), 0, by_label=True), np.random.default_rng(0)
    check_promises(everything, lambda: np.split(random.permutation(12_000)[:1600], [400]), metric, 0.04)


def test_classes_are_the_labels_that_inputs_have() -> None:
    truth = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]])
    full, exits = truth.copy(), truth * np.array([1, 0, 1])
    one, other = by_class(truth, full, exits)
    assert (one.label, one.inputs, one.recall, one.lost) == (0, 2, 1.0, 0)
    assert (other.label, other.inputs, other.full_recall, other.recall, other.lost, other.f1) == (1, 2, 1.0, 0.0, 2, 0)
    assert list(warnings((), NAMES, True, LABELS)) == []


TEXTS = texts(300, seed=7)


@made_once
def prepared_labels(folder: Path) -> None:
    """`out`: the tiny network with ramps that may lose a lot."""
    prepare_network(folder, label_network(), flagged(folder / "a.csv", TEXTS), "15%")


@pytest.fixture
def prepared() -> Path:
    return prepared_labels() / "out"


def f1(answers: list[Any], result: list[Text]) -> float:
    return float(f1_score(flags(result), np.array([each.label for each in answers]), average="micro"))


def test_what_is_written_is_what_will_be_served(prepared: Path) -> None:
    model, data, output = load(prepared), prepared.parent / "a.csv", (prepared.parent / "output.txt").read_text()
    assert "text from 'text', labels from 4 columns of 0 and 1" in output
    assert "at most 15 % of micro-F1 lost, about 95 % sure (105 inputs" in output
    part = draw(rows(data, FLAGS), data, LabelNames(NAMES), 20_000, task=LABELS).parts.test
    some = [TEXTS[row] for row in part]
    answers, full = (model.predict([each for each, _ in some], exits) for exits in (True, False))
    rules = check_exits(prepared, answers, 4)
    assert rules["promise"]["metric"] == "micro-f1"
    assert rules["promise"]["lost"] == pytest.approx(f1(full, some) - f1(answers, some), abs=1e-6)
    early, plain = (np.array([each.label for each in given_]) for given_ in (answers, full))
    assert rules["exit_accuracy"] == pytest.approx((early == flags(some)).mean())
    assert rules["agreement"] == pytest.approx((early == plain).mean())
    assert [each["inputs"] for each in rules["classes"]] == [n for n in flags(some).sum(axis=0).tolist() if n]
    evidence = Evidence.read(prepared / EVIDENCE)
    assert evidence.for_metric("accuracy").metric == "accuracy"
    with pytest.raises(UserError, match="--metric mcc is for networks that give an input one label"):
        evidence.for_metric("mcc")


def test_evaluate_counts_labels(prepared: Path, tmp_path: Path) -> None:
    fresh = texts(80, seed=9)
    arguments = ("evaluate", prepared, "--data", listed(tmp_path / "b.csv", fresh, ";"), "--label-separator", ";")
    evaluation, model = json.loads(command(*arguments, "--json").stdout), load(prepared)
    answers, full = (model.predict([each for each, _ in fresh], exits) for exits in (True, False))
    assert evaluation["scores"]["micro-f1"]["exits"]["mean"] == pytest.approx(f1(answers, fresh))
    assert evaluation["scores"]["micro-f1"]["full"]["mean"] == pytest.approx(f1(full, fresh))
    early = np.array([each.label for each in answers])
    assert evaluation["accuracy"]["mean"] == pytest.approx((early == flags(fresh)).mean())
    shown = command(*arguments).output
    assert "micro-F1" in shown
    assert "macro-F1" not in shown


def test_a_servers_answers_are_compared(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(prepared)
    own = model.predict([each for each, _ in texts(5)])
    outputs = [LABELS.output(each, NAMES) | {"exit_block": each.exit_block} for each in own]
    monkeypatch.setattr(evaluating, "outputs_from", lambda *_: iter(outputs))
    answers = evaluating.served("http://a", own, {}, LABELS, NAMES)
    evaluating.check_same_network("http://a", answers, model)
    for answer, each in zip(answers, own, strict=True):
        assert (answer.label, answer.name) == (each.label, each.name)
        has = np.array(each.label) == 1
        assert np.array(answer.score)[has] == pytest.approx(each.probabilities[has])
    outputs[0] = {"labels": [{"label": 7, "name": "other", "score": 0.9}], "exit_block": 0}
    with pytest.raises(UserError, match="serves another network"):
        evaluating.check_same_network("http://a", evaluating.served("http://a", own, {}, LABELS, NAMES), model)


def test_predict_writes_labels_to_every_format(prepared: Path, tmp_path: Path) -> None:
    data = listed(tmp_path / "a.csv", TEXTS[:20])
    own = load(prepared).predict([each for each, _ in TEXTS[:20]])
    for name in ("b.csv", "b.jsonl", "b.parquet"):
        options = ("--scores", "all", "--label-separator", "|")
        command("predict", data, "--model", prepared, "--out", tmp_path / name, *options)
    with (tmp_path / "b.csv").open() as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    for row, line, answer in zip(table, lines, own, strict=True):
        assert (
            set(filter(None, row["labels"].split("|"))) == set(answer.name) == {each["name"] for each in line["labels"]}
        )
        assert [float(row[f"score of {name}"]) for name in NAMES] == pytest.approx(answer.probabilities, abs=1e-5)


@pytest.mark.usefixtures("cache", "no_picture")
def test_without_labels_agreement_is_promised_label_by_label(tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.write_text("\n".join(["text", *(each for each, _ in texts(200, seed=3))]) + "\n")
    options = ("--data", data, "--out", tmp_path / "out", "--max-accuracy-loss", "10%", "--policy", "confidence")
    output = " ".join(command("prepare", label_network(), *options).output.split())
    assert "and agreement with it is promised, label by label" in output
    assert "at most 10 % of agreement lost, 95 % sure" in output
    rules = json.loads((tmp_path / "out" / "exits.json").read_text())
    assert rules["promise"]["lost"] == pytest.approx(1 - rules["agreement"], abs=1e-6)  # of single precision
    assert rules["mean_depth_share"] < 1
