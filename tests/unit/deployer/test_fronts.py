"""Requests to fronts, fronts that do not reply, and the shares of fronts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from isobatch.deployments.deployer import fronts as module
from isobatch.deployments.deployer.fronts import Fronts
from isobatch.deployments.front.messages import FrontMessage, ReplicaShare
from tests.helpers.asking import until


async def listen(fronts: Fronts, name: str, answer: Callable[[FrontMessage], object], heard: list[object]) -> None:
    async for message in fronts.messages(name, "first"):
        heard.append(message.content)
        if message.number:
            reply = answer(message)
            if reply is not None:
                fronts.reply(name, message.number, reply)


@asynccontextmanager
async def two_fronts() -> AsyncIterator[tuple[Fronts, list[object], list[object]]]:
    """The fronts, and what a lively and a mute one have heard."""
    fronts, lively, mute = Fronts(), list[object](), list[object]()
    tasks = [
        asyncio.create_task(listen(fronts, "lively", lambda message: f"{message.content}!", lively)),
        asyncio.create_task(listen(fronts, "mute", lambda _: None, mute)),
    ]
    await asyncio.sleep(0)
    yield fronts, lively, mute
    for task in tasks:
        task.cancel()


async def test_a_request_reaches_all_fronts_and_one_that_does_not_reply_is_dropped_until_it_joins_again() -> None:
    async with two_fronts() as (fronts, lively, mute):
        fronts.reply("lively", 77, "too late")
        assert await fronts.ask("what", within_s=0.2) == {"lively": "what!"}
        assert lively == mute == ["first", "what"]
        assert await fronts.ask("again", within_s=5.0) == {"lively": "again!"}
        assert mute == ["first", "what"]


async def test_a_cancelled_request_leaves_nothing_behind_and_drops_no_front() -> None:
    async with two_fronts() as (fronts, lively, mute):
        pending = asyncio.create_task(fronts.ask("what", within_s=600.0))
        await until(lambda: "what" in lively)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert fronts._replies == {}
        assert await fronts.ask("again", within_s=0.2) == {"lively": "again!"}
        assert mute == ["first", "what", "again"]


async def test_a_front_that_joins_again_ends_its_earlier_stream() -> None:
    fronts = Fronts()
    earlier = asyncio.create_task(listen(fronts, "front", lambda _: None, []))
    await asyncio.sleep(0)
    later = asyncio.create_task(listen(fronts, "front", lambda message: f"{message.content}!", []))
    await asyncio.wait_for(earlier, 5.0)
    assert await fronts.ask("what", within_s=5.0) == {"front": "what!"}
    later.cancel()


async def test_a_front_that_joins_again_during_a_request_keeps_its_new_stream() -> None:
    async with two_fronts() as (fronts, lively, _):
        pending = asyncio.create_task(fronts.ask("what", within_s=0.2))
        await until(lambda: "what" in lively)
        again = asyncio.create_task(listen(fronts, "mute", lambda message: f"{message.content}?", []))
        assert await pending == {"lively": "what!"}
        assert await fronts.ask("again", within_s=5.0) == {"lively": "again!", "mute": "again?"}
        again.cancel()


async def test_the_remaining_fronts_get_the_shares_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_AFTER_S", 0.0)

    async with two_fronts() as (fronts, lively, mute):
        await asyncio.sleep(0.01)
        assert lively == mute == ["first", ReplicaShare(0.5)]
        await fronts.ask("what", within_s=0.2)
        await asyncio.sleep(0.01)
        assert lively[-1] == ReplicaShare(1.0)
        async for message in fronts.messages("late", "first"):
            assert message.content == "first"
            break
        await asyncio.sleep(0.01)
        assert lively[-1] == ReplicaShare(1.0)


async def test_shares_follow_the_arrivals_of_each_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_AFTER_S", 0.0)

    async with two_fronts() as (fronts, lively, mute):
        await asyncio.sleep(0.01)
        fronts.arrived("lively", 99.0)
        fronts.arrived("mute", 1.0)
        fronts.arrived("nobody", 500.0)
        fronts.arrived("lively", 98.0)  # not worth a message
        await asyncio.sleep(0)
        assert (lively, mute) == (["first", ReplicaShare(0.5), ReplicaShare(1.0)], ["first", ReplicaShare(0.5)])
        fronts.arrived("mute", 147.0)
        await asyncio.sleep(0)
        assert (lively[-1], mute[-1]) == (ReplicaShare(0.5), ReplicaShare(0.6))
