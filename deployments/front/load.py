"""The work of a front: the queue before reading, the cost of requests, recent delays, and when clients may retry."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import ceil, inf
from typing import TypeVar

from isobatch.deployments.front.answers import RefusedError

# The factor by which earlier requests count less in a `Trend` with each new one: about the last fifty matter.
_REMEMBERED = 0.98
_TYPICAL_S = 0.0002  # the expected processor time of a request before any was measured
_PEAK_HALF_LIFE_S = 0.5  # the half-life of a peak
_REQUESTS_HALF_LIFE_S = 1.0  # the half-life of the numbers of refused and answered requests
LONGEST_RETRY_S = 30.0  # the longest Retry-After: clients should notice soon that there is room again
SLICE_S = 0.004  # the work that one turn of the event loop lets in: short enough for health checks
_REMEMBERED_TURNS = 0.9  # the factor by which earlier turns count less in the pace with each new one
Made = TypeVar("Made")


class Trend:
    """An amount that depends on a request's size: a straight line through the values of recent requests.

    >>> trend = Trend(0.0)
    >>> for size in (100, 300, 200):
    ...     trend.learn(size, 1 + 0.01 * size)
    >>> round(trend.expected(1000), 6)
    11.0
    """

    def __init__(self, first: float) -> None:
        """`first` is expected before any request was measured."""
        self._first = first
        self._count = self._size = self._amount = self._size2 = self._both = 0.0

    def learn(self, size: int, amount: float) -> None:
        self._count = _REMEMBERED * self._count + 1.0
        self._size = _REMEMBERED * self._size + size
        self._amount = _REMEMBERED * self._amount + amount
        self._size2 = _REMEMBERED * self._size2 + size * size
        self._both = _REMEMBERED * self._both + size * amount

    def expected(self, size: int) -> float:
        """The amount at this size. If recent sizes hardly differed, the amount is assumed proportional to the size."""
        if not self._count:
            return self._first
        size_mean, mean = self._size / self._count, self._amount / self._count
        spread = self._size2 / self._count - size_mean * size_mean
        rise = (self._both / self._count - size_mean * mean) / spread if spread > 0.01 * size_mean * size_mean else 0.0
        if 0.0 < rise * size_mean <= mean:
            return mean + rise * (size - size_mean)
        return mean * max(1.0, size / size_mean) if size_mean else mean


class RequestCosts:
    """The measured costs of requests of one kind, by their size."""

    def __init__(self) -> None:
        self.work_s = Trend(_TYPICAL_S)  # processor time to read the inputs and to write the answers
        self.long_s = Trend(0.0)  # time of long work, in threads
        self.weight = Trend(1.0)  # of the inputs
        self.numbers = count()


class FadingPeak:
    """The highest recent value. It fades, so that a single peak does not count for ever. The clock may be set back.

    >>> peak = FadingPeak()
    >>> peak.add(0.0, 0.1)
    >>> peak.at(0.5), peak.at(1.0), peak.at(-3600.0)
    (0.05, 0.025, 0.1)
    """

    def __init__(self) -> None:
        self._value = self._at_s = 0.0

    def add(self, now_s: float, value: float) -> None:
        if value > self.at(now_s) or now_s < self._at_s:
            self._value, self._at_s = value, now_s

    def at(self, now_s: float) -> float:
        return float(self._value * 0.5 ** (max(0.0, now_s - self._at_s) / _PEAK_HALF_LIFE_S)) if self._value else 0.0


class RetryTimes:
    """The random times after which refused clients retry, in a range that grows with the number of refused requests.

    Otherwise requests that were refused together would come back together. With three refusals for each answer, retries
    spread over three times the usual range.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._refused = self._answered = self._at_s = 0.0

    def refused(self, now_s: float) -> None:
        self._fade(now_s)
        self._refused += 1.0

    def answered(self, now_s: float) -> None:
        self._fade(now_s)
        self._answered += 1.0

    def retry_after_s(self, least_s: float) -> float:
        """The time for one client, at least one second and `least_s`: HTTP sends whole seconds."""
        first_s = max(1.0, ceil(least_s))
        range_s = first_s + self._refused / (1.0 + self._answered)
        return min(first_s + self._chance() * range_s, LONGEST_RETRY_S)

    def _fade(self, now_s: float) -> None:
        if (since_s := now_s - self._at_s) > _REQUESTS_HALF_LIFE_S / 20:
            factor = 0.5 ** (since_s / _REQUESTS_HALF_LIFE_S)
            self._refused, self._answered, self._at_s = self._refused * factor, self._answered * factor, now_s


@dataclass(eq=False)
class _Turn:
    """A request that waits."""

    entered: "asyncio.Future[None]"
    work_s: float
    weight: int
    latest_s: float  # the last moment to enter in time


