"""Tokens between a replica and a front, over a real connection."""

import asyncio
import time
from dataclasses import replace

import pytest

from isobatch.deployments.decoding.loop import TokenAddress, TokenInbox, TokenOutlets, TokenStream, WrittenTokens
from isobatch.deployments.decoding.scheduler import NewTokens
from isobatch.deployments.decoding.sequences import Finish
from isobatch.deployments.transport.wire import Wire

HERE = Wire("127.0.0.1")
FIRST, LAST = NewTokens(7, (1, 2), (0, 3)), NewTokens(7, (3,), (3,), Finish.STOP)


def test_each_text_gets_its_tokens() -> None:
    async def send() -> list[NewTokens]:
        inbox, outlets = TokenInbox(), TokenOutlets(HERE)
        await inbox.open(HERE)
        outlet = await outlets.to(inbox.address)
        assert await outlets.to(inbox.address) is outlet
        with inbox.stream() as one, inbox.stream() as two:
            outlet.put(one.name, FIRST)
            outlet.put(two.name, LAST)
            outlet.put(999, FIRST)  # of a text whose client has gone
            found = [await one.get(), await two.get()]
            outlet.put(one.name, LAST)
            found.append(await one.get())
        assert not inbox.streams
        inbox.close()
        return found

    one, two, end = asyncio.run(asyncio.wait_for(send(), 20))
    assert (one.tokens, one.depths, one.finish) == ((1, 2), (0, 3), None)
    assert (two.tokens, two.finish) == (end.tokens, end.finish) == ((3,), Finish.STOP)


def test_the_clock_of_a_replica_may_be_ahead_or_behind() -> None:
    async def send() -> list[float]:
        inbox, seen = TokenInbox(), []
        await inbox.open(HERE)
        ahead, behind = [await TokenOutlets(HERE).to(inbox.address) for _ in range(2)]
        with inbox.stream() as stream:
            for outlet, apart_s in ((behind, -30.0), (ahead, 60.0), (behind, -30.0), (ahead, 50.0)):
                outlet.send(WrittenTokens((replace(FIRST, name=stream.name),), time.time() + apart_s))
                await stream.get()
                seen.append(inbox.lag_s(time.time()))
            ahead.hang_up()
            while inbox.lag_s(time.time()) < 0:
                await asyncio.sleep(0)
        inbox.close()
        return [*seen, inbox.lag_s(time.time())]

    *lags_s, delayed_s, left_s = asyncio.run(asyncio.wait_for(send(), 20))
    assert lags_s == pytest.approx([30, -60, -60], abs=1)
    assert -59 < delayed_s < -49, "these tokens were on their way for 10 s"
    assert left_s > 29, "the other one has gone"


def test_a_text_that_has_its_end_does_not_fail_any_more() -> None:
    async def read(*written: NewTokens) -> NewTokens:
        stream = TokenStream()
        for each in written:
            stream.put(each)
        stream.fail(ConnectionError("the replica has gone"))
        return await asyncio.wait_for(stream.get(), 20)

    ended = asyncio.run(read(FIRST, LAST))
    assert (ended.tokens, ended.finish) == ((1, 2, 3), Finish.STOP)
    with pytest.raises(ConnectionError, match="the replica has gone"):
        asyncio.run(read(FIRST))


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_front_that_has_gone_or_another_key_is_an_error_and_the_next_text_connects_anew(key: str) -> None:
    async def send() -> None:
        inbox, outlets = TokenInbox(), TokenOutlets(HERE)
        await inbox.open(HERE)
        address = TokenAddress(inbox.address.address, key) if key else inbox.address
        outlet = await outlets.to(address)
        if not key:
            with inbox.stream() as stream:
                outlet.put(stream.name, FIRST)
                await stream.get()
            inbox.close()
        while outlet.is_open:
            await asyncio.sleep(0)
        with pytest.raises(ConnectionError, match="the front has gone"):
            outlet.put(1, FIRST)
        if key:
            assert await outlets.to(inbox.address) is not outlet
        else:
            with pytest.raises(OSError, match=r"refused|failed"):
                await outlets.to(address)
        inbox.close()

    asyncio.run(asyncio.wait_for(send(), 20))
