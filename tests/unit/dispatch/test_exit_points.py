"""Inputs leave a launch at its exit points, which determine their expected times and the measured speed of devices."""

from collections.abc import Callable, Sequence

import pytest

from isobatch.deployments.dispatch.admission import soonest
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.lanes import Lane
from isobatch.deployments.dispatch.messages import Limits, Outcome, Place
from isobatch.deployments.dispatch.route import ExitPoint, Route, Stage

RAMP_S, END_S, MEAN_S = 0.001, 0.010, 0.0046  # of a launch until its ramp behind block 0, until its end, in the mean
GOES_ON = 0.4


def early_exit(group: str = "a", batch: int = 1) -> Stage:
    """A launch of any size takes equally long; some of its inputs leave at once, the others at its end."""
    exits = ExitPoint(0, (RAMP_S,) * batch, GOES_ON), ExitPoint(3, (END_S,) * batch)
    return Stage(0, 4, batch, group, (MEAN_S,) * batch, ramps=frozenset({0}), exits=exits)


def run_one(dispatcher: Dispatcher, at_s: float, *, to_end: bool, slower: float = 1.0) -> str:
    """A launch of one input, which leaves at the ramp or at the end; returns the replica that ran it."""
    dispatcher.admit(at_s, at_s + 9.0, Place("x", 0))
    (launch,) = dispatcher.tick(at_s)
    ends_s = at_s + slower * (END_S if to_end else RAMP_S)
    dispatcher.released(launch.id, ends_s, [0], [3 if to_end else 0])
    dispatcher.completed(launch.id, ends_s, {})
    return launch.replica


def lane_of(dispatcher: Dispatcher) -> Lane:
    (lane,) = dispatcher._lanes
    return lane


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_how_fast_a_device_is_does_not_depend_on_where_its_inputs_leave(slower: float) -> None:
    dispatcher = Dispatcher(Route((early_exit(),)), {"a": ["a0"]})
    for number in range(40):
        run_one(dispatcher, float(number), to_end=number % 10 == 0, slower=slower)
        assert lane_of(dispatcher).groups[0].slowdown == pytest.approx(slower)


def test_a_replica_whose_inputs_all_go_to_the_end_is_not_benched() -> None:
    dispatcher = Dispatcher(Route((early_exit(),)), {"a": ["a0", "a1", "a2"]})
    for number in range(60):
        to_end = number % 3 == 0
        assert (run_one(dispatcher, float(number), to_end=to_end) == "a0") == to_end
    assert lane_of(dispatcher).groups[0].working == 3


def test_a_launch_with_survivors_ran_to_the_block_before_which_they_stand() -> None:
    first, second = early_exit(batch=2), Stage(4, 8, 1, "b", (0.005,), survival=0.1)
    dispatcher = Dispatcher(Route((first, second)), {"a": ["a0"], "b": ["b0"]})
    for number in range(10):
        dispatcher.admit_all(float(number), number + 9.0, [Place("x", row) for row in range(2)])
        (launch,) = dispatcher.tick(float(number))
        dispatcher.released(launch.id, number + RAMP_S, [1], [0])
        dispatcher.completed(launch.id, number + END_S, {0: Place("y", 0)})
        (launch,) = dispatcher.tick(number + END_S)
        dispatcher.completed(launch.id, number + END_S + 0.005, {})
    assert [group.slowdown for group in lane_of(dispatcher).groups] == [pytest.approx(1.0)] * 2


@pytest.mark.parametrize(("left_s", "late"), [(0.0005, 1.0), (0.002, GOES_ON), (0.011, 0.0)])
def test_with_time_for_the_ramp_only_the_risk_is_the_share_that_goes_on(left_s: float, late: float) -> None:
    dispatcher = Dispatcher(Route((early_exit(),)), {"a": ["a0"]}, Limits(slack=0.0))
    expected = soonest([lane_of(dispatcher)], 0.0)[1]
    assert expected.late(left_s) == pytest.approx(late)
    assert expected.mean_s == pytest.approx((1 - GOES_ON) * RAMP_S + GOES_ON * END_S)


