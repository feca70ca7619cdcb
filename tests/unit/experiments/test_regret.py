"""What `make bench-regret` counts: lost goodput, harm by a change, and how soon a burst is answered by another plan."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.controller.corrections import Corrections
from cluster.load.generator import LoadRecord
from experiments.regret import judged
from experiments.regret.bursts import Burst, believed_error, reacted_s, share_of
from experiments.regret.judged import PlayedChange, Replay, is_harm, scaled
from experiments.regret.replay import played
from experiments.regret.suite import HALF, LEAST_EASY, MOST_EASY, mix, question
from optimizer import Placement, Plan, Split

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
def test_no_hour_is_better_than_the_run_and_hindsight_is_the_hardest_measure(
    windows: list[tuple[int, int, int]],
) -> None:
    mine, one, other = (list(each) for each in zip(*windows, strict=True))
    found = replay(mine, one, other)
    assert found.worst_hour >= found.regret - 1e-12  # one hour at most
    assert found.hindsight_share <= 1 - found.regret + 1e-12


def test_the_worst_hour_is_found_wherever_it_begins() -> None:
    full, mine = [100] * MINUTES, [100] * 30 + [40] * 60 + [100] * 30
    found = replay(mine, full)
    assert found.worst_hour == pytest.approx(0.6)
    assert found.regret == pytest.approx(0.3)


def test_the_best_fixed_plan_is_that_of_the_whole_run() -> None:
    found = replay([90, 90], [100, 10], [70, 70])
    assert found.best == 1
    assert found.regret < 0


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


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_only_less_is_harm(arrived: int, mine: float, theirs: float) -> None:
    harm = is_harm(arrived, mine * arrived, theirs * arrived)
    assert not (harm and mine >= 0.98 * theirs)


def test_the_share_of_harm_is_of_the_windows_after_changes() -> None:
    harmed = replay([500] * 10, [1000] * 10, changes=(PlayedChange(0.0, 0),))
    calm = replay([1000] * 10, [1000] * 10, changes=(PlayedChange(0.0, 0),))
    assert judged.figures({"one": harmed, "other": calm, "without": replay([1] * 9, [1] * 9)})["harm_share"] == 0.5


@given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=50), st.floats(1, 1e3), st.sampled_from([0.5, 0.99, 1.0]))
def test_scaled_arrivals_have_the_rate_that_is_asked_for(rates: list[float], wanted: float, quantile: float) -> None:
    factor = scaled(np.array(rates), wanted, quantile)
    assert np.quantile(factor * np.array(rates), quantile) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(3))
def test_the_mix_walks_slowly_and_jumps_and_is_the_same_for_the_same_seed(seed: int) -> None:
    drifting = mix(6 * 3600.0, seed)
    shares = [share for _, share in drifting.shares]
    steps = [abs(after - before) for before, after in pairwise(shares)]
    assert drifting == mix(6 * 3600.0, seed)
    assert all(LEAST_EASY <= share <= MOST_EASY for share in shares)
    assert np.median(steps) < 0.03
    assert max(steps) > 0.1


def test_every_plan_is_remembered_that_the_planner_answers_with() -> None:
    asked = question().in_units_of(question().best(HALF, Corrections(), {}))
    most = asked.best(HALF, Corrections(), {})
    quick = asked.sustaining(1.0, HALF, Corrections(), {})
    assert asked.sustaining(1e9, HALF, Corrections(), {}) is None
    assert asked.considered == [most, quick]


def test_of_plans_that_never_ran_one_of_each_shape_is_played_and_of_those_that_ran_each() -> None:
    def plan(cut: int, batch: int) -> Plan:
        return Plan((Placement("p100", 1, (Split(0, cut, batch, (cut - 1,)), Split(cut, 24, batch))),))

    found = played([plan(4, 8), plan(4, 9)], [plan(4, 9), plan(4, 10), plan(6, 8), plan(6, 12)])
    assert found == (plan(4, 8), plan(4, 9), plan(6, 8))


def record(due_s: list[float], ended_s: list[float], status: list[int]) -> LoadRecord:
    due, ended = np.array(due_s), np.array(ended_s)
    return LoadRecord(due, due, due, ended, np.array(status), due)


def test_a_burst_counts_answers_in_time_and_knows_its_first_refusal() -> None:
    asked = record([0.0, 1.0, 2.0, 4.0], [0.5, 2.5, 2.1, 4.1], [200, 200, 503, 200])
    burst = Burst.of(asked, began_s=1000.0, slo_ms=1000.0, rolled_out_s=[1003.0])
    assert burst.good_per_s == pytest.approx(2 / 4.0)  # the second was late
    assert burst.refused_s == pytest.approx(1002.1)
    assert reacted_s(burst) == pytest.approx(0.9)


def test_who_never_reacts_took_the_whole_burst_at_least() -> None:
    asked = record([0.0, 9.0], [0.1, 9.5], [503, 503])
    assert reacted_s(Burst.of(asked, 0.0, 1000.0)) == pytest.approx(8.9)
    assert reacted_s(Burst.of(record([0.0, 9.0], [0.1, 9.5], [200, 200]), 0.0, 1000.0)) == 0.0


def test_shares_are_of_all_bursts_together() -> None:
    assert share_of([Burst(90.0, None, 0.0), Burst(50.0, None, 0.0)], [Burst(100.0, None, 0.0)] * 2) == 0.7


def test_a_belief_is_as_wrong_as_at_its_worst_block() -> None:
    assert believed_error([1.0, 0.6, 0.3], [1.0, 0.5, 0.28]) == pytest.approx(0.1)
    assert believed_error([], [1.0, 0.5]) == 1.0
