"""A failed launch frees its inputs at once, without the garbage collector."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pytest

from deployments.replica.local_workers import LocalWorkers
from deployments.replica.split import SplitReplica
from deployments.transport.orders import Departed, Order, Stayed
from deployments.transport.packed import Packed, pack
from deployments.transport.replica_connection import OrderServer, ReplicaAddress, connect_to
from deployments.transport.wire import Wire
from tests.helpers.toy_model import Toy

WIRE = Wire("127.0.0.1")
BROKEN = pack(Toy().encode([[0, -1]]))


async def fails_and_lets_go(run: Callable[[Order], AsyncIterator[Departed | Stayed]]) -> None:
    order = Order(4, frozenset(), (Packed(0, dict(BROKEN.arrays), np.array(BROKEN.memory)),))
    gone = weakref.ref(order.parts[0])
    with pytest.raises((RuntimeError, ConnectionError)):
        await anext(run(order))
    del order
    for _ in range(100):  # a thread may still be on its way to the next
        if gone() is None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it is held by what failed")


@pytest.fixture(autouse=True)
def nobody_looks_for_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_by_a_thread_of_this_process() -> None:
    async def scene() -> None:
        workers = LocalWorkers({"device": SplitReplica(Toy())})
        await fails_and_lets_go(lambda order: workers.run("device", order))
        await workers.close()

    asyncio.run(scene())


def test_by_a_replica_that_has_gone() -> None:
    async def scene() -> None:
        async def hangs_up(order: Order) -> AsyncIterator[Departed | Stayed]:
            server.close()
            await asyncio.sleep(10.0)
            yield Stayed(None, np.zeros(0, np.int64), 0.0)

        server = OrderServer(hangs_up, lambda after_s: None)
        connection = await connect_to(
            WIRE, ReplicaAddress("it", await server.open(WIRE), server.gate.key), lambda: None
        )
        await fails_and_lets_go(connection.run)

    asyncio.run(scene())
