"""Requests to fronts, fronts that do not reply, and the shares of fronts."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from isobatch.deployments.deployer import fronts as module
from isobatch.deployments.deployer.fronts import Fronts
from isobatch.deployments.front.messages import FrontMessage, ReplicaShare


async def listen(fronts: Fronts, name: str, answer: Callable[[FrontMessage], object], heard: list[object]) -> None:
    async for message in fronts.messages(name, "first"):
        heard.append(message.content)
        if message.number:
            reply = answer(message)
            if reply is not None:
                fronts.reply(name, message.number, reply)


def with_two(test: Callable[[Fronts, list[object], list[object]], Awaitable[None]]) -> None:
    async def run() -> None:
        fronts, lively, mute = Fronts(), [], []
        tasks = [
            asyncio.create_task(listen(fronts, "lively", lambda message: f"{message.content}!", lively)),
            asyncio.create_task(listen(fronts, "mute", lambda _: None, mute)),
        ]
        await asyncio.sleep(0)
        await test(fronts, lively, mute)
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def test_a_request_reaches_all_fronts_and_those_alive_reply() -> None:
    async def test(fronts: Fronts, lively: list[object], mute: list[object]) -> None:
        assert await fronts.ask("what", within_s=0.05) == {"lively": "what!"}
        assert lively == mute == ["first", "what"]

    with_two(test)


def test_a_silent_front_is_dropped_until_it_joins_again() -> None:
    async def test(fronts: Fronts, lively: list[object], mute: list[object]) -> None:
        await fronts.ask("what", within_s=0.05)
        assert len(fronts) == 1
        assert await fronts.ask("again", within_s=5.0) == {"lively": "again!"}
        assert mute == ["first", "what"]

    with_two(test)


def test_a_late_reply_is_ignored() -> None:
    async def test(fronts: Fronts, lively: list[object], mute: list[object]) -> None:
        fronts.reply("lively", 77, "too late")
        assert await fronts.ask("what", within_s=0.05) == {"lively": "what!"}

    with_two(test)


def test_a_cancelled_request_leaves_nothing_behind_and_drops_no_front() -> None:
    async def test(fronts: Fronts, lively: list[object], mute: list[object]) -> None:
        asked = asyncio.create_task(fronts.ask("what", within_s=600.0))
        while "what" not in lively:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert fronts._replies == {}
        assert len(fronts) == 2

    with_two(test)


def test_the_remaining_fronts_get_the_shares_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_AFTER_S", 0.0)

    async def test(fronts: Fronts, lively: list[object], mute: list[object]) -> None:
        await asyncio.sleep(0.01)
        assert lively == mute == ["first", ReplicaShare(0.5)]
        await fronts.ask("what", within_s=0.01)
        await asyncio.sleep(0.01)
        assert lively[-1] == ReplicaShare(1.0)
        async for message in fronts.messages("late", "first"):
            assert message.content == "first"
            break
        await asyncio.sleep(0.01)
        assert lively[-1] == ReplicaShare(1.0)

    with_two(test)


def test_shares_follow_the_arrivals_of_each_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_AFTER_S", 0.0)

    async def test(fronts: Fronts, lively: list[object], mute: list[object]) -> None:
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

    with_two(test)
