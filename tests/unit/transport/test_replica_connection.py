"""Orders over a connection to a replica: replies reach their callers, and a lost connection is noticed."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import uvloop

from isobatch.deployments.transport.connection import KEY_MESSAGE_LIMIT_BYTES, MESSAGE_LIMIT_BYTES, Key, frame
from isobatch.deployments.transport.holdings import Claim, Holdings, LostError, Share
from isobatch.deployments.transport.orders import Departed, LaunchError, NumberedOrder, Order, Stayed
from isobatch.deployments.transport.replica_connection import (
    UNAUTHORIZED_LIMIT,
    EndIfStuck,
    OrderServer,
    ReplicaAddress,
    ReplicaConnection,
    connect_to,
)
from isobatch.deployments.transport.wire import Wire
from isobatch.profiles.model import Batch, Exits
from tests.helpers.asking import until

WIRE = Wire("127.0.0.1")
HELD = Claim(4, "10.0.0.7:4242", "7f3a", 8, 1000)
BATCH = Batch(4, {"hidden": np.zeros((1, 2), np.float32)}, np.zeros((1, 0), np.float32))


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give peers enough time to send the key, however long this process has to wait for a processor."""
    monkeypatch.setattr("isobatch.deployments.transport.connection.KEY_WITHIN_S", 600.0)


class Replica:
    """Answers orders in the order that a test chooses, and records what it received."""

    def __init__(self) -> None:
        self.gates = defaultdict[int, asyncio.Event](asyncio.Event)
        self.stuck_for_s: list[float] = []
        self.holdings, self.claimed = Holdings(), 0
        self.server = OrderServer(self.run, self.warm_up, self.stuck_for_s.append, self.holdings, held_after_s=0.05)

    async def run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        """An order is known by where it stops: 0 fails, 1 misses something, others wait for their gate.

        Those from 100 on have survivors, which the replica holds.
        """
        if order.stop == 0:
            raise ValueError("no such block")
        if order.stop == 1:
            raise LostError("gone")
        gate = self.gates[order.stop]
        yield Departed(Exits(np.zeros(1, int), np.zeros(1, int), np.zeros((1, 2), np.float32)), float(order.stop))
        await gate.wait()
        survivors = self.holdings.hold(BATCH, 9e9) if order.stop >= 100 else None
        self.claimed += survivors is not None
        yield Stayed(survivors, np.zeros(0, int), float(order.stop))

    async def warm_up(self, plan: str) -> None:
        """A plan is known by the stop for whose gate it waits; the empty one fails."""
        await self.gates[int(plan)].wait()


@pytest.fixture(autouse=True, params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Any:
    """asyncio's own event loop, and the one that Ray uses."""
    return request.param


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Replica, ReplicaConnection, list[str]]]:
    """A replica, a connection to it, and an entry for each time that this was lost."""
    replica, losses = Replica(), list[str]()
    where = ReplicaAddress("it", await replica.server.open(WIRE), replica.server.gate.key)
    connection = await connect_to(WIRE, where, lambda: losses.append("lost"))
    async with asyncio.timeout(60):
        yield replica, connection, losses
    connection.retire()
    replica.server.close()
    await asyncio.sleep(0)


def order(stop: int) -> Order:
    return Order(stop, frozenset(), (Share(HELD, np.array([0])),))


async def replies(connection: ReplicaConnection, stop: int) -> list[float]:
    return [reply.computed_s async for reply in connection.run(order(stop))]


async def test_a_replica_says_when_it_is_warm_and_answers_orders_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (replica, connection, _):
        warming = asyncio.ensure_future(connection.warm_up("7"))
        replica.gates[2].set()
        assert await replies(connection, 2) == [2.0, 2.0]
        assert not warming.done()
        replica.gates[7].set()
        await warming
        with pytest.raises(LaunchError, match="ValueError: invalid literal"):
            await connection.warm_up("")
        assert "a warm-up failed" in caplog.text


