"""A batch that is not full is sent shortly before its replica is expected to be free."""

import pytest

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Launch, Limits, Outcome, Place
from isobatch.deployments.dispatch.route import Route, Stage
from tests.helpers.dispatcher_world import numbers

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


def test_a_waiting_batch_is_sent_early_at_the_announced_time() -> None:
    dispatcher, _ = busy()
    dispatcher.admit(0.005, 1.0, Place("third", 0))
    assert not dispatcher.tick(0.005)
    wake_s = dispatcher.wake_s
    assert wake_s == pytest.approx(PASS_S - EARLY_S)
    assert [numbers(launch) for launch in dispatcher.tick(wake_s)] == [(1, 2)]


def test_an_input_that_arrives_in_the_early_interval_is_sent_at_once() -> None:
    dispatcher, launch = busy()
    (waiting,) = dispatcher._lanes[0].entry._tickets
    dispatcher.abandon(waiting)
    assert [each.outcome for each in dispatcher.endings()] == [Outcome.ABANDONED]
    assert not dispatcher.tick(0.009)
    dispatcher.admit(0.009, 1.0, Place("third", 0))
    assert [numbers(early) for early in dispatcher.tick(0.009)] == [(2,)]
    dispatcher.completed(launch.id, 0.010, {})
    dispatcher.admit(0.010, 1.0, Place("fourth", 0))
    assert not dispatcher.tick(0.010), "one waits there, or runs by now: the next is not early any more"


def test_no_batch_is_sent_early_to_a_replica_that_is_overdue() -> None:
    dispatcher, launch = busy()
    assert not dispatcher.tick(0.013)
    assert dispatcher.wake_s == 1.0, "no sooner than the deadline: nothing is expected of it any more"
    dispatcher.completed(launch.id, 0.014, {})
    assert [numbers(late) for late in dispatcher.tick(0.014)] == [(1,)]


def test_without_a_message_delay_no_batch_is_sent_early() -> None:
    dispatcher, _ = busy(early_s=0.0)
    assert not dispatcher.tick(0.0099)
    assert dispatcher.wake_s == 1.0


@pytest.mark.parametrize(("newcomers", "goes_early"), [(1, True), (2, False)])
def test_no_batch_is_sent_early_where_it_could_be_filled(newcomers: int, goes_early: bool) -> None:
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
