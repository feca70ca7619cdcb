"""The fronts that listen to the deployer: what is asked of all of them, and their replies. No Ray."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from typing import Any

DEAL_AFTER_S = 0.5


@dataclass(frozen=True)
class Letter:
    """Something that a front is asked; it sends its reply under the same number."""

    number: int
    content: Any


@dataclass(frozen=True)
class Dealt:
    """So many fronts share the replicas from now on."""

    fronts: int


class Fronts:
    """Who is silent when asked is taken for dead. If it lives, it finds that nobody talks to it and comes back."""

    def __init__(self) -> None:
        self._dealing: asyncio.TimerHandle | None = None
        self._boxes: dict[str, asyncio.Queue[Letter | None]] = {}
        self._replies: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._boxes)

    async def letters(self, front: str, first: Any) -> AsyncIterator[Letter]:
        """All that this front is asked from now on; at once the first."""
        box = self._boxes[front] = asyncio.Queue()
        box.put_nowait(Letter(0, first))
        self._deal_soon()
        try:
            while letter := await box.get():
                yield letter
        finally:
            if self._boxes.get(front) is box:
                del self._boxes[front]
                self._deal_soon()

    async def ask(self, content: Any, within_s: float) -> dict[str, Any]:
        """The replies of all that are alive."""
        number = next(self._numbers)
        waiting = {front: self._post(front, Letter(number, content)) for front in self._boxes}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=within_s)
        for front, reply in waiting.items():
            del self._replies[front, number]
            if not reply.done():
                self._drop(front)
        return {front: reply.result() for front, reply in waiting.items() if reply.done()}

    def reply(self, front: str, number: int, content: Any) -> None:
        reply = self._replies.get((front, number))
        if reply and not reply.done():
            reply.set_result(content)

    def _post(self, front: str, letter: Letter) -> "asyncio.Future[Any]":
        self._boxes[front].put_nowait(letter)
        reply = self._replies[front, letter.number] = asyncio.get_running_loop().create_future()
        return reply

    def _drop(self, front: str) -> None:
        if box := self._boxes.pop(front, None):
            box.put_nowait(None)
            self._deal_soon()

    def _deal_soon(self) -> None:
        """Once for all that come back after a deployer has died, one after the other."""
        if self._dealing:
            self._dealing.cancel()
        self._dealing = asyncio.get_running_loop().call_later(DEAL_AFTER_S, self._deal)

    def _deal(self) -> None:
        for box in self._boxes.values():
            box.put_nowait(Letter(0, Dealt(len(self._boxes))))
