"""What `make bench-regret` counts: lost goodput, harm by a change, and how soon a burst is answered by another plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.regret.judged import PlayedChange, Replay

MINUTES = 120
COUNTS = st.lists(st.integers(0, 1000), min_size=3, max_size=40)


def replay(controlled: list[int], *staying: list[int], changes: tuple[PlayedChange, ...] = ()) -> Replay:
    arrived = np.maximum(np.max(staying, axis=0), controlled)
    return Replay(60.0, arrived, np.array(controlled), np.array(staying), changes)


@given(COUNTS)
def test_nothing_is_lost_against_itself(good: list[int]) -> None:
    found = replay(good, good, changes=(PlayedChange(0.0, 0),))
    assert (found.regret, found.worst_hour, found.hindsight_share, found.harmed) == (0.0, 0.0, 1.0, ())


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=2, max_size=40))
def test_no_hour_beats_the_run_and_hindsight_is_hardest(windows: list[tuple[int, int, int]]) -> None:
    mine, one, other = (list(each) for each in zip(*windows, strict=True))
    found = replay(mine, one, other)
    assert found.worst_hour >= found.regret - 1e-12  # one hour at most
    assert found.hindsight_share <= 1 - found.regret + 1e-12


def test_the_worst_hour_is_found_wherever_it_begins() -> None:
    full, mine = [100] * MINUTES, [100] * 30 + [40] * 60 + [100] * 30
    found = replay(mine, full)
    assert found.worst_hour == pytest.approx(0.6)
    assert found.regret == pytest.approx(0.3)


def test_a_change_is_blamed_until_the_next_one_and_no_longer_than_it_is_held() -> None:
    changes = (PlayedChange(60.0, before=0), PlayedChange(300.0, before=1))
    found = replay([100] * MINUTES, [100] * MINUTES, [100] * MINUTES, changes=changes)
    assert {window: found.judged[window] for window in (1, 4, 5, 34)} == {1: 0, 4: 0, 5: 1, 34: 1}
    assert 0 not in found.judged
    assert 35 not in found.judged


def test_harm_is_what_the_plan_before_would_have_answered_of_the_same_inputs() -> None:
    before, after = [1000] * 10, [1000] * 4 + [700] * 6
    assert replay(after, before, changes=(PlayedChange(240.0, 0),)).harmed == (4, 5, 6, 7, 8, 9)
    assert replay(after, before).harmed == ()
