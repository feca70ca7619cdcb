"""Networks with one output: what is read of files, what ramps predict, and that what is written will be served."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch import load
from isobatch.deployments.models.ramps import read_rules
from isobatch.deployments.prepare.data import Columns, rows, taken
from isobatch.deployments.prepare.sample import LabelNames, Parts, draw, sampled_lists
from isobatch.deployments.prepare.training import distances_of, head_logits, train_scores
from isobatch.deployments.tasks import REGRESSION, SCORING
from isobatch.profiles.errors import UserError
from isobatch.profiles.losses import NDCG
from isobatch.profiles.promise import agreement_in, promise_in, tolerance_in
from isobatch.profiles.ranking import RankedLists
from tests.helpers.preparing import check_exits, command
from tests.helpers.tiny_labels import label_network
from tests.helpers.tiny_scores import (
    DOCUMENTS,
    in_lists,
    in_numbers,
    in_pairs,
    lists,
    network_of_numbers,
    numbered,
    pairs,
    prepared_network_of_numbers,
    prepared_reranker,
    reference_outputs,
    reranker,
)

SCORE = LabelNames(("score",))
QUERIES = ("--queries",)


def test_a_file_has_a_list_in_each_row_or_a_document(tmp_path: Path) -> None:
    result = lists(60)
    of_lists, of_pairs = in_lists(tmp_path / "a.jsonl", result), in_pairs(tmp_path / "a.csv", result)
    one, other = (draw(rows(each), each, SCORE, 1000, 0, SCORING, queries=True) for each in (of_lists, of_pairs))
    assert one.values == other.values
    assert (one.labels == other.labels).all()
    assert np.bincount(one.lists).tolist() == [DOCUMENTS] * 60
    assert set(one.values) == set(pairs(result)[0])
    assert taken(of_lists) == "a.jsonl: text from 'query', pair from 'document', label from 'relevance'"
    for part in one.parts:
        assert not set(one.lists[part]) & set(one.lists[np.setdiff1d(np.arange(len(one)), part)]), "lists stay whole"


def test_a_sample_has_whole_lists_with_any_order_at_all(tmp_path: Path) -> None:
    path = in_pairs(tmp_path / "a.csv", lists(300))
    drawn = draw(rows(path), path, SCORE, 400, 1, SCORING, queries=True)
    assert 400 - DOCUMENTS < len(drawn) <= 400
    alike = "query,document,label\n" + "".join(f"q,{word},1\n" for word in "abc") + "other,a,1\nother,b,0\n"
    path.write_text(alike)
    chosen, numbers = sampled_lists(rows(path), path, 100)
    assert [row.value for row in chosen] == [("other", "a"), ("other", "b")], "the others show nothing"
    assert numbers.tolist() == [0, 0]


def test_parts_of_lists_are_whole_and_as_large_as_others() -> None:
    parts = Parts.of_lists(np.repeat(np.arange(100), 3))
    assert [len(part) for part in parts] == [180, 15, 105]


@pytest.mark.parametrize(
    ("content", "queries", "sentence"),
    [
        ("query,document,label\nq,a,1\nq,b,0\nr,a,1\nq,c,1\n", True, "row 4: the query 'q' was there before"),
        ("query,document,label\nq,a,1\nq,b,good\n", True, "row 2: its score is 'good': it must be a number"),
        ("query,document,label\nq,a,nan\n", True, "row 1: its score is 'nan': it must be a number"),
        ("query,document,label\nq,a,1\nq,b,-2\n", True, "row 2: its relevance is -2: it must be 0 or more"),
        ("query,document\nq,a\n", True, "row 1: has no relevance: name its column with --label-column"),
        ("text,label\na,1\n", True, "row 1: --queries needs two texts, a query and a document"),
        ("query,document,label\nq,a,1\nq,b,1\n", True, "has no query with both a relevant and a less relevant"),
        ("query,document,label\nq,a,1\nq,b,0\n", True, "has 1 queries with both a relevant and a less relevant"),
        ("text,label\n" + "a,0.5\nb,3\n" * 30, False, "row 2: its score is 3, but the network's are from 0 to 1"),
        ("text,label\n" + "a,0.5\nb,0.5\n" * 30, False, "every label is '0.5': ramps need scores that differ"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, content: str, queries: bool, sentence: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        draw(rows(path), path, SCORE, 100, 0, SCORING, queries=queries)
    assert sentence in str(error.value)


def test_the_relevance_of_listed_documents_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "q", "documents": ["a", "b"], "label": [5, 5], "grades": [1, 0]}\n')
    assert [row.label for row in rows(path, Columns(label="grades"))] == [1, 0]


def test_each_document_of_a_row_needs_its_relevance(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "q", "documents": ["a", "b"], "relevance": [1]}\n')
    with pytest.raises(UserError, match="row 1: has 2 documents but 1 values of 'relevance': each document needs one"):
        list(rows(path))


@pytest.mark.parametrize("are_numbers", [True, False])
def test_ramps_predict_the_score_and_how_far_it_will_move(are_numbers: bool) -> None:
    """The noise of the network's score grows with one feature, so that the distance must."""
    random = np.random.default_rng(0)
    pooled = random.normal(size=(6000, 5)).astype(np.float32)
    noise = random.normal(size=6000) * np.exp(pooled[:, 1] - 2)
    known = pooled[:, 0] * 0.2 if are_numbers else 2 * pooled[:, 0]
    score = known + noise if are_numbers else 1 / (1 + np.exp(-known - noise))
    targets = score.astype(np.float32)[:, None]
    heads = train_scores([pooled], targets, np.arange(4000), are_numbers)
    outputs = head_logits(heads, [pooled], np.arange(4000, 6000))[0]
    assert np.corrcoef(outputs[:, 0].numpy(), known[4000:])[0, 1] > 0.99
    far = distances_of(outputs[:, :1], torch.from_numpy(targets[4000:]), are_numbers)[:, 0]
    predicted = outputs[:, 1].exp().numpy()
    sure = predicted < np.median(predicted)
    assert far[sure].mean() < 0.4 * far[~sure].mean()
    assert np.corrcoef(outputs[:, 1].numpy(), pooled[4000:, 1])[0, 1] > 0.8
    assert predicted.mean() == pytest.approx(far.mean(), rel=0.35)