async def test_a_retired_connection_does_not_wait_for_a_warm_up() -> None:
    async with connected() as (replica, connection, losses):
        warming, launched = (
            asyncio.ensure_future(connection.warm_up("7")),
            asyncio.ensure_future(replies(connection, 2)),
        )
        await until(lambda: replica.gates.keys() == {2, 7})
        connection.retire()
        replica.gates[2].set()
        assert await launched == [2.0, 2.0]
        with pytest.raises(ConnectionError, match="the replica has gone"):
            await warming
        assert losses == []


async def test_replies_reach_their_callers_as_soon_as_they_are_known() -> None:
    async with connected() as (replica, connection, losses):
        early: list[float] = []

        async def listen(stop: int) -> list[float]:
            result = []
            async for reply in connection.run(order(stop)):
                early.append(reply.computed_s)
                result.append(reply.computed_s)
            return result

        fields = {stop: asyncio.ensure_future(listen(stop)) for stop in (2, 3, 4)}
        await until(lambda: len(early) == 3)
        for stop in (4, 2, 3):
            replica.gates[stop].set()
            assert await fields[stop] == [stop, stop]
        assert losses == []


async def test_a_failure_has_its_reason_and_the_connection_stays() -> None:
    async with connected() as (replica, connection, _):
        with pytest.raises(LaunchError, match="ValueError: no such block"):
            await replies(connection, 0)
        with pytest.raises(LostError, match="gone"):
            await replies(connection, 1)
        replica.gates[5].set()
        assert await replies(connection, 5) == [5, 5]


async def test_the_end_of_a_connection_fails_its_orders() -> None:
    async with connected() as (replica, connection, losses):
        pending = [asyncio.ensure_future(replies(connection, stop)) for stop in (2, 3)]
        await until(lambda: len(replica.gates) == 2)
        replica.server.close()
        for each in pending:
            with pytest.raises(ConnectionError):
                await each
        assert losses == ["lost"]
        with pytest.raises(ConnectionError):
            await replies(connection, 4)


async def test_a_retired_connection_ends_with_its_last_reply() -> None:
    async with connected() as (replica, connection, losses):
        pending = asyncio.ensure_future(replies(connection, 2))
        await until(lambda: 2 in replica.gates)
        connection.retire()
        await asyncio.sleep(0.02)
        assert len(replica.server.gate.authorized) == 1
        replica.gates[2].set()
        assert await pending == [2, 2]
        await until(lambda: not replica.server.gate.authorized)
        assert losses == []


async def test_replies_to_a_caller_that_gave_up_are_ignored() -> None:
    async with connected() as (replica, connection, _):
        pending = asyncio.ensure_future(replies(connection, 2))
        await until(lambda: 2 in replica.gates)
        pending.cancel()
        await asyncio.sleep(0)
        for stop in (2, 3):
            replica.gates[stop].set()
        assert await replies(connection, 3) == [3, 3]
        connection.end_if_stuck(5.0)
        await until(lambda: replica.stuck_for_s == [5.0])


async def test_survivors_for_a_caller_that_gave_up_are_dropped() -> None:
    """Their deadline may be a day away, and no launch will use them."""
    async with connected() as (replica, *_):
        address, dropped = ReplicaAddress("r1", await replica.server.open(WIRE), replica.server.gate.key), list[str]()

        def drop(holder: str, key: str) -> None:
            assert holder == replica.holdings.address
            replica.holdings.drop([key])
            dropped.append(key)

        connection = await connect_to(WIRE, address, lambda: None, drop=drop)
        given_up = asyncio.ensure_future(replies(connection, 100))
        await until(lambda: 100 in replica.gates)
        given_up.cancel()
        await asyncio.sleep(0)
        replica.gates[100].set()
        await until(lambda: dropped)
        assert (len(dropped), len(replica.holdings)) == (1, 0)
        assert await replies(connection, 100) == [100, 100]
        assert (len(dropped), len(replica.holdings)) == (1, 1), "the caller drops its own"
        connection.hang_up()


