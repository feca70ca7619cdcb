"""A launch that is not full sets out a little before a replica is expected to be free, and waits there for nothing."""

import pytest

from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.messages import Launch, Limits, Place
from deployments.dispatch.route import Route, Stage

PASS_S, EARLY_S = 0.010, 0.002
ROUTE = Route((Stage(0, 4, 8, "gpu", (PASS_S,) * 8),))


def busy(early_s: float = EARLY_S) -> tuple[Dispatcher, Launch]:
    """One replica, which has run a launch since 0, and another input, which waits since then."""
    dispatcher = Dispatcher(ROUTE, {"gpu": ["g"]}, Limits(early_s=early_s))
    dispatcher.admit(0.0, 1.0, Place("first", 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.admit(0.0, 1.0, Place("second", 0))
    assert not dispatcher.tick(0.0)
    return dispatcher, launch


def test_what_waits_sets_out_early_and_says_when() -> None:
    dispatcher, _ = busy()
    dispatcher.admit(0.005, 1.0, Place("third", 0))
    assert not dispatcher.tick(0.005)
    wake_s = dispatcher.wake_s
    assert wake_s == pytest.approx(PASS_S - EARLY_S)
    assert [launch.tickets for launch in dispatcher.tick(wake_s)] == [(1, 2)]


def test_whoever_comes_in_that_moment_sets_out_at_once() -> None:
    dispatcher, launch = busy()
    dispatcher.abandon(1)
    assert not dispatcher.tick(0.009)
    dispatcher.admit(0.009, 1.0, Place("third", 0))
    assert [early.tickets for early in dispatcher.tick(0.009)] == [(2,)]
    dispatcher.completed(launch.id, 0.010, {})
    dispatcher.admit(0.010, 1.0, Place("fourth", 0))
    assert not dispatcher.tick(0.010), "one waits there, or runs by now: the next is not early any more"


def test_a_replica_that_takes_longer_than_expected_is_not_waited_for_early() -> None:
    dispatcher, launch = busy()
    assert not dispatcher.tick(0.013)
    assert dispatcher.wake_s == 1.0, "no sooner than the deadline: nothing is expected of it any more"
    dispatcher.completed(launch.id, 0.014, {})
    assert [late.tickets for late in dispatcher.tick(0.014)] == [(1,)]


def test_where_news_takes_no_time_nothing_is_early() -> None:
    dispatcher, _ = busy(early_s=0.0)
    assert not dispatcher.tick(0.0099)
    assert dispatcher.wake_s == 1.0


@pytest.mark.parametrize(("newcomers", "goes_early"), [(1, True), (2, False)])
def test_where_a_batch_could_be_filled_nothing_is_early(newcomers: int, goes_early: bool) -> None:
    """The launch under way may fill the one that waits deeper inside."""
    route = Route((Stage(0, 2, 4, "gpu", (PASS_S,) * 4), Stage(2, 4, 4, "gpu", (PASS_S,) * 4)))
    dispatcher = Dispatcher(route, {"gpu": ["g"]}, Limits(early_s=EARLY_S))

    def admit(count: int, now_s: float) -> None:
        for _ in range(count):
            dispatcher.admit(now_s, 1.0, Place("one", 0))

    admit(3, 0.0)
    (first,) = dispatcher.tick(0.0)
    admit(3, 0.001)
    dispatcher.completed(first.id, PASS_S, {row: Place("survivors", row) for row in range(2)})
    (second,) = dispatcher.tick(PASS_S)
    assert second.cursor == 0, "three of four wait there, and two deeper inside"
    admit(newcomers, PASS_S)
    early = dispatcher.tick(2 * PASS_S - EARLY_S)
    assert bool(early) == goes_early
