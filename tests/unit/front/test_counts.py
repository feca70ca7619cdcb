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
    counts.refused_unread(weight=60, most=32, waits=True)
    assert (counts.arrivals, counts.arrived_weight) == (12, 360)
    counts.refused_unread(weight=30_000, most=32, waits=True)
    assert (counts.arrivals, counts.arrived_weight) == (12 + 32, 360 + 32 * 30)


def test_only_clients_who_wait_for_as_long_as_the_slo_tell_of_overload_when_they_are_refused() -> None:
    counts = Counts({}, lambda: 0.0)
    counts.inputs_arrived(10, 10)
    counts.refused_unread(weight=1, most=32, waits=False)
    assert counts.observed(1).refused == 0
    counts.refused_unread(weight=1, most=32, waits=True)
    assert (counts.observed(1).refused, counts.observed(1).arrivals) == (1, 12)


def test_what_a_proxy_refuses_came_like_what_it_let_through() -> None:
    """Each request has had three inputs so far."""
    counts = Counts({}, lambda: 0.0)
    counts.inputs_arrived(30, 300)
    for _ in range(10):
        counts.request_ended("answered")
    counts.refused_outside(20)
    seen = counts.observed(1)
    assert (seen.arrivals, seen.refused, seen.arrived_weight, seen.refused_weight) == (90, 60, 900, 600)
    assert counts.outcomes["refused"] == 20
