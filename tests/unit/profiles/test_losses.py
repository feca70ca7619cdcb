"""Metrics that count by classes: against scikit-learn, and their standard errors against draws."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import f1_score, matthews_corrcoef

from isobatch.profiles.confidence import shown
from isobatch.profiles.losses import (
    SCORES,
    Labels,
    Metric,
    PooledF1,
    balancing,
    losses_by_class,
    mean_loss,
    picture_iou,
    score_loss,
    scored,
)

Score = pytest.mark.parametrize("metric", ["macro-f1", "mcc"])


def drawn(random: np.random.Generator, count: int, rare: float, classes: int = 2) -> tuple[Labels, Labels, Labels]:
    """Truth, the full network's answers, and those with exits, which err a little more on rare classes."""
    truth = np.where(random.random(count) < rare, random.integers(1, classes, count), 0)
    wrong = random.integers(0, classes, count)
    full = np.where(random.random(count) < 0.88, truth, wrong)
    return truth, full, np.where(random.random(count) < np.where(truth == 0, 0.98, 0.93), full, wrong)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 5), count=st.integers(5, 60))
def test_scores_are_scikit_learns(seed: int, classes: int, count: int) -> None:
    random = np.random.default_rng(seed)
    truth, answers = random.integers(0, classes, count), random.integers(0, classes, count)
    expected = f1_score(truth, answers, labels=np.unique(truth), average="macro", zero_division=0)
    assert scored("macro-f1", truth, answers)[0] == pytest.approx(expected)
    assert scored("mcc", truth, answers)[0] == pytest.approx(matthews_corrcoef(truth, answers))


@given(seed=st.integers(0, 10_000), labels=st.integers(1, 4), pixels=st.integers(1, 12))
def test_the_iou_of_a_picture_is_that_of_its_definition(seed: int, labels: int, pixels: int) -> None:
    random = np.random.default_rng(seed)
    truth, answers = random.integers(-1, labels, (3, pixels)), random.integers(0, labels, (3, pixels))
    for true, answered, result in zip(truth, answers, picture_iou(truth, answers, labels), strict=True):
        ious = []
        for label in set(true.tolist()) - {-1}:
            is_true, is_answered = true == label, (answered == label) & (true >= 0)
            ious.append((is_true & is_answered).sum() / (is_true | is_answered).sum())
        assert result == pytest.approx(np.mean(ious) if ious else 1.0)


@Score
def test_an_influence_is_what_the_score_gains_by_a_little_more_of_such_inputs(metric: Metric) -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(9)).reshape(3, 3)
    score, step = SCORES[metric](shares), 1e-6
    for row in range(3):
        for column in range(3):
            more = (1 - step) * shares
            more[row, column] += step
            gained = (SCORES[metric](more).value - score.value) / step
            assert gained == pytest.approx(score.influence[row, column], abs=1e-4)
    assert float((shares * score.influence).sum()) == pytest.approx(0.0, abs=1e-12)


@Score
@pytest.mark.parametrize("rare", [0.5, 0.1])
def test_the_standard_error_of_a_lost_score_is_that_of_many_draws(metric: Metric, rare: float) -> None:
    random = np.random.default_rng(1)
    lost = [score_loss(metric, *drawn(random, 2000, rare)) for _ in range(400)]
    spread = float(np.std([each.mean for each in lost]))
    estimated = float(np.mean([each.error for each in lost]))
    assert 0.9 * spread < estimated < 1.25 * spread, "a little more, as one loss more is assumed"


@Score
def test_of_two_classes_alike_one_input_weighs_what_it_weighs_in_accuracy_or_twice_that(metric: Metric) -> None:
    truth = np.repeat([0, 1], 500)
    weight = score_loss(metric, truth, truth, truth).weight
    assert weight == pytest.approx(1.0 if metric == "macro-f1" else 2.0, rel=0.11)
    rare = np.repeat([0, 1], [950, 50])
    one_lost = np.where(np.arange(1000) == 999, 0, rare)
    lost = score_loss(metric, rare, rare, one_lost)
    assert lost.mean * 1000 < lost.weight < 1.2 * lost.mean * 1000
    assert lost.counted < 200


@pytest.mark.parametrize(("truth", "full"), [([0] * 1000, [0] * 990 + [1] * 10), ([0] * 990 + [1] * 10, [0] * 1000)])
def test_of_one_class_or_one_answer_mcc_shows_nothing(truth: list[int], full: list[int]) -> None:
    lost = score_loss("mcc", np.array(truth), np.array(full), np.zeros(1000, int))
    assert not shown(lost, 0.05, 0.95, "mcc")


def test_inputs_without_a_label_show_nothing_about_micro_f1() -> None:
    nothing = PooledF1(np.zeros(1000), np.zeros(1000))
    assert not shown(nothing.loss(nothing), 0.05, 0.95, "micro-f1")


def test_losses_by_class_are_those_of_each_class_alone() -> None:
    truth, lost = np.array([0, 0, 2, 2, 2]), np.array([1.0, 0.0, -1.0, 0.0, 0.0])
    assert losses_by_class(lost, truth) == (mean_loss(lost[:2]), mean_loss(lost[2:]))
    weights: NDArray[Any] = balancing(truth)
    assert weights.mean() == pytest.approx(1.0)
    assert weights[:2].sum() == pytest.approx(weights[2:].sum())
