"""Tokens between a replica and a front, over a real connection."""

import gc
import time
import weakref
from asyncio import Event, create_task, sleep, timeout
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isobatch.deployments.decoding import loop
from isobatch.deployments.decoding.loop import TokenAddress, TokenInbox, TokenOutlets, TokenStream, WrittenTokens
from isobatch.deployments.decoding.scheduler import NewTokens
from isobatch.deployments.decoding.sequences import Finish
from isobatch.deployments.transport.wire import Wire
from tests.helpers.asking import until

HERE = Wire("127.0.0.1")
FIRST, LAST = NewTokens(7, (1, 2), (0, 3)), NewTokens(7, (3,), (3,), Finish.STOP)


async def test_each_text_gets_its_tokens() -> None:
    inbox, outlets = TokenInbox(), TokenOutlets(HERE)
    await inbox.open(HERE)
    outlet = await outlets.to(inbox.address)
    assert await outlets.to(inbox.address) is outlet
    with inbox.stream() as first, inbox.stream() as second:
        outlet.put(first.name, FIRST)
        outlet.put(second.name, LAST)
        outlet.put(999, FIRST)  # of a text whose client has gone
        one, two = await first.get(), await second.get()
        outlet.put(first.name, LAST)
        end = await first.get()
    assert not inbox.streams
    inbox.close()
    assert (one.tokens, one.depths, one.finish) == ((1, 2), (0, 3), None)
    assert (two.tokens, two.finish) == (end.tokens, end.finish) == ((3,), Finish.STOP)


async def test_the_clock_of_a_replica_may_be_ahead_or_behind() -> None:
    inbox, lags_s = TokenInbox(), list[float]()
    await inbox.open(HERE)
    ahead, behind = [await TokenOutlets(HERE).to(inbox.address) for _ in range(2)]
    with inbox.stream() as stream:
        for outlet, apart_s in ((behind, -30.0), (ahead, 60.0), (behind, -30.0), (ahead, 50.0)):
            outlet.send(WrittenTokens((replace(FIRST, name=stream.name),), time.time() + apart_s))
            await stream.get()
            lags_s.append(inbox.lag_s(time.time()))
        assert lags_s[:3] == pytest.approx([30, -60, -60], abs=1)
        assert -59 < lags_s[3] < -49, "these tokens were on their way for 10 s"
        ahead.hang_up()
        await until(lambda: inbox.lag_s(time.time()) > 29)  # as the other one has gone
    inbox.close()


async def test_a_clock_that_is_set_back_breaks_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, now_s = TokenInbox(), 1e9
    await inbox.open(HERE)
    outlet = await TokenOutlets(HERE).to(inbox.address)
    monkeypatch.setattr(time, "time", lambda: now_s)
    with inbox.stream() as stream:
        for passed_s, under_way_s in ((0.0, 0.0), (1.0, 0.5), (-3600.0, 0.001), (1.0, 0.001)):
            now_s += passed_s
            outlet.send(WrittenTokens((replace(FIRST, name=stream.name),), now_s - under_way_s))
            async with timeout(2.0):
                await stream.get()
    assert [inbox.lag_s(now_s), inbox.lag_s(now_s + 5.0)] == pytest.approx([0.001, 0.001], abs=0.01)
    inbox.close()


async def test_a_text_that_has_its_end_does_not_fail_any_more() -> None:
    ended, begun = TokenStream(), TokenStream()
    for each in (FIRST, LAST):
        ended.put(each)
    begun.put(FIRST)
    for stream in (ended, begun):
        stream.fail(ConnectionError("the replica has gone"))
    text = await ended.get()
    assert (text.tokens, text.finish) == ((1, 2, 3), Finish.STOP)
    with pytest.raises(ConnectionError, match="the replica has gone"):
        await begun.get()


async def test_texts_of_a_replica_that_has_gone_fail_at_once_and_others_go_on() -> None:
    inbox = TokenInbox()
    await inbox.open(HERE)
    gone, other = [await TokenOutlets(HERE).to(inbox.address) for _ in range(2)]
    with inbox.stream() as first, inbox.stream() as second, inbox.stream() as ended:
        for outlet, stream in ((gone, first), (other, second), (gone, ended)):
            outlet.put(stream.name, FIRST)
            await stream.get()
        gone.put(ended.name, LAST)
        await sleep(0)
        gone.hang_up()
        async with timeout(5.0):
            with pytest.raises(ConnectionError, match="the replica has gone"):
                await first.get()
        assert (await ended.get()).finish
        other.put(second.name, LAST)
        assert (await second.get()).finish
    inbox.close()


async def test_a_replica_that_hangs_is_given_up_and_one_that_writes_nothing_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "BEAT_S", 0.01)
    monkeypatch.setattr(loop, "HANGS_S", 0.3)
    inbox, ends, waits = TokenInbox(), [TokenOutlets(HERE) for _ in range(2)], Event()
    await inbox.open(HERE)
    waits.set()
    launches = [waits, Event()]  # that of the second never ends
    beating = [create_task(each.beat(launch.wait)) for each, launch in zip(ends, launches, strict=True)]
    with inbox.stream() as idle, inbox.stream() as hanging:
        for each, stream in zip(ends, (idle, hanging), strict=True):
            (await each.to(inbox.address)).put(stream.name, FIRST)
            await stream.get()
        async with timeout(5.0):
            with pytest.raises(loop.DecodingError, match="the replica hangs"):  # it may be the text's fault
                await hanging.get()
        with pytest.raises(TimeoutError):
            async with timeout(0.4):
                await idle.get()
        assert [each.hangs for each in ends] == [False, True]
    for task in beating:
        task.cancel()
    inbox.close()


async def test_a_front_whose_node_is_lost_holds_up_no_text_of_another_front() -> None:
    class Lossy(Wire):
        async def connect(self, protocol: Callable[[], Any], address: str) -> Any:
            return await (Event().wait() if address == "lost" else super().connect(protocol, address))

    inbox, outlets = TokenInbox(), TokenOutlets(Lossy("127.0.0.1"))
    await inbox.open(HERE)
    lost = create_task(outlets.to(TokenAddress("lost", "")))
    async with timeout(5.0):
        await sleep(0)
        assert (await outlets.to(inbox.address)).is_open
    lost.cancel()
    inbox.close()


async def test_a_connection_is_kept_until_its_front_has_gone() -> None:
    inbox, outlets = TokenInbox(), TokenOutlets(HERE)
    await inbox.open(HERE)
    outlet = weakref.ref(await outlets.to(inbox.address))
    gc.collect()
    assert await outlets.to(inbox.address) is outlet()
    inbox.close()
    await until(lambda: outlet() is None, within_s=5.0)


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_a_front_that_has_gone_or_another_key_is_an_error_and_the_next_text_connects_anew(key: str) -> None:
    inbox, outlets = TokenInbox(), TokenOutlets(HERE)
    await inbox.open(HERE)
    address = TokenAddress(inbox.address.address, key) if key else inbox.address
    outlet = await outlets.to(address)
    if not key:
        with inbox.stream() as stream:
            outlet.put(stream.name, FIRST)
            await stream.get()
        inbox.close()
    await until(lambda: not outlet.is_open)
    with pytest.raises(ConnectionError, match="the front has gone"):
        outlet.put(1, FIRST)
    if key:
        assert await outlets.to(inbox.address) is not outlet
    else:
        with pytest.raises(OSError, match=r"refused|failed"):
            await outlets.to(address)
    inbox.close()
