"""The queue before decoding: one request after the other, and only those that can be in time."""

import asyncio

import pytest

from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.load import LONGEST_RETRY_S, SLICE_S, RequestQueue, RetryTimes, Trend
from isobatch.deployments.front.proxy import EVERY_S, MOST, Burden, Limit
from tests.helpers.clock import Clock


async def test_a_turn_of_the_event_loop_lets_in_a_slice_of_work_and_others_run_between() -> None:
    queue = RequestQueue(Clock(100.0))
    turns: list[int] = []
    turn = 0

    async def one() -> None:
        await queue.turn(0.6 * SLICE_S, 200.0)
        turns.append(turn)

    asking = [asyncio.create_task(one()) for _ in range(10)]
    while not all(task.done() for task in asking):
        turn += 1
        await asyncio.sleep(0)
    assert max(turns.count(each) for each in turns) == 2, "what is begun within the slice is let in whole"
    assert turns == sorted(turns)


async def test_a_request_that_cannot_be_in_time_behind_others_is_refused_at_once() -> None:
    queue = RequestQueue(clock := Clock(100.0))
    waiting = [asyncio.create_task(queue.turn(SLICE_S, 200.0)) for _ in range(11)]
    await asyncio.sleep(0)
    queue.check(SLICE_S, clock.now_s + 12 * SLICE_S)
    with pytest.raises(RefusedError) as refused:
        queue.check(SLICE_S, clock.now_s + 10 * SLICE_S)
    assert refused.value.status == 503
    with pytest.raises(RefusedError):  # the largest is refused first: it takes longer itself
        queue.check(5 * SLICE_S, clock.now_s + 12 * SLICE_S)
    await asyncio.gather(*waiting)
    queue.check(SLICE_S, clock.now_s + 2 * SLICE_S)


async def test_a_request_that_waited_too_long_is_refused_at_its_turn_and_a_cancelled_one_takes_none() -> None:
    queue = RequestQueue(clock := Clock(100.0))
    tasks = [asyncio.create_task(queue.turn(2 * SLICE_S, clock.now_s + 1.0)) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    clock.now_s += 2.0
    first, gone, *late = await asyncio.gather(*tasks, return_exceptions=True)
    assert first is None
    assert isinstance(gone, asyncio.CancelledError)
    assert all(isinstance(each, RefusedError) and each.status == 503 for each in late)
    assert queue.weight == 0
    assert queue.expected_s(0.0) == 0.0


async def test_an_event_loop_that_hung_once_does_not_refuse_later_requests() -> None:
    queue = RequestQueue(clock := Clock(100.0))
    waiting = [asyncio.create_task(queue.turn(SLICE_S, 200.0)) for _ in range(3)]
    await asyncio.sleep(0)
    clock.now_s += 2.0  # it hangs
    await asyncio.gather(*waiting)
    with pytest.raises(RefusedError):
        queue.check(SLICE_S, clock.now_s + 0.1)
    for _ in range(100):  # requests that come one by one do not wait
        await queue.turn(SLICE_S, 200.0)
        await asyncio.sleep(0)
    queue.check(SLICE_S, clock.now_s + 1.1 * SLICE_S)


def test_costs_learned_at_one_size_grow_with_the_size() -> None:
    trend = Trend(7.0)
    assert trend.expected(10) == 7.0
    for _ in range(50):
        trend.learn(100, 2.0)
    assert trend.expected(100) == pytest.approx(2.0)
    assert trend.expected(1000) == pytest.approx(20.0)
    assert trend.expected(1) == pytest.approx(2.0)


def test_retries_spread_over_more_time_when_more_requests_are_refused() -> None:
    draws = iter([0.0, 0.99, 0.99, 0.99])
    crowd = RetryTimes(lambda: next(draws))
    crowd.refused(1.0)
    assert crowd.retry_after_s(0.2) == 1.0
    few = crowd.retry_after_s(0.2)
    for _ in range(20):
        crowd.refused(1.0)
    many = crowd.retry_after_s(0.2)
    assert 1.0 < few < many <= LONGEST_RETRY_S
    for _ in range(20):
        crowd.answered(1.0)
    assert crowd.retry_after_s(0.2) < many


def test_the_limit_of_a_front_that_refuses_falls_until_it_refuses_almost_none() -> None:
    """A front that has room for 40 at once, and a crowd before HAProxy: the front refuses whoever is beyond 40."""
    limit, refused, answered = Limit(), 0, 0
    held = []
    for number in range(400):
        refused, answered = refused + max(0, limit.value - 40), answered + 20
        limit.step(number * EVERY_S, Burden(min(limit.value, 40), refused, answered))
        held.append(limit.value)
    assert held[0] < MOST
    assert not limit.calm
    assert 30 < sum(held[200:]) / 200 < 50
    for number in range(400, 500):  # the crowd has gone
        limit.step(number * EVERY_S, Burden(2, refused, answered))
    assert limit.calm
    assert 30 < limit.value < 80, "and if it comes again at once, the front knows"
    limit.step(500 * EVERY_S + 60.0, Burden(2, refused, answered))
    assert limit.value == MOST


def test_a_front_that_was_stopped_for_hours_goes_on_with_the_highest_limit() -> None:
    limit = Limit()
    for now_s in (0.0, 1.0, 36_000.0):
        limit.step(now_s, Burden(0, 0, 0))
    assert limit.value == MOST


def test_requests_that_take_long_are_refused_by_haproxy_as_well() -> None:
    """A front that takes 33 ms for each, so that the eleventh waits for too long; in a step one ends, or none."""
    limit, inside, strained, answered, ahead = Limit(), 0, 0, 0, 0
    for number in range(1000):
        inside = max(inside, min(limit.value, inside + 5))  # a crowd
        if number % 5 in (1, 3, 4):  # of five steps, 20 ms each
            strained, answered = strained + (inside > 10), answered + (inside <= 10)
            inside -= 1
        limit.step(100.0 + number * EVERY_S, Burden(inside, strained, answered))
        ahead = strained if number == 100 else ahead
    assert strained - ahead < 0.1 * answered
    assert answered > 0.9 * 600