class RequestQueue:
    """Requests enter one by one, and only if they can still be answered in time.

    Reading a request and encoding its inputs blocks the front's event loop. So requests wait here, and one turn of the
    loop lets in only a few milliseconds of work: answers and health checks run in between. The delay of the requests
    ahead follows from the recent pace of the queue. A request that cannot be in time is refused at once, before its
    body is parsed. A large request takes longer, so it is refused first.

    Must be used from one event loop, with a monotonic clock. Work is in seconds of the front's processor time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[_Turn] = deque()
        self._ahead_s, self.weight = 0.0, 0  # the work and the inputs' weight of waiting requests
        self._left_s = SLICE_S  # the work that this turn of the event loop may still let in
        self._entered_s = 0.0  # the work that entered in this turn
        self.idle = True  # no request waits, and none has entered in this turn of the event loop
        self._began_s = self._ended_s = self._turn_s = 0.0  # start, end and duration of the last turn
        self._passed_s = self._took_s = 0.0  # the work of recent turns, and the time that they took

    def unseen_s(self) -> float:
        """The time that a new request may have waited until the event loop turned to it."""
        return self._turn_s if self._clock() - self._ended_s <= self._turn_s else 0.0

    def expected_s(self, work_s: float) -> float:
        """The time until work that arrives now is done."""
        pace = self._took_s / self._passed_s if self._passed_s else 1.0  # above 1: the loop does other work too
        return (self._ahead_s + work_s) * max(1.0, pace)

    def check(self, work_s: float, latest_s: float) -> None:
        """Raise `RefusedError` if work that arrives now cannot be done by `latest_s`."""
        late_s = self._clock() + self.expected_s(work_s) - latest_s
        if late_s > 0:
            raise _refused(late_s)

    async def turn(self, work_s: float, latest_s: float, weight: int = 1) -> None:
        """Wait until the request may enter. Raises `RefusedError` if that takes until after `latest_s`."""
        if not self._waiting and self._left_s > 0:
            return self._enter(work_s)
        turn = _Turn(asyncio.get_running_loop().create_future(), work_s, weight, latest_s - work_s)
        self._waiting.append(turn)
        self._ahead_s += work_s
        self.weight += weight
        self._turn_again()
        return await turn.entered

    def _enter(self, work_s: float) -> None:
        self._left_s -= work_s
        self._entered_s += work_s
        self._turn_again()

    def _turn_again(self) -> None:
        if self.idle:
            self.idle, self._began_s = False, self._clock()
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Begin another turn of the event loop."""
        now_s = self._clock()
        self._turn_s, self._ended_s, self.idle = now_s - self._began_s, now_s, True
        if self._waiting and self._entered_s:
            self._passed_s = _REMEMBERED_TURNS * self._passed_s + self._entered_s
            self._took_s = _REMEMBERED_TURNS * self._took_s + self._turn_s
        elif not self._waiting:  # the loop keeps up, so a slow turn in a rush counts less and less
            self._took_s = self._passed_s + _REMEMBERED_TURNS * (self._took_s - self._passed_s)
        self._left_s, self._entered_s = SLICE_S, 0.0
        while self._waiting and self._left_s > 0:
            turn = self._waiting.popleft()
            self._ahead_s = self._ahead_s - turn.work_s if self._waiting else 0.0
            self.weight -= turn.weight
            if turn.entered.done():  # cancelled: its client has gone
                continue
            if now_s > turn.latest_s:
                turn.entered.set_exception(_refused(now_s - turn.latest_s))
            else:
                turn.entered.set_result(None)
                self._enter(turn.work_s)
        if self._waiting:
            self._turn_again()


class LongWork:
    """Work that would block the event loop for long: threads do it, `at_once` at a time, in order."""

    def __init__(self, at_once: int, clock: Callable[[], float]) -> None:
        self._clock, self._at_once, self._expected_s = clock, at_once, 0.0
        self._turns = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, "long-work")  # they start when they are needed

    @property
    def busy(self) -> bool:
        """Whether more work would wait."""
        return self._turns.locked()

    @property
    def ahead_s(self) -> float:
        """The expected time until more work would begin."""
        return self._expected_s / self._at_once

    async def run(
        self, work: Callable[[], Made], latest_s: float = inf, expected_s: float = 0.0,
        learn: Callable[[float], None] = lambda took_s: None,
    ) -> Made:  # fmt: skip
        """The result of the work, whose time `learn` gets. Raises `RefusedError` if it waits until after `latest_s`."""
        waits = self.busy
        self._expected_s += expected_s
        try:
            async with self._turns:
                began_s = self._clock()
                if waits and began_s > latest_s:
                    raise _refused(began_s - latest_s)
                made = await self._to_its_end(work)
                learn(self._clock() - began_s)
                return made
        finally:
            self._expected_s -= expected_s

    async def _to_its_end(self, work: Callable[[], Made]) -> Made:
        """The result of the work. Threads cannot be stopped: a cancelled request keeps its turn until its work ends."""
        made = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            while not made.done():  # a request may be cancelled again, as its deadline passes
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([made])
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _refused(late_s: float) -> RefusedError:
    return RefusedError(503, "refused: the deadline cannot be met with what is ahead", retry_after_s=late_s)
