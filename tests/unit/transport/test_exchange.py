"""Survivors held by one process reach another: every row arrives unchanged, or a LostError is raised."""

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.transport.connection import KEY_MESSAGE_LIMIT_BYTES, Key, Message, frame
from isobatch.deployments.transport.exchange import REQUEST_LIMIT_BYTES, Drop, Exchange, Fetch
from isobatch.deployments.transport.holdings import Claim, Holdings, LostError, Share, public_address
from isobatch.deployments.transport.packed import Packed, pack, take
from isobatch.deployments.transport.wire import Wire
from isobatch.profiles.model import Batch
from tests.helpers.asking import until
from tests.helpers.clock import Clock
from tests.helpers.travelling_batches import batches, same

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give peers enough time to send the key, however long this process has to wait for a processor."""
    monkeypatch.setattr("isobatch.deployments.transport.connection.KEY_WITHIN_S", 600.0)


class Peer:
    def __init__(self) -> None:
        self.holdings = Holdings()
        self.exchange = Exchange(self.holdings)


@asynccontextmanager
async def peers(count: int) -> AsyncIterator[list[Peer]]:
    """Peers, each as if in its own process."""
    opened = [Peer() for _ in range(count)]
    for peer in opened:
        await peer.exchange.open(Wire(HOST))
    try:
        yield opened
    finally:
        for peer in opened:
            peer.exchange.close()


def numbers(count: int, first: float = 0.0, width: int = 4) -> Batch:
    hidden = first + np.arange(count * width, dtype=np.float32).reshape(count, width)
    return Batch(2, {"hidden": hidden}, np.zeros((count, 0), np.float32))


def rows(*wanted: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array(wanted, np.int64)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.lists(batches, min_size=1, max_size=4), st.booleans())
def test_any_rows_arrive_as_they_were(data: st.DataObject, sources: list[Batch], packed_before: bool) -> None:
    chosen = [data.draw(st.lists(st.integers(0, len(each) - 1), min_size=1, unique=True)) for each in sources]

    async def scene() -> None:
        async with peers(3) as (there, also, here):
            shares = [
                Share(peer.holdings.hold(pack(each) if packed_before else each, 9.0), rows(*wanted))
                for peer, each, wanted in zip([there, also] * 2, sources, chosen, strict=False)
            ]
            brought = await here.exchange.gather(shares)
            for got, source, wanted in zip(brought, sources, chosen, strict=True):
                assert isinstance(got, Packed)
                assert same(got, take(pack(source), rows(*wanted)))

    asyncio.run(scene())


async def test_large_arrays_arrive_whole_from_several_holders_at_once() -> None:
    async with peers(4) as (here, *others):
        sources = [numbers(8, first, width=200_000) for first in range(3)]
        shares = [Share(p.holdings.hold(pack(s), 9.0), rows(7, 0)) for p, s in zip(others, sources, strict=True)]
        for _ in range(3):  # the connections are used again
            brought = await asyncio.gather(*(here.exchange.gather(shares) for _ in range(3)))
            for one in brought:
                assert all(
                    (part.arrays["hidden"][0] == s.arrays["hidden"][7]).all()
                    for part, s in zip(one, sources, strict=True)
                )


async def test_the_order_of_the_parts_is_kept() -> None:
    async with peers(2) as (here, there):
        mine, theirs = here.holdings.hold(numbers(2), 9.0), there.holdings.hold(numbers(4, 10), 9.0)
        parts = (Share(theirs, rows(3)), pack(numbers(1, 5)), Share(mine, rows(1)), Share(theirs, rows(0)))
        brought = await here.exchange.gather(parts)
        firsts = [-1 if isinstance(part, Share) else float(part.arrays["hidden"][0, 0]) for part in brought]
        assert firsts == [22, 5, -1, 10]


async def test_dropped_survivors_are_lost_and_the_connection_stays() -> None:
    async with peers(2) as (here, there):
        gone, kept = there.holdings.hold(numbers(2), 9.0), there.holdings.hold(numbers(3), 9.0)
        there.holdings.drop([gone.key])
        with pytest.raises(LostError) as afar:
            await here.exchange.gather([Share(kept, rows(0)), Share(gone, rows(0))])
        with pytest.raises(LostError) as there_itself:
            there.holdings.get(gone.key)
        for lost in (afar, there_itself):
            assert public_address(there.holdings.address) in str(lost.value)
            assert there.exchange.gate.key not in str(lost.value), "the error may be sent to a client"
        (part,) = await here.exchange.gather([Share(kept, rows(0, 1, 2))])
        assert len(part) == 3


async def test_survivors_of_a_holder_that_has_gone_or_hangs_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.transport.exchange.PATIENCE_S", 0.05)
    async with peers(1) as (here,):
        with socket.socket() as nobody, socket.create_server((HOST, 0)) as silent:
            nobody.bind((HOST, 0))  # nobody listens there, and nobody else can
            for there, why in ((nobody, "is gone"), (silent, None)):
                held = Claim(2, f"{HOST}:{there.getsockname()[1]}", "key", 1)
                with pytest.raises(LostError, match=why):
                    await here.exchange.gather([Share(held, rows(0))])


async def test_a_drop_reaches_the_holder() -> None:
    async with peers(2) as (here, there):
        wanted, *unwanted = [there.holdings.hold(numbers(1), 9.0) for _ in range(4)]
        for held in unwanted:
            await asyncio.to_thread(here.exchange.drop, held.address, held.key)  # from any thread
        await until(lambda: len(there.holdings) == 1)
        assert there.holdings.get(wanted.key)
        here.exchange.drop(f"{HOST}:1", "nobody is there, and nobody minds")
        await asyncio.sleep(0.03)


@pytest.mark.parametrize("first", [Fetch([("a", None)]), Drop(["a"]), Key("\xe9")])
async def test_the_key_of_survivors_is_of_no_use_without_the_key_of_the_process(first: Message) -> None:
    async with peers(1) as (here,):
        held = here.holdings.hold(numbers(1), 9.0)
        reader, writer = await stranger(here)
        writer.write(frame(first) + frame(Fetch([(held.key, None)])) + frame(Drop([held.key])))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert here.holdings.get(held.key)
        writer.close()


async def stranger(here: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = public_address(here.holdings.address).rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def guest(here: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await stranger(here)
    writer.write(frame(Key(here.exchange.gate.key)))
    return reader, writer


@pytest.mark.parametrize(("come", "most"), [(stranger, KEY_MESSAGE_LIMIT_BYTES), (guest, REQUEST_LIMIT_BYTES)])
async def test_no_peer_can_make_a_holder_allocate_much_memory(come: Callable[..., Any], most: int) -> None:
    async with peers(1) as (here,):
        reader, writer = await come(here)
        writer.write((most + 1).to_bytes(4, "little"))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


def test_survivors_expire_without_a_drop() -> None:
    clock = Clock()
    holdings = Holdings(clock)
    long, short, dropped = (holdings.hold(numbers(3), for_s) for for_s in (9.0, 1.0, 5.0))
    holdings.drop([dropped.key])
    clock.now_s = 1.0
    holdings.expire()
    assert len(holdings) == 1
    assert holdings.get(long.key)
    clock.now_s = 9.0
    holdings.hold(numbers(3), for_s=1.0)  # holding more looks after the rest too
    assert len(holdings) == 1
    for gone in (long, short):
        with pytest.raises(LostError):
            holdings.get(gone.key)


def test_survivors_that_are_dropped_leave_nothing_though_others_stay_for_long() -> None:
    holdings = Holdings(Clock())
    first = holdings.hold(numbers(3), for_s=1.0)
    state = numbers(3)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            holdings.drop([holdings.hold(state, for_s=9.0).key])
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left_bytes < 2**19
    assert holdings.get(first.key)


def test_a_request_does_not_restore_survivors_that_are_dropped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = Holdings()
    held = holdings.hold(numbers(3), for_s=1.0)

    def slow(state: Batch) -> Packed:
        holdings.drop([held.key])
        return pack(state)

    monkeypatch.setattr("isobatch.deployments.transport.holdings.pack", slow)
    assert len(holdings.packed(held.key, np.array([1]))) == 1
    assert len(holdings) == 0
