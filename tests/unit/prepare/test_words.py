"""Texts whose words are labelled: what is read of files, how texts are counted, and that what is written is served."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch import load
from isobatch.deployments.prepare.data import rows, taken
from isobatch.deployments.prepare.entities import entity_f1, of_texts
from isobatch.deployments.prepare.features import Features
from isobatch.deployments.prepare.measuring import PrepareOptions, make_ramps
from isobatch.deployments.prepare.sample import LabelNames, Parts, Sample, draw
from isobatch.deployments.tasks import TOKENS
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import ExitTable
from tests.helpers.made_once import made_once
from tests.helpers.preparing import check_exits, command, prepare_network
from tests.helpers.tiny_words import NAMES, conll, sentences, word_network

CONLL_2003 = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\nPeter NNP B-NP B-PER\n"
TWO = [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter"], ["B-PER"])]
ONE = '{"tokens": ["a"], "labels": [0]}\n'


def read(path: Path) -> list[tuple[Any, Any]]:
    return [(row.value, row.label) for row in rows(path)]


@pytest.mark.parametrize(
    ("name", "content", "result"),
    [
        ("a.conll", "EU\tB-ORG\nrejects\tO\n\nPeter\tB-PER", TWO),
        ("a.txt", CONLL_2003, TWO),
        ("a.bio", "EU\nrejects\n\nPeter\n", [(["EU", "rejects"], None), (["Peter"], None)]),
        ("a.iob", "New York\tB-LOC\n", [(["New York"], ["B-LOC"])]),
        ("a.jsonl", '{"id": 1, "tokens": ["EU"], "ner_tags": [3]}\n', [(["EU"], [3])]),
        ("a.jsonl", '{"words": ["EU"], "labels": ["O"]}\n', [(["EU"], ["O"])]),
        ("a.json", '[{"tokens": ["EU"]}]', [(["EU"], None)]),
    ],
)  # fmt: skip
def test_words_are_read_with_their_labels(tmp_path: Path, name: str, content: str, result: list[Any]) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert read(path) == result
    assert taken(path).startswith(f"{name}: words from ")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.conll", "EU B-ORG\nrejects\n", "line 2 has 1 columns, the lines before it 2: 'rejects'"),
        ("a.conll", "EU\tB-ORG\n\t O\n", "line 2 has an empty word: 'O'"),
        ("a.jsonl", ONE + '{"tokens": ["a", "b"], "labels": [0]}', "row 2: has 2 words but 1 labels"),
        ("a.jsonl", ONE + '{"tokens": ["a"], "labels": 0}', "row 2: 'labels' must be a list with a label for each"),
        ("a.jsonl", '{"tokens": ["a"]}\n{"tokens": ["a", " "]}', "row 2: 'tokens': word 2 is empty"),
        ("a.jsonl", '{"tokens": ["a"]}\n{"tokens": []}', "row 2: 'tokens' must be a list of words, got an empty list"),
        ("a.jsonl", '{"tokens": ["a"]}\n{"tokens": ["a"], "ner": [0]}', "row 2 has a label ('ner') but row 1 has none"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read(path)
    assert sentence in str(error.value)


def sampled(path: Path, content: str, task: Any) -> Any:
    path.write_text(content * 60)
    return draw(rows(path), path, LabelNames(NAMES), 100, task=task)


def test_labels_must_fit_what_the_network_answers(tmp_path: Path) -> None:
    from isobatch.deployments.tasks import CLASSIFICATION

    words, whole = '{"tokens": ["a", "b"], "labels": ["O", "B-ORG"]}\n', '{"text": "a", "label": 0}\n'
    with pytest.raises(UserError, match="row 1: word 2: label 'B-ORG' does not fit the head; it knows O, B-PER"):
        sampled(tmp_path / "a.jsonl", words, TOKENS)
    with pytest.raises(UserError, match="row 1: has one label for a whole text, but this network labels words"):
        sampled(tmp_path / "a.jsonl", whole, TOKENS)
    with pytest.raises(UserError, match="row 1: has a label for each word, but this network gives one label"):
        sampled(tmp_path / "a.jsonl", words, CLASSIFICATION)


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), most_unsure=st.integers(0, 3), seed=st.integers(0, 999)
)
def test_the_table_of_texts_follows_the_rule_for_words(counts: list[int], most_unsure: int, seed: int) -> None:
    random, candidates, total = np.random.default_rng(seed), 6, sum(counts)
    words = ExitTable(
        candidates=np.linspace(1, 0, candidates),
        first=random.integers(1, candidates + 1, (2, total)).astype(np.uint8),  # the strictest lets no word go
        right=random.integers(0, 2, (3, total)).astype(np.float32),
        labels=random.integers(0, 3, (3, total)).astype(np.uint16),
        truth=random.integers(0, 3, total).astype(np.uint16),
        costs=np.array([0.3, 0.6, 1.0]),
    )
    texts = of_texts(words, np.array(counts), most_unsure)
    ends = np.cumsum(counts)
    for text, (count, end) in enumerate(zip(counts, ends, strict=True)):
        own = slice(end - count, end)
        for ramp in range(2):
            for candidate in range(candidates):
                unsure = int((words.first[ramp, own] > candidate).sum())
                leaves = unsure <= most_unsure and unsure < count
                assert (texts.first[ramp, text] <= candidate) == leaves
        for place in range(3):
            right, same = words.right[place, own], words.labels[place, own] == words.labels[-1, own]
            assert texts.right[place, text] == pytest.approx(right.mean() if count else 1.0)
            assert texts.agrees[place, text] == pytest.approx(same.mean() if count else 1.0)
    assert (texts.places(texts.strictest) == 2).all(), "at the strictest threshold nobody leaves, however few words"


@pytest.mark.parametrize("labelled", [True, False])
def test_texts_without_a_word_that_is_answered_are_one_sentence(labelled: bool) -> None:
    """A tokenizer drops words of a zero-width space, for instance."""
    nobody, none = np.zeros(60, np.int64), np.empty((0, 3), np.float32)
    labels = (np.array([0, 1] * 30), nobody + 1) if labelled else (None, None)
    sample = Sample(["\u200b"] * 60, labels[0], Parts.of(60), labels[1])
    with pytest.raises(UserError, match="hardly any text has a word that the network answers"):
        make_ramps(Features([none], none, nobody, np.empty(0, np.int64)), sample, PrepareOptions())


SENTENCES = sentences(200, seed=7)


@made_once
def prepared_words(folder: Path) -> None:
    """`out`: the tiny network with ramps that may lose a lot."""
    prepare_network(folder, word_network(), conll(folder / "a.conll", SENTENCES), "10%")


@pytest.fixture
def prepared() -> Path:
    return prepared_words() / "out"


def test_what_is_written_is_what_will_be_served(prepared: Path) -> None:
    model, data, output = load(prepared), prepared.parent / "a.conll", (prepared.parent / "output.txt").read_text()
    assert "a.conll: words from 'tokens', label from 'ner_tags'" in output
    assert re.search(r"class words .*B-PER", output)
    assert re.search(r"[1-9]\d* entities: F1 .* in full", output)
    part = draw(rows(data), data, LabelNames(NAMES), 20_000, task=TOKENS).parts.test
    result = [SENTENCES[row] for row in part]
    answers, full = (model.predict([words for words, _ in result], exits) for exits in (True, False))
    rules = check_exits(prepared, answers, 4)
    right = [np.mean(np.array(each.name) == labels) for each, (_, labels) in zip(answers, result, strict=True)]
    assert rules["exit_accuracy"] == pytest.approx(np.mean(right))
    same = [np.mean(np.array(one.label) == other.label) for one, other in zip(answers, full, strict=True)]
    assert rules["agreement"] == pytest.approx(np.mean(same))
    assert sum(each["inputs"] for each in rules["classes"]) == sum(len(words) for words, _ in result)
    assert rules["entities"]["entities"] == sum(name.startswith("B-") for _, labels in result for name in labels)
    with pytest.raises(UserError, match="--metric mcc is for networks that give an input one label"):
        Evidence.read(prepared / EVIDENCE).for_metric("mcc")


def test_evaluate_counts_words(prepared: Path, tmp_path: Path) -> None:
    fresh, model = sentences(80, seed=9), load(prepared)
    result = command("evaluate", prepared, "--data", conll(tmp_path / "b.conll", fresh), "--json").stdout
    evaluation = json.loads(result)
    answers, full = (model.predict([words for words, _ in fresh], exits) for exits in (True, False))
    right = [np.mean(np.array(each.name) == labels) for each, (_, labels) in zip(answers, fresh, strict=True)]
    same = [np.mean(np.array(one.label) == other.label) for one, other in zip(answers, full, strict=True)]
    assert evaluation["accuracy"]["mean"] == pytest.approx(np.mean(right))
    assert evaluation["agreement"]["mean"] == pytest.approx(np.mean(same))
    assert sum(each["inputs"] for each in evaluation["classes"]) == sum(len(words) for words, _ in fresh)
    labels = np.array([NAMES.index(name) for _, labels in fresh for name in labels])
    whole, early = (np.concatenate([each.label for each in some]) for some in (full, answers))
    expected = entity_f1(labels, whole, early, np.array([len(words) for words, _ in fresh]), NAMES)
    assert evaluation["entities"] == asdict(expected)
    assert 0.9 < expected.exits.mean < expected.full.mean, "exits of these cost a little"
