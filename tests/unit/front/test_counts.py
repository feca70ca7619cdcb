"""What a front counts, and what is new of it."""

from deployments.front.counts import Counts, together
from deployments.front.observed import LaunchShape, Took, since


def test_what_is_counted_is_told() -> None:
    times = iter([100.0, 103.0])
    counts = Counts({"r1": "v100"}, lambda: next(times))
    counts.inputs_arrived(3, 3)
    counts.input_left(block=0, took_s=0.1, in_time=True)
    counts.input_left(block=2, took_s=0.9, in_time=False)
    counts.launch_ended("r1", 0, 2, 8, 0.05)
    seen = counts.observed(3)
    assert (seen.started_s, seen.seconds, seen.arrivals, seen.in_time, seen.exits) == (100.0, 3.0, 3, 1, (1, 0, 1))
    assert seen.launches == {LaunchShape("v100", 0, 2, 8): Took(1, 0.05)}
    assert sum(seen.latencies.values()) == 2


def test_asking_twice_tells_what_is_new_and_takes_nothing_from_others() -> None:
    times = iter([0.0, 5.0, 9.0])
    counts = Counts({"r1": "v100", "r2": "k80"}, lambda: next(times))
    counts.launch_ended("r1", 0, 2, 8, 0.05)
    first = counts.observed(2)
    counts.launch_ended("r2", 0, 2, 8, 0.1)
    counts.input_left(1, 0.1, in_time=True)
    news = since(counts.observed(2), first)
    assert counts.observations == together([counts]).observations == 2
    assert (news.started_s, news.seconds, news.exits) == (5.0, 4.0, (0, 1))
    assert news.launches == {LaunchShape("k80", 0, 2, 8): Took(1, 0.1)}
    assert first.launches == {LaunchShape("v100", 0, 2, 8): Took(1, 0.05)}


def test_who_is_refused_unread_has_no_more_inputs_than_a_request_may_have() -> None:
    """Ten inputs of a weight of 30 each came before; then one says that it weighs 1,000 times as much."""
    counts = Counts({}, lambda: 0.0)
    counts.inputs_arrived(10, 300)
    counts.refused_unread(weight=60, most=32)
    assert (counts.arrivals, counts.arrived_weight) == (12, 360)
    counts.refused_unread(weight=30_000, most=32)
    assert (counts.arrivals, counts.arrived_weight) == (12 + 32, 360 + 32 * 30)


def test_who_asks_for_the_whole_network_is_no_survivor_of_the_others_and_arrives_even_if_refused_unread() -> None:
    counts = Counts({}, lambda: 0.0)
    counts.inputs_arrived(3, 30)
    counts.inputs_arrived(1, 10, full=True)
    counts.refused_unread(weight=10, most=32, full=True)
    for block, full in ((0, False), (2, False), (2, True)):
        counts.input_left(block, 0.1, in_time=True, weight=10, full=full)
    counts.input_unfinished(1, weight=10)
    seen = counts.observed(3)
    assert (seen.arrivals, seen.full, seen.full_weight, seen.in_time) == (5, 2, 20, 3)
    assert (seen.exits, seen.exit_weights) == ((1, 0, 1), (10, 0, 10))
    assert (seen.unfinished, seen.unfinished_weights) == ((0, 1, 0), (0, 10, 0))
    assert counts.exits == {0: 1, 2: 2}, "of all answers"
    assert seen.counted_in(10).full == 2
