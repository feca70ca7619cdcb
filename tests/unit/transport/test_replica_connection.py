"""Orders over a connection: they arrive unchanged, replies reach their callers, and a lost connection is noticed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.transport.connection import (
    KEY_MESSAGE_LIMIT_BYTES,
    MESSAGE_LIMIT_BYTES,
    SHARED_BUFFER_BYTES,
    Key,
    MessageConnection,
    bytes_of,
    frame,
)
from isobatch.deployments.transport.holdings import Claim, Holdings, LostError, Share
from isobatch.deployments.transport.orders import (
    Departed,
    Failed,
    LaunchError,
    NumberedOrder,
    NumberedReply,
    Order,
    Stayed,
)
from isobatch.deployments.transport.packed import Packed, pack
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
from tests.helpers.travelling_batches import batches, same

WIRE = Wire("127.0.0.1")
HELD = Claim(4, "10.0.0.7:4242", "7f3a", 8, 1000)
BATCH = Batch(4, {"hidden": np.zeros((1, 2), np.float32)}, np.zeros((1, 0), np.float32))


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give peers enough time to send the key, however long this process has to wait for a processor."""
    monkeypatch.setattr("isobatch.deployments.transport.connection.KEY_WITHIN_S", 600.0)


class Ear(MessageConnection):
    """Receives messages as a connection does, in pieces of any size."""

    messages = NumberedOrder | NumberedReply

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.replies: list[Departed | Stayed | Failed] = []
        self.connection_made(Silent())

    def on_message(self, message: NumberedOrder | NumberedReply) -> None:
        if isinstance(message, NumberedOrder):
            self.orders.append(message.order)
        else:
            self.replies.append(message.reply)

    def hear(self, said: bytes, sizes: list[int]) -> None:
        while said:
            room = self.get_buffer(-1)
            size = min(len(said), len(room), sizes[len(said) % len(sizes)])
            room[:size] = said[:size]
            self.buffer_updated(size)
            said = said[size:]


class Silent(asyncio.Transport):
    def abort(self) -> None:
        raise AssertionError("what was said was not understood")


def bytes_of_frame(message: object) -> bytes:
    arrays: list[Any] = []
    return frame(message, arrays) + b"".join(bytes_of(array) for array in arrays)


shares = st.builds(lambda rows: Share(HELD, np.array(rows)), st.lists(st.integers(0, 7), min_size=1, unique=True))
sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


@given(st.lists(st.lists(st.builds(pack, batches) | shares, min_size=1, max_size=3), min_size=1, max_size=3), sizes)
def test_orders_arrive_as_they_were_in_pieces_of_any_size(parts: list[list[Packed | Share]], sizes: list[int]) -> None:
    sent = [Order(7, frozenset({2, 5}), tuple(each), keep=True, by_value_bytes=9, hold_s=1.5) for each in parts]
    ear = Ear()
    ear.hear(b"".join(bytes_of_frame(NumberedOrder(n, order)) for n, order in enumerate(sent)), sizes)
    assert len(ear.orders) == len(sent)
    for came, order in zip(ear.orders, sent, strict=True):
        assert (came.stop, came.ramps, came.keep, came.by_value_bytes, came.hold_s) == (7, {2, 5}, True, 9, 1.5)
        for left, right in zip(came.parts, order.parts, strict=True):
            if isinstance(right, Share):
                assert isinstance(left, Share)
                assert (left.claim, left.rows.tolist()) == (right.claim, right.rows.tolist())
            else:
                assert isinstance(left, Packed)
                assert same(left, right)


