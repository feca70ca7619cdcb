"""The fronts that listen to the deployer: it sends them messages and collects their replies. Independent of Ray."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import Any

from deployments.front.messages import FrontMessage, ReplicaShare

SHARE_AFTER_S = 0.5
SLIGHT = 0.05  # a share that differs by less is not worth a message
NEARLY_ALL = 0.95


class Fronts:
    """Drops a front that does not reply in time as dead. If it is alive, its stream ends, and it joins again."""

    def __init__(self) -> None:
        self._sharing: asyncio.TimerHandle | None = None
        self._boxes: dict[str, asyncio.Queue[FrontMessage | None]] = {}
        self._replies: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._per_s: dict[str, float] = {}  # inputs that came to each front of late
        self._told: dict[str, float] = {}

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
        try:
            if waiting:
                await asyncio.wait(waiting.values(), timeout=within_s)
        finally:
            for front in waiting:
                del self._replies[front, number]
        for front, reply in waiting.items():
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

    def arrived(self, front: str, per_s: float) -> None:
        """So many inputs a second came to this front of late: what each may count on follows what each has to do."""
        if front in self._boxes:
            self._per_s[front] = per_s
            self._share(SLIGHT)

    def _share_soon(self) -> None:
        """Wait a little, since after the death of a deployer the fronts come back one after the other."""
        if self._sharing:
            self._sharing.cancel()
        self._sharing = asyncio.get_running_loop().call_later(SHARE_AFTER_S, self._share)

    def _share(self, slight: float = 0.0) -> None:
        """Tell each front its share, unless it hardly differs from what it was told."""
        self._per_s = {front: self._per_s.get(front, 0.0) for front in self._boxes}
        for front, share in shares(self._per_s).items():
            if not slight or abs(share - self._told.get(front, 0.0)) > slight:
                self._told[front] = share
                self._boxes[front].put_nowait(FrontMessage(0, ReplicaShare(share)))


def shares(per_s: Mapping[str, float]) -> dict[str, float]:
    """What each front may count on of every replica, by what comes to each.

    An equal part is always there for a front that was idle until now: together they may count on more than there is for
    as long as it takes until the next count, and how slow replicas have become tells them.

    >>> shares({"a": 980.0, "b": 20.0}), shares({"a": 0.0, "b": 0.0})
    ({'a': 1.0, 'b': 0.5}, {'a': 0.5, 'b': 0.5})
    """
    equal, total = 1 / max(1, len(per_s)), sum(per_s.values())
    found = {front: max(equal, rate / total if total else 0.0) for front, rate in per_s.items()}
    return {front: 1.0 if share > NEARLY_ALL else share for front, share in found.items()}