def test_the_learned_delay_is_that_of_the_exit_not_of_the_launch_s_end() -> None:
    dispatcher = Dispatcher(Route((early_exit(batch=2),)), {"a": ["a0"]})
    for at_s in range(200):
        dispatcher.admit_all(float(at_s), at_s + 9.0, [Place("x", 0), Place("x", 1)])
        (launch,) = dispatcher.tick(float(at_s))
        dispatcher.released(launch.id, at_s + RAMP_S, [0], [0])
        dispatcher.released(launch.id, at_s + END_S, [1], [3])
        dispatcher.completed(launch.id, at_s + END_S, {})
    estimates = lane_of(dispatcher).estimates
    assert estimates.delay == pytest.approx([0.0, 0.0], abs=1e-6)
    assert max(estimates.spread) < 0.02


def test_a_lane_with_late_last_answers_is_not_soonest_because_of_early_ones() -> None:
    """Half leave it after 1 ms and half after 9, those of the other lane after 6."""
    exits = ExitPoint(0, (0.001,), 0.5), ExitPoint(3, (0.009,))
    uneven = Route((Stage(0, 4, 1, "a", (0.005,), ramps=frozenset({0}), exits=exits),))
    even = Route((Stage(0, 4, 1, "b", (0.006,)),))
    first, second = Dispatcher(
        Route(uneven.stages, beside=(even,)), {"a": ["a0"], "b": ["b0"]}, Limits(slack=0.0)
    )._lanes
    lane, expected = soonest([first, second], 0.0)
    assert lane is second
    assert soonest([first], 0.0)[1].mean_s < expected.mean_s


def test_an_admitted_input_is_launched_while_it_may_leave_in_time() -> None:
    exits = ExitPoint(0, (0.010,), 0.1), ExitPoint(3, (0.100,))
    stage = Stage(0, 4, 1, "a", (0.100,), ramps=frozenset({0}), exits=exits)
    dispatcher = Dispatcher(Route((stage,)), {"a": ["a0"]})
    ticket = dispatcher.admit(0.0, 0.050, Place("x", 0))
    (launch,) = dispatcher.tick(0.0)
    assert launch.tickets == (ticket,)
    dispatcher.released(launch.id, 0.010, [0], [0])
    (ending,) = dispatcher.endings()
    assert ending.outcome is Outcome.ANSWERED


@pytest.mark.parametrize(("order", "going"), [(None, (0, 4)), (lambda waiting, room: waiting[-room:], (4, 5))])
def test_late_inputs_behind_one_in_time_end_before_a_launch(
    order: Callable[[Sequence[Ticket], int], list[Ticket]] | None, going: tuple[int, ...]
) -> None:
    """With 8 ms left, an input that may leave at the ramp is in time, and one that runs to the end is not."""
    dispatcher = Dispatcher(Route((early_exit(batch=2),)), {"a": ["a0"]}, Limits(queue_order=order))
    for full in (False, True, True, True, False):
        dispatcher.admit(0.0, 1.0, Place("x", 0), full=full)
    dispatcher.admit(0.0, 1.003, Place("x", 0), full=True)
    (launch,) = dispatcher.tick(0.992)
    assert tuple(ticket.id for ticket in launch.tickets) == going
    (ending,) = dispatcher.endings()
    assert (ending.outcome, [ticket.id for ticket in ending.tickets]) == (Outcome.EXPIRED, [1, 2, 3])


def test_what_late_inputs_leave_of_a_full_batch_waits_for_an_idle_replica() -> None:
    dispatcher = Dispatcher(Route((early_exit(batch=2),)), {"a": ["a0"]})
    for _ in range(2):
        dispatcher.admit(0.0, 9.0, Place("x", 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.admit(0.001, 0.040, Place("x", 0), full=True)
    dispatcher.admit(0.001, 9.0, Place("x", 0))
    assert dispatcher.tick(0.035) == [], "the replica is busy, and one input is left"
    (ending,) = dispatcher.endings()
    assert [ticket.id for ticket in ending.tickets] == [2]
    dispatcher.released(launch.id, 0.036, [0, 1], [3, 3])
    dispatcher.completed(launch.id, 0.036, {})
    (rest,) = dispatcher.tick(0.036)
    assert [ticket.id for ticket in rest.tickets] == [3]
