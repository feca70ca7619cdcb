"""Places for the requests of gRPC streams: the front reads a flood no faster than it can answer it."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from math import ceil

# The share of the SLO that requests take at full load, as in plans.
LOAD = 0.8
# The same while many requests are refused.
LOAD_WHILE_REFUSING = 0.4
# Refused requests count as many above this share of the answered ones.
MANY_REFUSED = 0.05
# The least number of places, however few requests were answered recently.
LEAST_PACED = 8


class Places:
    """The number of requests of all streams together that run at once. Further requests are not read from the network.

    gRPC's flow control keeps those at the client. The number of places is that of requests that were recently answered
    in most of `slo_s`, so that each takes about that time. It is lower while some are refused, and at most `limit`.
    Each stream waits for one place. The next place goes to the client with the fewest places, however many streams it
    has; of several such clients, or streams of one client, to the one that has waited longest.
    """

    def __init__(self, limit: Callable[[], int], slo_s: float, clock: Callable[[], float]) -> None:
        self._limit, self._slo_s, self._clock = limit, slo_s, clock
        self._paced = LEAST_PACED
        self._began_s, self._answered, self._refused = clock(), 0, 0  # the present window, and its requests
        self._taken = Counter[str]()  # by client
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client; the one served last is last

    @property
    def most(self) -> int:
        return min(self._paced, self._limit())

    async def take(self, client: str) -> None:
        if not self._waiting and self._taken.total() < self.most:
            self._taken[client] += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given in this turn of the event loop
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
        if self._waiting:  # otherwise more requests might have been answered
            share = LOAD_WHILE_REFUSING if self._refused > MANY_REFUSED * self._answered else LOAD
            self._paced = max(LEAST_PACED, ceil(share * self._answered * self._slo_s / took_s))
        self._began_s, self._answered, self._refused = self._clock(), 0, 0

    def _give(self) -> None:
        client = min(self._waiting, key=lambda waiting: self._taken[waiting])
        streams = self._waiting.pop(client)
        longest = streams.popleft()
        if streams:
            self._waiting[client] = streams
        if not longest.done():  # its stream has not ended
            self._taken[client] += 1
            longest.set_result(None)
