"""Sends the deployer's messages to all fronts, collects their replies and gives each its share. Independent of Ray."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import Any

from isobatch.deployments.front.messages import FrontMessage, ReplicaShare

SHARE_AFTER_S = 0.5  # after the last front joined or left
SMALL_CHANGE = 0.05  # of a share: not worth a message
NEARLY_ALL = 0.95  # a larger share counts as all


class Fronts:
    """The fronts by name. A front that does not reply in time is dropped: if it runs, it notices that its stream ends,
    and joins again."""

    def __init__(self) -> None:
        self._sharing: asyncio.TimerHandle | None = None
        self._boxes: dict[str, asyncio.Queue[FrontMessage | None]] = {}
        self._replies: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._arrivals_per_s: dict[str, float] = {}  # by front, as it last reported
        self._sent_shares: dict[str, float] = {}

    async def messages(self, front: str, first: Any) -> AsyncIterator[FrontMessage]:
        """The messages and requests for this front from now on, beginning with `first`."""
        if lost := self._boxes.get(front):  # the front has lost that stream, which would never end: end it
            lost.put_nowait(None)
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
        """Send a request to all fronts; returns the replies of those that run, by front."""
        number, boxes = next(self._numbers), self._boxes.copy()
        waiting = {front: asyncio.get_running_loop().create_future() for front in boxes}
        for front, reply in waiting.items():
            self._replies[front, number] = reply
            boxes[front].put_nowait(FrontMessage(number, content))
        try:
            if waiting:
                await asyncio.wait(waiting.values(), timeout=within_s)
        finally:
            for front in waiting:
                del self._replies[front, number]
        for front, reply in waiting.items():
            if not reply.done() and self._boxes.get(front) is boxes[front]:  # it has not joined again meanwhile
                self._boxes.pop(front).put_nowait(None)
                self._share_soon()
        return {front: reply.result() for front, reply in waiting.items() if reply.done()}

    def reply(self, front: str, number: int, content: Any) -> None:
        reply = self._replies.get((front, number))
        if reply and not reply.done():
            reply.set_result(content)

    def arrived(self, front: str, per_s: float) -> None:
        """Note how many inputs per second come to this front: a front's share of the replicas follows its load."""
        if front in self._boxes:
            self._arrivals_per_s[front] = per_s
            self._share(SMALL_CHANGE)

    def _share_soon(self) -> None:
        """Share after a short wait: when a new deployer replaces a dead one, the fronts join one after another."""
        if self._sharing:
            self._sharing.cancel()
        self._sharing = asyncio.get_running_loop().call_later(SHARE_AFTER_S, self._share)

    def _share(self, small_change: float = 0.0) -> None:
        """Send each front its share, unless it differs by no more than `small_change` from the one sent before."""
        self._arrivals_per_s = {front: self._arrivals_per_s.get(front, 0.0) for front in self._boxes}
        self._sent_shares = {front: self._sent_shares.get(front, 0.0) for front in self._boxes}
        for front, share in shares(self._arrivals_per_s).items():
            if not small_change or abs(share - self._sent_shares[front]) > small_change:
                self._sent_shares[front] = share
                self._boxes[front].put_nowait(FrontMessage(0, ReplicaShare(share)))


def shares(arrivals_per_s: Mapping[str, float]) -> dict[str, float]:
    """The share of every replica that each front may use, in proportion to its arrivals.

    No front has less than an equal part, since it may have been idle until now. So the shares may add up to more than 1
    until the next count; meanwhile the fronts notice that replicas have become slower.

    >>> shares({"a": 980.0, "b": 20.0}), shares({"a": 0.0, "b": 0.0})
    ({'a': 1.0, 'b': 0.5}, {'a': 0.5, 'b': 0.5})
    """
    equal, total = 1 / max(1, len(arrivals_per_s)), sum(arrivals_per_s.values())
    by_front = {front: max(equal, rate / total if total else 0.0) for front, rate in arrivals_per_s.items()}
    return {front: 1.0 if share > NEARLY_ALL else share for front, share in by_front.items()}
