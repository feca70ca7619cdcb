from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.profiles.windows import MOST, PRIOR_INPUTS, SteadySurvival, Window, merge

counts = st.lists(st.integers(0, 10**6) | st.integers(0, MOST // 8), min_size=3, max_size=3).map(tuple)
windows = st.builds(
    Window, st.floats(0, 1e6), st.floats(1, 1e3), st.integers(0, 10**6), counts, unfinished=st.just(()) | counts
)


def window_of(*left: int) -> Window:
    return Window(0.0, 120.0, sum(left), left)


def test_survival_comes_from_who_left_where() -> None:
    assert window_of(5, 0, 3, 2).exits.survival == (1.0, 0.5, 0.5, 0.2)
    assert window_of(240).arrivals_per_s == 2.0


@given(st.lists(windows, min_size=1, max_size=5))
def test_merging_loses_no_input(parts: list[Window]) -> None:
    whole = merge(parts)
    assert whole.answered == sum(part.answered for part in parts)
    assert whole.arrived == sum(part.arrived for part in parts)
    assert whole.start_s == min(part.start_s for part in parts)


def test_windows_of_different_networks_do_not_merge() -> None:
    with pytest.raises(ValueError, match="\\[2, 3\\] blocks"):
        merge([window_of(1, 2), window_of(1, 2, 3)])


@given(windows)
def test_the_interval_holds_what_was_seen_and_stays_in_range(window: Window) -> None:
    low, high = window.interval()
    assert (low >= 0).all()
    assert (high <= 1).all()
    if window.answered and not any(window.unfinished):
        survival = np.asarray(window.exits.survival)
        assert (low <= survival + 1e-9).all()
        assert (survival <= high + 1e-9).all()


@given(st.lists(windows, min_size=1, max_size=8))
def test_steadied_rows_are_survival_curves(series: list[Window]) -> None:
    steady = SteadySurvival(3)
    rows = np.array([steady.add(window) for window in series])
    assert (np.diff(rows, axis=1) <= 1e-12).all()
    np.testing.assert_allclose(rows[:, 0], 1)
    assert (rows > 0).all()


def test_an_unfinished_input_where_none_came_for_long_leaves_a_survival_curve() -> None:
    steady = SteadySurvival(3)
    for _ in range(200):
        steady.add(window_of(1000, 0, 0))
    row = steady.add(Window(0.0, 120.0, 1000, (999, 0, 0), unfinished=(0, 1, 0)))
    assert row[1] == pytest.approx(0.001, rel=0.1)
    assert 0 < row[2] <= row[1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=40))
def test_an_input_that_ended_before_it_left_counts_up_to_where_it_stood(inputs: list[tuple[int, int]]) -> None:
    """Of each input the block after which it would leave, and the block before which it would be given up."""
    left, unfinished = [0] * 4, [0] * 4
    for leaves, given_up in inputs:
        if leaves < given_up:
            left[leaves] += 1
        else:
            unfinished[given_up] += 1
    window, share = Window(0.0, 120.0, len(inputs), tuple(left), unfinished=tuple(unfinished)), 1.0
    for cut in range(1, 4):  # by Kaplan and Meier
        tested = [leaves for leaves, given_up in inputs if leaves >= cut - 1 and given_up >= cut]
        if not tested:
            break
        share *= sum(leaves >= cut for leaves in tested) / len(tested)
        assert window.entered[cut] == pytest.approx(share * window.known[cut])
        assert window.exits.survival[cut] == pytest.approx(share)
    low, high = window.interval()
    assert (low <= high).all()
    assert (np.diff(window.known) <= 1e-9).all(), "less is known of later blocks"


def test_the_weight_of_a_window_is_n_over_n_plus_prior() -> None:
    before = window_of(5000, 5000)

    def moved(inputs: int) -> float:
        steady = SteadySurvival(2)
        first, second = (steady.add(window)[1] for window in (before, window_of(0, inputs)))
        return float((second - first) / (1 - first))

    for inputs in (0, 1, 20, 5000):
        assert moved(inputs) == pytest.approx(inputs / (inputs + PRIOR_INPUTS))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"duration_s": 0.0}, "duration_s = 0.0"),
        ({"start_s": inf}, "start_s = inf"),
        ({"duration_s": nan}, "duration_s = nan"),
        ({"arrived": -1}, "arrived = -1"),
        ({"arrived": inf}, "arrived = inf"),
        ({"left": (2**53, 0)}, "left\\[0\\] = 9007199254740992 must be 0 or more, and less"),
        ({"left": ()}, "one count per block"),
        ({"left": (3, -2)}, "left\\[1\\] = -2"),
        ({"unfinished": (3, -2)}, "unfinished\\[1\\] = -2"),
        ({"unfinished": (3,)}, "unfinished as many or none"),
        ({"full": -1}, "full = -1"),
    ],
)
def test_a_window_that_cannot_be_is_refused(fields: dict[str, object], says: str) -> None:
    whole = {"start_s": 0.0, "duration_s": 120.0, "arrived": 1, "left": (1, 0)}
    with pytest.raises(ValueError, match=says):
        Window(**(whole | fields))