def test_large_arrays_arrive() -> None:
    hidden = np.arange(3 * SHARED_BUFFER_BYTES, dtype=np.float32).reshape(3, SHARED_BUFFER_BYTES)
    order = Order(4, frozenset(), (pack(Batch(2, {"hidden": hidden}, np.zeros((3, 1), np.float32))),) * 2)
    ear = Ear()
    ear.hear(bytes_of_frame(NumberedOrder(0, order)) * 2, [10**6, SHARED_BUFFER_BYTES - 1])
    assert len(ear.orders) == 2
    for came in ear.orders:
        assert all(same(left, right) for left, right in zip(came.parts, order.parts, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [bytes(8), None])
def test_arrays_of_objects_are_refused(content: bytes | None) -> None:
    """Their bytes would be taken for addresses in this process's memory."""
    with pytest.raises(AssertionError, match="not understood"):
        Ear().hear(frame(["NumberedReply", 0, ["Stayed", None, ["|O", [1], content], 0.5, None]]), [100])


@given(batches, sizes, st.booleans())
def test_replies_arrive_as_they_were(batch: Batch, sizes: list[int], of_words: bool) -> None:
    rows = np.arange(len(batch))
    counts = rows % 3 if of_words else None
    answers = len(rows) if counts is None else int(counts.sum())
    logits = np.linspace(0, 1, 2 * answers, dtype=np.float32).reshape(-1, 2)
    exits = Exits(rows, rows + 3, logits, counts)
    stayed = (Stayed(pack(batch), rows, 0.5), Stayed(HELD, rows, 0.5), Stayed(None, rows[:0], 0.75))
    said = [Departed(exits, 0.25), *stayed, Failed("why", True)]
    ear = Ear()
    ear.hear(b"".join(bytes_of_frame(NumberedReply(n, reply)) for n, reply in enumerate(said)), sizes)
    departed, by_value, held, nobody, failed = ear.replies
    assert isinstance(departed, Departed)
    for name, sent in vars(exits).items():
        np.testing.assert_array_equal(getattr(departed.exits, name), sent)
    assert isinstance(by_value, Stayed)
    assert same(by_value.survivors, said[1].survivors)  # type: ignore[arg-type, union-attr]
    assert isinstance(held, Stayed)
    assert (held.survivors, held.rows.tolist(), held.computed_s) == (HELD, rows.tolist(), 0.5)
    assert isinstance(nobody, Stayed)
    assert (nobody.survivors, len(nobody.rows), failed) == (None, 0, said[4])


# With a replica at the other end


class Replica:
    """Answers orders in the order that a test chooses, and records what it received."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
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
        gate = self.gates.setdefault(order.stop, asyncio.Event())
        yield Departed(Exits(np.zeros(1, int), np.zeros(1, int), np.zeros((1, 2), np.float32)), float(order.stop))
        await gate.wait()
        survivors = self.holdings.hold(BATCH, 9e9) if order.stop >= 100 else None
        self.claimed += survivors is not None
        yield Stayed(survivors, np.zeros(0, int), float(order.stop))

    async def warm_up(self, plan: str) -> None:
        """A plan is known by the stop for whose gate it waits; the empty one fails."""
        await self.gates.setdefault(int(plan), asyncio.Event()).wait()


Scene = Callable[[Replica, ReplicaConnection, list[str]], Awaitable[Any]]


def play(scene: Scene) -> None:
    """On asyncio's own event loop, and on uvloop, which Ray uses."""

    async def act() -> None:
        replica, losses = Replica(), list[str]()
        where = ReplicaAddress("it", await replica.server.open(WIRE), replica.server.gate.key)
        connection = await connect_to(WIRE, where, lambda: losses.append("lost"))
        await asyncio.wait_for(scene(replica, connection, losses), 60)
        connection.retire()
        replica.server.close()
        await asyncio.sleep(0)

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(act())


def order(stop: int) -> Order:
    return Order(stop, frozenset(), (Share(HELD, np.array([0])),))


async def replies(connection: ReplicaConnection, stop: int) -> list[float]:
    return [reply.computed_s async for reply in connection.run(order(stop))]


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_a_replica_says_when_it_is_warm_and_answers_orders_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, losses: list[str]) -> None:
        warming = asyncio.ensure_future(connection.warm_up("7"))
        replica.gates[2] = asyncio.Event()
        replica.gates[2].set()
        assert await replies(connection, 2) == [2.0, 2.0]
        assert not warming.done()
        replica.gates[7].set()
        await warming
        with pytest.raises(LaunchError, match="ValueError: invalid literal"):
            await connection.warm_up("")
        assert "a warm-up failed" in caplog.text

    play(scene)


