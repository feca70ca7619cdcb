"""Who survives when some ramps are closed: as counted input by input."""

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exits import ExitProfile
from tests.helpers.exit_tables import exit_table


@given(st.integers(0, 50), st.lists(st.integers(0, 29), min_size=4, max_size=4), st.sets(st.integers(0, 3)))
def test_survivors_are_counted_with_only_these_ramps_open(seed: int, chosen: list[int], ramps: set[int]) -> None:
    table, candidates = exit_table(seed, ramps=4, count=60), np.array(chosen)
    exits = Evidence(table, table, "accuracy", 0.01, 0.95).exits(candidates)
    places = table.places(np.where(np.isin(np.arange(4), list(ramps)), candidates, 0))
    counted = [float((places >= block).mean()) for block in range(5)]
    assert exits.survival_with(ramps) == pytest.approx(counted)
    assert exits.survival_with(range(4)) == pytest.approx(exits.survival)
    planned = exits.planning_survival(ramps)
    assert ExitProfile(planned).survival_with(ramps) == pytest.approx(counted), (
        "what it looks like from a plan is exact for it"
    )
    assert all(low <= high + 1e-9 for low, high in zip(planned, counted, strict=True)), "and tells who else would leave"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_without_a_table_a_plan_is_rated_by_the_survival_of_all_ramps(shares: list[float], ramps: set[int]) -> None:
    survival = (1.0, *sorted(shares, reverse=True))
    assert ExitProfile(survival).planning_survival(ramps) == survival, "whichever ramps it opens"


def test_other_inputs_than_those_of_the_table_are_told_by_what_was_counted_of_them() -> None:
    sure = ((0,), 0.5), ((1,), 0.25), ((), 0.25)
    assert ExitProfile((1.0, 0.8, 0.2), sure=sure).survival_with({1}) == pytest.approx((1.0, 1.0, 0.6))


def survivals(blocks: int) -> st.SearchStrategy[tuple[float, ...]]:
    shares = st.lists(st.floats(0.01, 1), min_size=blocks - 1, max_size=blocks - 1)
    return shares.map(lambda each: (1.0, *sorted(each, reverse=True)))


@given(st.integers(0, 50), survivals(5), st.sets(st.integers(0, 3)))
def test_other_inputs_go_on_in_the_same_proportions_behind_closed_ramps(
    seed: int, survival: tuple[float, ...], ramps: set[int]
) -> None:
    exits = Evidence(table := exit_table(seed, 4, 60), table, "accuracy", 0.01, 0.95).exits(np.full(4, 12))
    others = exits.with_survival(survival)
    assert others.survival == survival
    assert others.survival_with(range(4)) == pytest.approx(survival)
    same = exits.with_survival(exits.survival)
    assert same.survival_with(ramps) == pytest.approx(exits.survival_with(ramps))
    assert ExitProfile(exits.survival).with_survival(survival) == ExitProfile(survival)


def test_shares_that_are_rounded_in_a_file_may_be_spread_anew() -> None:
    exits = ExitProfile((1.0, 0.4, 3e-6), (((0,), 0.6), ((1,), 0.399998), ((), 0.0000029)))
    assert exits.with_survival((1.0, 0.9, 0.8)).survival_with({0, 1}) == pytest.approx((1.0, 0.9, 0.8))


@given(st.integers(0, 50), st.sets(st.integers(0, 3)))
def test_counts_with_closed_ramps_show_what_all_open_ramps_would(seed: int, ramps: set[int]) -> None:
    exits = Evidence(table := exit_table(seed, 4, 60), table, "accuracy", 0.01, 0.95).exits(np.full(4, 12))
    count = 1_000_000
    left = [round(count * share) for share in -np.diff([*exits.survival_with(ramps), 0.0])]
    spread = exits.spread(left, ramps)
    assert sum(spread) == sum(left)
    expected = [count * share for share in -np.diff([*exits.survival, 0.0])]
    assert spread == pytest.approx(expected, abs=10), "a rounding for each block"


def test_shares_and_ramps_that_cannot_be_are_refused() -> None:
    no_shares = (((0,), nan), ((), 0.5)), (((0,), -0.5), ((), 1.5))
    for sure in ((((0,), 0.5),), (((2,), 1.0),), *no_shares):
        with pytest.raises(ValueError, match="sure"):
            ExitProfile((1.0, 0.5, 0.2), sure)
