"""The number of requests of streams that run at once, and the client that is next."""

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.front.open_inference.rpc import Places
from isobatch.deployments.front.proxy import MOST


class Queue:
    """Clients that ask for places, and who got one."""

    def __init__(self) -> None:
        self.most, self.asked = 2, 0
        self.inside: list[str] = []
        self.served: list[int] = []
        self.waiting: dict[asyncio.Task[None], tuple[int, str]] = {}
        self.places = Places(lambda: self.most, 1.0, lambda: 0.0)

    async def ask(self, number: int, client: str) -> None:
        await self.places.take(client)
        fewest = min(self.inside.count(other) for _, other in self.waiting.values())
        assert self.inside.count(client) == fewest, "whoever has the fewest is next"
        before = [each for each, other in self.waiting.values() if other == client]
        assert number == min(before), "and of one client who has waited longest"
        del self.waiting[next(task for task, (each, _) in self.waiting.items() if each == number)]
        self.served.append(number)
        self.inside.append(client)

    async def play(self, step: str) -> None:
        match step.split():
            case "ask", client:
                self.waiting[asyncio.create_task(self.ask(self.asked, client))] = (self.asked, client)
                self.asked += 1
            case ["leave"] if self.inside:
                self.places.leave(self.inside.pop(0), answered=True)
            case ["give", "up"] if self.waiting:
                task, _ = self.waiting.popitem()
                task.cancel()
            case ["more" | "fewer"]:
                self.most = max(1, self.most + (1 if step == "more" else -1))
        for _ in range(3):
            await asyncio.sleep(0)


@given(st.lists(st.sampled_from(["ask a", "ask a", "ask b", "ask c", "leave", "leave", "more", "fewer", "give up"])))
def test_places_are_limited_and_go_to_the_client_with_the_fewest(steps: list[str]) -> None:
    async def act() -> None:
        queue = Queue()
        for step in steps:
            before = len(queue.served)
            await queue.play(step)
            assert len(queue.served) == before or len(queue.inside) <= queue.most
            assert queue.inside or not queue.waiting, "somebody must be there who lets the next one in"
        while queue.waiting:
            assert queue.inside, "nobody is forgotten"
            await queue.play("leave")

    asyncio.run(act())


@pytest.mark.parametrize(("alone_s", "per_s"), [(0.01, 1000.0), (0.2, 200.0), (0.5, 20.0)])
async def test_requests_of_streams_take_most_of_the_slo(alone_s: float, per_s: float) -> None:
    """Of a server that answers so many a second, each after so long at least: all it can are answered, in time."""

    now_s, slo_s = 0.0, 1.0
    places = Places(lambda: MOST, slo_s, lambda: now_s)
    entered, times_s = deque[float](), list[float]()

    async def flood() -> None:
        while True:
            await places.take("one")
            entered.append(now_s)

    floods = [asyncio.create_task(flood()) for _ in range(5)]
    for _ in range(round(8 * per_s)):
        now_s += 1 / per_s
        for _ in range(3):
            await asyncio.sleep(0)
        if entered and now_s - entered[0] >= alone_s:
            times_s.append(now_s - entered.popleft())
            places.leave("one", answered=True)
    late = times_s[len(times_s) // 2 :]
    assert max(late) <= slo_s
    assert len(times_s) > 0.7 * 8 * per_s
    for each in floods:
        each.cancel()


async def test_a_pause_takes_no_places_away() -> None:
    """Of bursts of 400 requests, each of which takes a tenth of the SLO, the second one takes no longer to begin."""
    now_s, slo_s = 0.0, 1.0
    places = Places(lambda: MOST, slo_s, lambda: now_s)

    async def burst() -> float:
        nonlocal now_s
        began_s, waiting = now_s, {asyncio.create_task(places.take("one")) for _ in range(400)}
        while waiting:
            for _ in range(3):
                await asyncio.sleep(0)
            now_s += 0.1 * slo_s
            for entered in [task for task in waiting if task.done()]:
                waiting.remove(entered)
                places.leave("one", answered=True)
        return now_s - began_s

    first_s = await burst()
    now_s += 3600.0
    assert await burst() < 0.6 * first_s