NOISE = b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 64
TOO_LONG = (length.to_bytes(4, "little") for length in (KEY_MESSAGE_LIMIT_BYTES + 1, MESSAGE_LIMIT_BYTES))
WRONG = Key("0" * 32), EndIfStuck(0.0), ["NumberedOrder", 1], [1]


@pytest.mark.parametrize("noise", [*NOISE, *TOO_LONG, *map(frame, WRONG)])
async def test_connections_without_the_key_are_ended(noise: bytes) -> None:
    """One that announces a message that is too long is ended at once: no memory is taken for it."""
    async with connected() as (replica, *_):
        reader, writer = await stranger(replica)
        writer.write(noise + frame(NumberedOrder(0, order(2)), []))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert replica.gates == {}
        writer.close()


async def stranger(replica: Replica) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = (await replica.server.open(WIRE)).rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_many_connections_without_the_key_cost_little_and_keep_no_front_out() -> None:
    async with connected() as (replica, *_):
        address = await replica.server.open(WIRE)
        host, _, port = address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(UNAUTHORIZED_LIMIT + 20)]
        another = await connect_to(WIRE, ReplicaAddress("r1", address, replica.server.gate.key), lambda: None)
        replica.gates[3].set()
        assert await replies(another, 3) == [3, 3]
        assert len(replica.server.gate.unauthorized) <= UNAUTHORIZED_LIMIT
        assert await asyncio.wait_for(silent[0][0].read(), 60) == b"", "the one that waited longest had to go"
        for _, writer in silent:
            writer.close()
        another.retire()


async def test_a_silent_connection_without_the_key_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.transport.connection.KEY_WITHIN_S", 0.5)
    async with connected() as (replica, connection, _):
        reader, writer = await stranger(replica)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        replica.gates[3].set()
        assert await replies(connection, 3) == [3, 3], "whoever has shown the key may be silent for longer"


async def test_a_replica_drops_the_survivors_of_a_front_whose_connection_is_lost() -> None:
    async with connected() as (replica, connection, _):
        address = ReplicaAddress("r1", await replica.server.open(WIRE), replica.server.gate.key)
        vanishing = await connect_to(WIRE, address, lambda: None)
        replica.gates[100].set()
        for each in (connection, vanishing):
            assert await replies(each, 100) == [100, 100]
        launched = asyncio.ensure_future(replies(vanishing, 101))
        await asyncio.sleep(0.1)
        assert len(replica.holdings) == 2
        vanishing.hang_up()
        with pytest.raises(ConnectionError):
            await launched
        await until(lambda: len(replica.holdings) == 1)
        replica.gates[101].set()  # a launch that ends later
        await until(lambda: replica.claimed == 3 and len(replica.holdings) == 1)
        assert await replies(connection, 100) == [100, 100]


async def test_a_replica_keeps_the_survivors_of_a_front_that_connects_again() -> None:
    async with connected() as (replica, *_):
        address = ReplicaAddress("r1", await replica.server.open(WIRE), replica.server.gate.key)
        replica.gates[100].set()

        there = replica.server.gate.authorized

        async def front_named(name: str) -> ReplicaConnection:
            before = len(there)
            front = await connect_to(WIRE, address, lambda: None, name)
            await until(lambda: len(there) == before + 1)
            return front

        async def lose(*lost: ReplicaConnection) -> None:
            left = len(there) - len(lost)
            for each in lost:
                each.hang_up()
            await until(lambda: len(there) == left)

        first, others = await front_named("this"), [await front_named(name) for name in ("that", "", "")]
        for each in (first, *others):
            assert await replies(each, 100) == [100, 100]
        second = await front_named("this")  # before the loss of its first connection is noticed
        await lose(first, *others)
        await asyncio.sleep(0.1)
        assert len(replica.holdings) == 1
        replica.server.held_after_s = 9e9
        await lose(second)
        third = await front_named("this")
        replica.server.held_after_s = 0.05
        await lose(third)
        await until(lambda: not replica.holdings)
