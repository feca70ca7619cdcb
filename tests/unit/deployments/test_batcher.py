"""Every input is answered once, in order, where it wanted to leave, whatever it shared a batch with."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.answers import Answer, RefusedError
from deployments.batcher import Batcher
from tests.toy import RAMPS, Toy, left_at

pair = st.tuples(st.integers(0, 4), st.integers(0, 9)).map(list)


def batcher(toy: Toy, max_batch: int = 4, max_waiting: int = 1000) -> Batcher:
    return Batcher(toy, RAMPS, max_batch=max_batch, max_waiting=max_waiting, clock=time.perf_counter)


async def answers(requests: list[list[list[int]]], toy: Toy, **limits: int) -> list[list[Answer]]:
    one = batcher(toy, **limits)
    try:
        return await asyncio.gather(*(one.answer(toy.encode(inputs)) for inputs in requests))
    finally:
        one.close()


@given(st.lists(st.lists(pair, min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 9))
def test_inputs_of_any_requests_are_answered_in_order(requests: list[list[list[int]]], max_batch: int) -> None:
    toy = Toy()
    found = asyncio.run(answers(requests, toy, max_batch=max_batch))
    assert [[a.label for a in request] for request in found] == [[label for _, label in r] for r in requests]
    assert [[a.exit_block for a in r] for r in found] == [[left_at(block) for block, _ in r] for r in requests]
    assert max(toy.sizes) <= max_batch


def test_who_gathers_while_a_batch_is_computed_shares_the_next() -> None:
    toy = Toy(pause_s=0.005)
    asyncio.run(answers([[[4, 1]]] * 9, toy, max_batch=4))
    assert toy.sizes == [4, 4, 4, 4, 4, 4, 1, 1, 1]  # three stops each: two ramps and the end


def test_an_early_input_does_not_wait_for_its_batch_mates() -> None:
    async def order() -> list[int]:
        toy, left = Toy(pause_s=0.02), []
        one = batcher(toy)

        async def ask(block: int) -> None:
            (answer,) = await one.answer(toy.encode([[block, 1]]))
            left.append(answer.exit_block)

        await asyncio.gather(*(ask(block) for block in (4, 0, 2)))
        one.close()
        return left

    assert asyncio.run(order()) == [0, 2, 3]


def test_a_request_beyond_the_queue_is_refused_with_the_numbers() -> None:
    with pytest.raises(RefusedError, match="0 inputs are waiting and 2 may") as refusal:
        asyncio.run(answers([[[0, 0]] * 3], Toy(), max_waiting=2))
    assert (refusal.value.status, refusal.value.retry_after_s) == (503, 1)


def test_a_failing_batch_fails_its_inputs_and_no_later_ones() -> None:
    async def both() -> list[Answer]:
        toy = Toy()
        one = batcher(toy)
        with pytest.raises(RuntimeError, match="breaks the toy"):
            await one.answer(toy.encode([[0, 5], [1, -1]]))
        found = await one.answer(toy.encode([[0, 5]]))
        one.close()
        return found

    assert [answer.label for answer in asyncio.run(both())] == [5]


def test_an_abandoned_input_is_not_computed() -> None:
    async def sizes() -> list[int]:
        toy = Toy(pause_s=0.01)
        one = batcher(toy)
        first = asyncio.create_task(one.answer(toy.encode([[4, 1]])))
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(one.answer(toy.encode([[4, 2]] * 3)))
        await asyncio.sleep(0.005)
        gone.cancel()
        await first
        await one.answer(toy.encode([[0, 3]]))
        one.close()
        assert one.waiting == 0
        return toy.sizes

    assert asyncio.run(sizes()) == [1, 1, 1, 1]
