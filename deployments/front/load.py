"""What a front learns about its own work: the cost of requests, recent delays, and times for clients to retry."""

import random
from collections.abc import Callable
from math import ceil

# The factor by which earlier requests count less in a `Trend` with each new one: about the last fifty matter.
_REMEMBERED = 0.98
# The half-life of a peak.
_PEAK_HALF_LIFE_S = 0.5
# The half-life of the numbers of refused and answered requests.
_REQUESTS_HALF_LIFE_S = 1.0
# The longest Retry-After: clients should notice soon that there is room again.
LONGEST_RETRY_S = 30.0


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


class FadingPeak:
    """The highest recent value. It fades, so that a single peak does not count for ever.

    >>> peak = FadingPeak()
    >>> peak.add(0.0, 0.1)
    >>> peak.at(0.5), peak.at(1.0)
    (0.05, 0.025)
    """

    def __init__(self) -> None:
        self._value = self._at_s = 0.0

    def add(self, now_s: float, value: float) -> None:
        if value > self.at(now_s):
            self._value, self._at_s = value, now_s

    def at(self, now_s: float) -> float:
        return float(self._value * 0.5 ** ((now_s - self._at_s) / _PEAK_HALF_LIFE_S)) if self._value else 0.0


class RetryTimes:
    """The random times after which refused clients retry, in a range that grows with the number of refused requests.

    Otherwise requests that were refused together would come back together. If three requests are refused for each that
    is answered, their retries spread over three times the range of a single one.
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
