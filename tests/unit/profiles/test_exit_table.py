"""Thresholds found on a table: against brute force, and what is promised of them against all inputs there are."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import MULTIPLIERS, ladder, outcome
from isobatch.profiles.losses import Labels, Metric
from tests.helpers.exit_tables import CANDIDATES, check_promises, exit_table


@pytest.mark.parametrize("metric", ["accuracy", "agreement"])
def test_the_ladder_comes_close_to_brute_force(metric: Metric) -> None:
    gaps = []
    for seed in range(6):
        table = exit_table(seed, ramps=2, count=1000)
        result, every = (
            [outcome(table, np.array(chosen), metric) for chosen in some]
            for some in (ladder(table, metric), product(range(CANDIDATES), repeat=2))
        )
        for max_loss in (0.02, 0.05):
            ours, least = (min(o.cost for o in some if o.lost.mean <= max_loss) for some in (result, every))
            gaps.append(ours - least)
    assert min(gaps) >= -1e-12
    assert float(np.mean(gaps)) < 0.01
    assert max(gaps) < 0.05


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), ramps=st.integers(1, 6), metric=st.sampled_from(["accuracy", "agreement"]))
def test_the_ladder_leads_from_nobody_to_as_early_as_possible(seed: int, ramps: int, metric: Metric) -> None:
    table = exit_table(seed, ramps, count=100)
    rungs = ladder(table, metric)
    assert outcome(table, rungs[0], metric).cost == 1.0
    outcomes = [outcome(table, chosen, metric) for chosen in rungs]
    assert outcomes[-1].cost < 1.0
    worth = [each.cost + MULTIPLIERS[-1] * each.lost.mean for each in outcomes]
    assert worth[-1] <= min(worth) + 1e-9, "what leaves earlier still loses more than it saves"
    steps = [int(np.abs(later - before).max()) for before, later in pairwise(rungs)]
    assert all(step == 1 for step in steps)


def test_outcome_counts_who_leaves_where_as_the_definition_says() -> None:
    table, chosen = exit_table(3), np.array([12, 15, 18])
    leaves = table.first <= chosen[:, None]
    expected = [next((ramp for ramp in range(3) if leaves[ramp, one]), 3) for one in range(table.num_inputs)]
    result = outcome(table, chosen, "agreement")
    assert result.places.tolist() == expected
    assert result.lost.mean == pytest.approx(np.mean([not table.agrees[p, i] for i, p in enumerate(expected)]))


@pytest.mark.parametrize(
    ("metric", "rare", "max_loss"),
    [
        ("accuracy", 0.5, 0.03),
        ("agreement", 0.5, 0.03),
        ("worst-class", 0.15, 0.1),
        ("macro-f1", 0.15, 0.05),
        ("mcc", 0.15, 0.1),
    ],
)
def test_a_promise_is_broken_as_rarely_as_its_confidence_says(metric: Metric, rare: float, max_loss: float) -> None:
    everything, random = exit_table(7, ramps=2, count=8_000, rare=rare), np.random.default_rng(0)
    of_class = [np.flatnonzero(everything.truth == label) for label in (0, 1)]
    counts = [round(800 * (1 - rare)), round(800 * rare)]

    def drawn():
        parts = [random.permutation(rows)[:count] for rows, count in zip(of_class, counts, strict=True)]
        quarters = [np.split(rows, [len(rows) // 4]) for rows in parts]
        return tuple(map(np.concatenate, zip(*quarters, strict=True)))

    check_promises(everything, drawn, metric, max_loss)


def test_too_few_inputs_let_nobody_leave() -> None:
    table, few = exit_table(1), exit_table(2, count=40)
    chosen = Evidence(table, few, "accuracy", 0.01, 0.95).prepared
    assert outcome(table, chosen, "accuracy").cost == 1.0


def test_one_class_that_is_rare_cannot_pay_for_the_others() -> None:
    """Accuracy hardly sees what a class of 3 % loses; the loss of its recall is what is promised instead."""
    shape, test = (exit_table(seed, count=6000, rare=0.03) for seed in (1, 2))
    spoiled = [replace(each, labels=_never(each.labels)) for each in (shape, test)]
    spoiled = [replace(each, right=(each.labels == each.truth).astype(np.float32)) for each in spoiled]
    lost = {}
    for metric in ("accuracy", "worst-class", "macro-f1", "mcc"):
        chosen = Evidence(*spoiled, metric, 0.05, 0.95).prepared
        lost[metric] = outcome(spoiled[1], chosen, "worst-class").lost.mean
    assert lost["accuracy"] > 0.5
    assert lost["worst-class"] < 0.05
    assert max(lost["macro-f1"], lost["mcc"]) < 0.25, "5 % of the mean of two F1 are 10 % of one"


def _never(labels: Labels) -> Labels:
    """Ramps that never answer the rare class."""
    changed = np.array(labels)
    changed[:-1] = 0
    return changed