@pytest.fixture
def ranks() -> Path:
    """The tiny reranker with ramps that may lose a lot."""
    return prepared_reranker() / "out"


@pytest.fixture
def numbers() -> Path:
    return prepared_network_of_numbers() / "out"


@pytest.mark.long
def test_what_is_written_of_lists_is_what_will_be_served(ranks: Path) -> None:
    data, model, rules = ranks.parent / "a.jsonl", load(ranks), read_rules(ranks / "exits.json")
    output = (ranks.parent / "output.txt").read_text()
    assert "at most 8 % of NDCG@10 lost, about 95 % sure (630 inputs in 105 lists" in output
    assert "at least 36 lists must be tested; 105 can show" in output
    assert "105 lists: NDCG@10" in output
    sample = draw(rows(data), data, SCORE, 20_000, task=SCORING, queries=True)
    part = sample.parts.test
    values = [sample.values[row] for row in part]
    early, full = (model.predict(values, exits) for exits in (True, False))
    ranked = RankedLists(sample.lists[part], sample.labels[part])
    scores = [np.array([each.score for each in answers]) for answers in (early, full)]
    check_exits(ranks, early, 4)
    exits_ndcg, full_ndcg = (ranked.ndcg(each).mean() for each in scores)
    assert (rules.ndcg.exits.mean, rules.ndcg.full.mean) == pytest.approx((exits_ndcg, full_ndcg), abs=1e-6)
    assert rules.promise.lost == pytest.approx(full_ndcg - exits_ndcg, abs=1e-6)
    assert rules.promise.counted == len(np.unique(ranked.lists))
    assert rules.tolerance == tolerance_in(ranks) == 0.05
    off = np.abs(scores[0] - scores[1])
    assert rules.agreement == pytest.approx((off <= 0.05).mean(), abs=0.002)
    relevance = sample.labels[part] / 2
    assert rules.exit_accuracy == pytest.approx(1 - np.abs(scores[0] - relevance).mean(), abs=1e-4)
    assert promise_in(ranks) == rules.promise
    assert agreement_in(ranks) < rules.agreement
    reference = reference_outputs(reranker(), [list(each) for each in zip(*values, strict=True)])
    assert scores[1] == pytest.approx(1 / (1 + np.exp(-reference)), abs=1e-5)


@torch.inference_mode()
def test_distances_cover_what_they_say(ranks: Path) -> None:
    """Of documents that the ramps did not see, about 95 % of the network's scores lie within the predicted distance."""
    model = load(ranks)
    values, _ = pairs(lists(200, seed=9))
    pooled, head = model.features(model.encode(values))
    for block in range(3):
        outputs = model.ramps.logits(block, pooled[block])
        far = distances_of(outputs[:, :1], head.sigmoid(), are_numbers=False)[:, 0]
        assert 0.88 < (far <= outputs[:, 1].exp().numpy()).mean() < 0.995
        answered = model.ramps.decide(block, outputs, torch.zeros(len(values), 0), threshold=0.02)
        moved = (answered.answer.sigmoid() - head.sigmoid()).abs()[answered.leaves]
        assert (moved <= 0.02).float().mean() > 0.8 or not len(moved)


