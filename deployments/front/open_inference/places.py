"""Requests of gRPC streams take places in the front: a flood is neither read nor refused faster than it is answered."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from math import ceil

TAKEN, TAKEN_CROWDED = 0.8, 0.4  # of the SLO requests may take, as plans do; where many are refused
MANY_REFUSED = 0.05  # of those that are answered
LEAST_PACED = 8  # requests, however few were answered lately


class Places:
    """Of all streams together, so many requests are worked on at once; others are not read.

    They wait where gRPC keeps them, at the client in the end. There are as many places as requests were answered lately
    in most of `slo_s`, so that each takes about so long; fewer once some were refused, and never more than `limit` says
    now. Each stream waits for one place. Next is the client that has the fewest, however many streams it has opened; of
    several such clients, and of the streams of one, whoever has waited longest.
    """

    def __init__(self, limit: Callable[[], int], slo_s: float, clock: Callable[[], float]) -> None:
        self._limit, self._slo_s, self._clock = limit, slo_s, clock
        self._paced = LEAST_PACED
        self._began_s, self._answered, self._refused = clock(), 0, 0  # the window, and requests in it
        self._taken = Counter[str]()  # by client
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client; who was served last is last

    @property
    def most(self) -> int:
        return min(self._paced, self._limit())

    async def take(self, client: str) -> None:
        if not self._waiting and self._taken.total() < self.most:
            self._taken[client] += 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it had just been given
                self.leave(client, answered=False)
            raise

    def leave(self, client: str, answered: bool) -> None:
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._answered += answered
        self._refused += not answered
        if (took_s := self._clock() - self._began_s) >= self._slo_s:
            self._pace(took_s)
        while self._waiting and self._taken.total() < self.most:
            self._give()

    def _pace(self, took_s: float) -> None:
        if self._waiting:  # else it is not known how many more could be answered
            share = TAKEN_CROWDED if self._refused > MANY_REFUSED * self._answered else TAKEN
            self._paced = max(LEAST_PACED, ceil(share * self._answered * self._slo_s / took_s))
        self._began_s, self._answered, self._refused = self._clock(), 0, 0

    def _give(self) -> None:
        client = min(self._waiting, key=lambda each: self._taken[each])
        streams = self._waiting.pop(client)
        longest = streams.popleft()
        if streams:
            self._waiting[client] = streams
        if not longest.done():  # its stream may have ended
            self._taken[client] += 1
            longest.set_result(None)
