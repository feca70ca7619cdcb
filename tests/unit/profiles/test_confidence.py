"""What so many inputs can show: against the sum over all outcomes, and against simple cases that have a formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, multinomial

from isobatch.profiles.confidence import bound, least_promise, margin_of, rows_needed
from isobatch.profiles.losses import Loss, Metric


def passing(count: int, losing: float, winning: float, max_loss: float, margin: float) -> float:
    """How often the test is passed: over every number of inputs that lose, and of those that win."""
    lost, won = (grid.ravel() for grid in np.meshgrid(np.arange(count + 1), np.arange(count + 1)))
    possible = lost + won <= count
    lost, won = lost[possible], won[possible]
    passed = Loss((lost - won) / count, (lost + won) / count, count).within(max_loss, margin)
    outcomes = np.stack((lost, won, count - lost - won), axis=1)[passed]
    return float(multinomial.pmf(outcomes, count, [losing, winning, max(1 - losing - winning, 0.0)]).sum())


@settings(max_examples=40)
@given(
    count=st.integers(10, 60),
    max_loss=st.floats(0.02, 0.4),
    confidence=st.sampled_from([0.8, 0.95, 0.99]),
    worse=st.floats(0.0, 0.2),
    winning=st.floats(0.0, 0.3),
)
def test_too_much_loss_passes_no_more_often_than_the_confidence_says(
    count: int, max_loss: float, confidence: float, worse: float, winning: float
) -> None:
    losing = min(max_loss + worse + winning, 1 - winning)
    margin = margin_of(count, max_loss, confidence, "accuracy")
    assert passing(count, losing, winning, max_loss, margin) <= 1 - confidence + 1e-3
    alone = margin_of(count, max_loss, confidence, "agreement")
    assert passing(count, min(max_loss + worse, 1.0), 0.0, max_loss, alone) <= 1 - confidence + 1e-6


@pytest.mark.parametrize("metric", ["accuracy", "agreement"])
@pytest.mark.parametrize(("max_loss", "confidence"), [(0.01, 0.95), (0.05, 0.9), (0.002, 0.99), (0.3, 0.95)])
def test_the_needed_inputs_are_enough_and_one_fewer_not(metric: Metric, max_loss: float, confidence: float) -> None:
    def shows(count: int) -> bool:
        return bool(Loss(0.0, 0.0, count).within(max_loss, margin_of(count, max_loss, confidence, metric)))

    needed = rows_needed(max_loss, confidence)
    assert shows(needed)
    assert not shows(needed - 1)
    assert least_promise(needed, confidence) <= max_loss < least_promise(needed - 1, confidence)


def test_agreement_is_tested_as_a_binomial_share() -> None:
    for count in (299, 1000, 4000):
        margin = margin_of(count, 0.01, 0.95, "agreement")
        passed = [bool(Loss(k / count, k / count, count).within(0.01, margin)) for k in range(count // 50)]
        assert sum(passed) == sum(binom.cdf(k, count, 0.01) <= 0.05 for k in range(count // 50))


@pytest.mark.parametrize("metric", ["accuracy", "agreement"])
def test_a_bound_is_the_least_loss_that_passes(metric: Metric) -> None:
    loss = Loss(0.004, 0.006 if metric == "accuracy" else 0.004, 2000)
    most = bound(loss, 0.95, metric)
    assert loss.within(most + 1e-4, margin_of(2000, most + 1e-4, 0.95, metric))
    assert not loss.within(most - 3e-4, margin_of(2000, most - 3e-4, 0.95, metric))
    assert bound(loss, 0.99, metric) > most > loss.mean


def test_nothing_lost_at_all_can_hardly_be_promised() -> None:
    assert not Loss(0.0, 0.0, 100_000).within(0.0, margin_of(100_000, 0.0, 0.95, "accuracy"))
    assert Loss(-0.2, 0.3, 1000).within(0.0, margin_of(1000, 0.0, 0.95, "accuracy")), "exits that are better"


@pytest.mark.parametrize(
    "losses",
    [
        {1 / 20: 0.2},
        {1 / 5: 0.05},
        {0.5: 0.02},
        {1.0: 0.02, -0.05: 0.2},
        {0.5: 0.03, -1.0: 0.005},
        {0.1: 0.3, -0.1: 0.2},
    ],
    ids=str,
)
def test_texts_that_lose_shares_of_their_words_pass_no_more_often_than_whole_inputs(losses: dict[float, float]) -> None:
    """What a text loses, with its chance; on average 1 %, which may be shown to be less in one case of twenty."""
    count, draws = 600, 3000
    values, chances = np.array([0.0, *losses]), np.array([1 - sum(losses.values()), *losses.values()])
    assert values @ chances == pytest.approx(0.01)
    drawn = np.random.default_rng(0).multinomial(count, chances, draws)
    lost = Loss(drawn @ values / count, drawn @ values**2 / count, count)
    passed = lost.within(0.01, margin_of(count, 0.01, 0.95, "accuracy")).mean()
    assert passed <= 0.05 + 3 * (0.05 * 0.95 / draws) ** 0.5
