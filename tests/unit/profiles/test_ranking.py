"""NDCG@10 of lists: against scikit-learn and by definition, and that what is promised of it is kept."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import NDCG
from isobatch.profiles.ranking import DEPTH, RankedLists
from tests.helpers.exit_tables import CANDIDATES, check_promises, exit_table


def by_definition(scores: list[float], relevance: list[float]) -> float:
    def gain(order: list[int]) -> float:
        return sum(relevance[row] / math.log2(rank + 2) for rank, row in enumerate(order[:DEPTH]))

    rows = range(len(scores))
    return gain(sorted(rows, key=lambda row: -scores[row])) / gain(sorted(rows, key=lambda row: -relevance[row]))


def drawn(random: np.random.Generator, lists: int, most: int = 16) -> RankedLists:
    """Lists of unlike lengths, each with a relevant document, whose rows are mixed."""
    numbers = np.repeat(np.arange(lists) * 3 + 5, random.integers(2, most, lists))
    relevance = random.integers(0, 3, len(numbers)).astype(float)
    relevance[np.unique(numbers, return_index=True)[1]] = 2.0
    order = random.permutation(len(numbers))
    return RankedLists(numbers[order], relevance[order])


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), ties=st.booleans())
def test_ndcg_is_its_definition_and_scikit_learns(seed: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    ranked = drawn(random, 4)
    scores = random.integers(0, 4, len(ranked.lists)) / 4 if ties else random.random(len(ranked.lists))
    result = ranked.ndcg(scores)
    for number, each in zip(np.unique(ranked.lists), result, strict=True):
        rows = ranked.lists == number
        assert each == pytest.approx(by_definition(scores[rows].tolist(), ranked.relevance[rows].tolist()))
        if not ties:
            assert each == pytest.approx(ndcg_score([ranked.relevance[rows]], [scores[rows]], k=DEPTH))


@settings(max_examples=20)
@given(seed=st.integers(0, 9999))
def test_what_a_document_loses_is_what_its_list_loses_without_any_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranked = drawn(random, 3)
    scores = random.random((3, len(ranked.lists)))
    losses, full = ranked.losses(scores), ranked.ndcg(scores[-1]).mean()
    assert (losses[-1] == 0).all()
    for ramp in range(2):
        for row in range(len(ranked.lists)):
            changed = scores[-1].copy()
            changed[row] = scores[ramp, row]
            lost = full - ranked.ndcg(changed).mean()
            assert losses[ramp, row] / len(ranked.lists) == pytest.approx(lost, abs=1e-9)


def table_of_lists(seed: int, lists: int, length: int = 8) -> ExitTable:
    """Documents whose scores are nearer to the network's the deeper the ramp, and the surer the ramp is."""
    random = np.random.default_rng(seed)
    table = exit_table(seed, count=lists * length)
    relevance = (np.arange(lists * length) % length == 0).astype(np.float32)
    full = relevance + random.normal(scale=0.35, size=lists * length)
    off = random.normal(size=table.first.shape) * table.first / CANDIDATES
    scores = np.concatenate((full + off, full[None])).astype(np.float32)
    return ExitTable(
        table.candidates, table.first, table.right, table.labels, table.truth, table.costs,
        agreed=(np.abs(scores - scores[-1]) < 0.1).astype(np.float32), scores=scores,
        lists=np.repeat(np.arange(lists), length), relevance=relevance,
    )  # fmt: skip


def test_a_table_counts_lists_and_keeps_them_with_fewer_inputs_and_ramps() -> None:
    table = table_of_lists(1, 200)
    places = table.places(np.array([9, 9, 9]))
    (lost,) = table.lost(places, NDCG)
    assert lost.count == 200
    expected = table.ranked.ndcg(table.scores[-1]).mean() - table.ndcg(places).mean()
    assert lost.mean == pytest.approx(expected)
    half = table.of(np.flatnonzero(table.lists < 100))
    assert half.lost(half.places(np.array([9, 9, 9])), NDCG)[0].count == 100
    one = table.only([1], table.costs)
    assert (one.scores == table.scores[[1, 3]]).all()
    assert one.lists is table.lists
    chosen = np.where(np.random.default_rng(0).random(table.num_inputs) < 0.02, 0, 3)
    added = table.losses(NDCG)[chosen, np.arange(table.num_inputs)].mean()
    assert added == pytest.approx(table.lost(chosen, NDCG)[0].mean, abs=0.002)


def test_a_promise_is_broken_no_more_often_than_its_confidence_says() -> None:
    """Promises of agreement are tested in test_exit_table.py: it is counted by document."""
    everything, random = table_of_lists(7, 1000), np.random.default_rng(0)

    def drawn():
        lists = np.split(random.permutation(1000)[:300], [60])
        return tuple(np.flatnonzero(np.isin(everything.lists, part)) for part in lists)

    check_promises(everything, drawn, NDCG, 0.03)


def test_metrics_of_labels_and_of_scores_do_not_mix() -> None:
    scores, labels = table_of_lists(1, 20), exit_table(1)
    evidence = Evidence(scores, scores, NDCG, 0.01, 0.95)
    assert evidence.for_metric("absolute-error").metric == "absolute-error"
    assert evidence.for_metric("agreement").metric == "agreement"
    with pytest.raises(UserError, match="--metric mcc is for networks that give labels"):
        evidence.for_metric("mcc")
    with pytest.raises(UserError, match="--metric absolute-error is for networks that give a score"):
        Evidence(labels, labels, "accuracy", 0.01, 0.95).for_metric("absolute-error")
    with pytest.raises(UserError, match="prepare the network with --queries"):
        Evidence(labels, labels, "accuracy", 0.01, 0.95).for_metric(NDCG)
    faultless = replace(labels, right=np.ones_like(labels.right))
    with pytest.raises(UserError, match="without any, or the full network gives them all: --metric agreement then"):
        Evidence(faultless, faultless, "agreement", 0.01, 0.95).for_metric("accuracy")
