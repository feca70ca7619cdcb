"""Replicas on threads of this process: a thread outlives its caller."""

import asyncio

import pytest

from deployments.replica.local_workers import LocalWorkers
from deployments.replica.split import SplitReplica
from deployments.transport.orders import Departed, Order
from deployments.transport.packed import pack
from tests.helpers.toy_model import Toy


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_closes_during_a_launch_does_not_end_the_thread() -> None:
    workers = LocalWorkers({"device": SplitReplica(Toy(pause_s=0.05))})
    order = Order(4, frozenset(), (pack(Toy().encode([[0, 3]])),))

    async def asks_and_goes() -> None:
        asking = asyncio.create_task(anext(workers.run("device", order)))
        await asyncio.sleep(0.02)
        asking.cancel()

    async def asks() -> None:
        reply = await asyncio.wait_for(anext(workers.run("device", order)), 30)
        assert isinstance(reply, Departed)
        await workers.close()

    asyncio.run(asks_and_goes())
    asyncio.run(asks())