def test_a_retired_connection_does_not_wait_for_a_warm_up() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, losses: list[str]) -> None:
        warming, launched = (
            asyncio.ensure_future(connection.warm_up("7")),
            asyncio.ensure_future(replies(connection, 2)),
        )
        await eventually(lambda: replica.gates.keys() == {2, 7})
        connection.retire()
        replica.gates[2].set()
        assert await launched == [2.0, 2.0]
        with pytest.raises(ConnectionError, match="the replica has gone"):
            await warming
        assert losses == []

    play(scene)


def test_replies_reach_their_callers_as_soon_as_they_are_known() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, losses: list[str]) -> None:
        early: list[float] = []

        async def listen(stop: int) -> list[float]:
            said = []
            async for reply in connection.run(order(stop)):
                early.append(reply.computed_s)
                said.append(reply.computed_s)
            return said

        asked = {stop: asyncio.ensure_future(listen(stop)) for stop in (2, 3, 4)}
        await eventually(lambda: len(early) == 3)
        for stop in (4, 2, 3):
            replica.gates[stop].set()
            assert await asked[stop] == [stop, stop]
        assert losses == []

    play(scene)


def test_a_failure_has_its_reason_and_the_connection_stays() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        with pytest.raises(LaunchError, match="ValueError: no such block"):
            await replies(connection, 0)
        with pytest.raises(LostError, match="gone"):
            await replies(connection, 1)
        replica.gates[5] = asyncio.Event()
        replica.gates[5].set()
        assert await replies(connection, 5) == [5, 5]

    play(scene)


def test_the_end_of_a_connection_fails_its_orders() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, losses: list[str]) -> None:
        asked = [asyncio.ensure_future(replies(connection, stop)) for stop in (2, 3)]
        await eventually(lambda: len(replica.gates) == 2)
        replica.server.close()
        for each in asked:
            with pytest.raises(ConnectionError):
                await each
        assert losses == ["lost"]
        with pytest.raises(ConnectionError):
            await replies(connection, 4)

    play(scene)


def test_a_retired_connection_ends_with_its_last_reply() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, losses: list[str]) -> None:
        asked = asyncio.ensure_future(replies(connection, 2))
        await eventually(lambda: 2 in replica.gates)
        connection.retire()
        await asyncio.sleep(0.02)
        assert len(replica.server.gate.authorized) == 1
        replica.gates[2].set()
        assert await asked == [2, 2]
        await eventually(lambda: not replica.server.gate.authorized)
        assert losses == []

    play(scene)


def test_replies_to_a_caller_that_gave_up_are_ignored() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        asked = asyncio.ensure_future(replies(connection, 2))
        await eventually(lambda: 2 in replica.gates)
        asked.cancel()
        await asyncio.sleep(0)
        replica.gates[2].set()
        replica.gates[3] = replica.gates[2]
        assert await replies(connection, 3) == [3, 3]
        connection.end_if_stuck(5.0)
        await eventually(lambda: replica.stuck_for_s == [5.0])

    play(scene)


NOISE = b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 64
WRONG = Key("0" * 32), EndIfStuck(0.0), ["NumberedOrder", 1], [1]


@pytest.mark.parametrize("noise", [*NOISE, *map(frame, WRONG)])
def test_connections_without_the_key_are_ended(noise: bytes) -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        reader, writer = await stranger(replica)
        writer.write(noise + bytes_of_frame(NumberedOrder(0, order(2))))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert replica.gates == {}
        writer.close()

    play(scene)