def test_what_is_written_of_numbers_is_what_will_be_served(numbers: Path) -> None:
    data, model, rules = numbers.parent / "a.csv", load(numbers), read_rules(numbers / "exits.json")
    output = (numbers.parent / "output.txt").read_text()
    assert "at most 5 % of the scores' range in absolute error lost, about 95 % sure (315 inputs" in output
    sample = draw(rows(data), data, SCORE, 20_000, task=REGRESSION)
    part = sample.parts.test
    values = [sample.values[row] for row in part]
    early, full = (model.predict(values, exits) for exits in (True, False))
    scores = [np.array([each.score for each in answers]) for answers in (early, full)]
    assert scores[1] == pytest.approx(reference_outputs(network_of_numbers(), [values]), abs=1e-4)
    truth, width = sample.labels[part], float(np.ptp(sample.labels))
    errors = [np.abs(each - truth).mean() / width for each in scores]
    check_exits(numbers, early, 4)
    assert rules.promise.metric == "absolute-error"
    assert rules.promise.lost == pytest.approx(errors[0] - errors[1], abs=1e-5)
    assert rules.tolerance == pytest.approx(0.05 * width)
    assert rules.agreement == pytest.approx((np.abs(scores[0] - scores[1]) <= rules.tolerance).mean(), abs=0.004)


def test_evaluate_measures_lists_and_numbers(ranks: Path, numbers: Path, tmp_path: Path) -> None:
    result = lists(60, seed=9)
    arguments = ("evaluate", ranks, "--data", in_pairs(tmp_path / "b.csv", result), *QUERIES)
    figures, model = json.loads(command(*arguments, "--json").stdout), load(ranks)
    values, relevance = pairs(result)
    ranked = RankedLists(np.repeat(np.arange(60), DOCUMENTS), relevance)
    for name, exits in (("exits", True), ("full", False)):
        scores = np.array([each.score for each in model.predict(values, exits)])
        assert figures["scores"][NDCG][name]["mean"] == pytest.approx(ranked.ndcg(scores).mean(), abs=1e-6)
        assert figures["scores"]["absolute-error"][name]["mean"] == pytest.approx(
            np.abs(scores - relevance / 2).mean(), abs=1e-5
        )
    assert "NDCG@10" in command(*arguments).output
    with pytest.raises(UserError, match=r"b\.csv: row \d+: its score is 2, but the network's are from 0 to 1"):
        command(*arguments[:-1])
    fresh = numbered(80, seed=9)
    output = command("evaluate", numbers, "--data", in_numbers(tmp_path / "n.csv", fresh)).output
    assert "error of scores" in output
    assert "near the full network's" in output
    with pytest.raises(UserError, match=r"--labels is for networks that give labels: .* gives a score"):
        command("evaluate", numbers, "--data", tmp_path / "n.csv", "--labels", "none=0")
    alike = in_numbers(tmp_path / "n.csv", [(text, 3.0) for text, _ in fresh])
    with pytest.raises(UserError, match=r"every label is 3, but errors are shares of the labels' range"):
        command("evaluate", numbers, "--data", alike)


@pytest.mark.usefixtures("cache", "no_picture")
def test_without_scores_in_the_file_agreement_within_a_tolerance_is_promised(tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.write_text("\n".join(["text", *(text for text, _ in numbered(400, seed=3))]) + "\n")
    options = ("--data", data, "--out", tmp_path / "out", "--max-accuracy-loss", "10%", "--tolerance", "0.1")
    output = " ".join(command("prepare", network_of_numbers(), *options).output.split())
    assert "at most 10 % of agreement lost, 95 % sure" in output
    rules = read_rules(tmp_path / "out" / "exits.json")
    assert rules.promise.lost == pytest.approx(1 - rules.agreement)


@pytest.mark.parametrize(
    ("network", "options", "sentence"),
    [
        (reranker, ("--policy", "margin"), "--policy is for networks that give labels: this one has one output"),
        (reranker, ("--ramp", "pooler"), "--ramp pooler is for networks that give labels"),
        (reranker, ("--metric", "mcc"), "--metric mcc is for networks that give an input one label; for this one: abs"),
        (reranker, ("--metric", "ndcg@10"), "--metric ndcg@10 needs --queries"),
        (label_network, QUERIES, "--queries is for networks with one output"),
        (label_network, ("--metric", "ndcg@10"), "--metric ndcg@10 is for networks that give an input a score"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_read(
    tmp_path: Path, network: Any, options: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        command("prepare", network(), "--data", tmp_path / "nowhere.csv", "--out", tmp_path / "out", *options)
    assert sentence in str(error.value)
