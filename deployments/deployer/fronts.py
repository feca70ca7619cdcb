"""The fronts that listen to the deployer: it sends them messages and collects their replies. Independent of Ray."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from deployments.front.messages import FrontMessage, SharedBy

SHARE_AFTER_S = 0.5


class Fronts:
    """Drops a front that does not reply in time as dead. If it is alive, its stream ends, and it joins again."""

    def __init__(self) -> None:
        self._sharing: asyncio.TimerHandle | None = None
        self._boxes: dict[str, asyncio.Queue[FrontMessage | None]] = {}
        self._replies: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._boxes)

    async def messages(self, front: str, first: Any) -> AsyncIterator[FrontMessage]:
        """The messages and questions for this front from now on, beginning with `first`."""
        box = self._boxes[front] = asyncio.Queue()
        box.put_nowait(FrontMessage(0, first))
        self._share_soon()
        try:
            while message := await box.get():
                yield message
        finally:
            if self._boxes.get(front) is box:
                del self._boxes[front]
                self._share_soon()

    async def ask(self, content: Any, within_s: float) -> dict[str, Any]:
        """Ask all fronts; returns the replies of those that are alive, by front."""
        number = next(self._numbers)
        waiting = {front: self._post(front, FrontMessage(number, content)) for front in self._boxes}
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

    def _post(self, front: str, message: FrontMessage) -> "asyncio.Future[Any]":
        self._boxes[front].put_nowait(message)
        reply = self._replies[front, message.number] = asyncio.get_running_loop().create_future()
        return reply

    def _drop(self, front: str) -> None:
        if box := self._boxes.pop(front, None):
            box.put_nowait(None)
            self._share_soon()

    def _share_soon(self) -> None:
        """Wait a little, since after the death of a deployer the fronts come back one after the other."""
        if self._sharing:
            self._sharing.cancel()
        self._sharing = asyncio.get_running_loop().call_later(SHARE_AFTER_S, self._share)

    def _share(self) -> None:
        for box in self._boxes.values():
            box.put_nowait(FrontMessage(0, SharedBy(len(self._boxes))))