async def stranger(replica: Replica) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = (await replica.server.open(WIRE)).rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("length", [KEY_MESSAGE_LIMIT_BYTES + 1, MESSAGE_LIMIT_BYTES])
def test_a_peer_without_the_key_cannot_make_a_replica_allocate_memory(length: int) -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        reader, writer = await stranger(replica)
        writer.write(length.to_bytes(4, "little"))
        assert await asyncio.wait_for(reader.read(), 60) == b"", "its announcement is enough: nothing is waited for"
        writer.close()

    play(scene)


def test_many_connections_without_the_key_cost_little_and_keep_no_front_out() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        address = await replica.server.open(WIRE)
        host, _, port = address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(UNAUTHORIZED_LIMIT + 20)]
        another = await connect_to(WIRE, ReplicaAddress("r1", address, replica.server.gate.key), lambda: None)
        replica.gates[3] = asyncio.Event()
        replica.gates[3].set()
        assert await replies(another, 3) == [3, 3]
        assert len(replica.server.gate.unauthorized) <= UNAUTHORIZED_LIMIT
        assert await asyncio.wait_for(silent[0][0].read(), 60) == b"", "the one that waited longest had to go"
        for _, writer in silent:
            writer.close()
        another.retire()

    play(scene)


def test_a_silent_connection_without_the_key_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.transport.connection.KEY_WITHIN_S", 1.0)

    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        reader, writer = await stranger(replica)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        replica.gates[3] = asyncio.Event()
        replica.gates[3].set()
        assert await replies(connection, 3) == [3, 3], "whoever has shown the key may be silent for longer"

    play(scene)


def test_a_replica_drops_the_survivors_of_a_front_whose_connection_is_lost() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        address = ReplicaAddress("r1", await replica.server.open(WIRE), replica.server.gate.key)
        vanishing = await connect_to(WIRE, address, lambda: None)
        for stop in (100, 101):
            replica.gates[stop] = asyncio.Event()
        replica.gates[100].set()
        for each in (connection, vanishing):
            assert await replies(each, 100) == [100, 100]
        launched = asyncio.ensure_future(replies(vanishing, 101))
        await asyncio.sleep(0.1)
        assert len(replica.holdings) == 2
        vanishing.hang_up()
        with pytest.raises(ConnectionError):
            await launched
        await eventually(lambda: len(replica.holdings) == 1)
        replica.gates[101].set()  # a launch that ends later
        await eventually(lambda: replica.claimed == 3 and len(replica.holdings) == 1)
        assert await replies(connection, 100) == [100, 100]

    play(scene)


def test_a_replica_keeps_the_survivors_of_a_front_that_connects_again() -> None:
    async def scene(replica: Replica, connection: ReplicaConnection, _: list[str]) -> None:
        address = ReplicaAddress("r1", await replica.server.open(WIRE), replica.server.gate.key)
        replica.gates[100] = asyncio.Event()
        replica.gates[100].set()

        there = replica.server.gate.authorized

        async def connected(name: str) -> ReplicaConnection:
            before = len(there)
            front = await connect_to(WIRE, address, lambda: None, name)
            await eventually(lambda: len(there) == before + 1)
            return front

        async def lose(*lost: ReplicaConnection) -> None:
            left = len(there) - len(lost)
            for each in lost:
                each.hang_up()
            await eventually(lambda: len(there) == left)

        first, others = await connected("this"), [await connected(name) for name in ("that", "", "")]
        for each in (first, *others):
            assert await replies(each, 100) == [100, 100]
        second = await connected("this")  # before the loss of its first connection is noticed
        await lose(first, *others)
        await asyncio.sleep(0.1)
        assert len(replica.holdings) == 1
        replica.server.held_after_s = 9e9
        await lose(second)
        third = await connected("this")
        replica.server.held_after_s = 0.05
        await lose(third)
        await eventually(lambda: not replica.holdings)

    play(scene)
