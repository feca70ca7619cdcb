"""What a front learns of itself while it works: what a request costs it, how late it is, how many it turns away."""

import random
from collections.abc import Callable
from math import ceil

_KEPT = 0.98  # of the sums over earlier requests, when one is added
_FADES_S = 0.5  # in so long a peak becomes half of what it was
_FORGOTTEN_S = 1.0  # the same, of how many were refused and answered
LONGEST_RETRY_S = 30.0


class Trend:
    """An amount by the size of a request: a straight line through what the latest requests have shown.

    >>> trend = Trend(0.0)
    >>> for size in (100, 300, 200):
    ...     trend.learn(size, 1 + 0.01 * size)
    >>> round(trend.expected(1000), 6)
    11.0
    """

    def __init__(self, first: float) -> None:
        """`first` is expected before anything was shown."""
        self._first = first
        self._count = self._size = self._amount = self._size2 = self._both = 0.0

    def learn(self, size: int, amount: float) -> None:
        self._count = _KEPT * self._count + 1.0
        self._size = _KEPT * self._size + size
        self._amount = _KEPT * self._amount + amount
        self._size2 = _KEPT * self._size2 + size * size
        self._both = _KEPT * self._both + size * amount

    def expected(self, size: int) -> float:
        """Where sizes have hardly differed, they tell no line: then the amount is taken to grow with the size."""
        if not self._count:
            return self._first
        size_mean, mean = self._size / self._count, self._amount / self._count
        spread = self._size2 / self._count - size_mean * size_mean
        rise = (self._both / self._count - size_mean * mean) / spread if spread > 0.01 * size_mean * size_mean else 0.0
        if 0.0 < rise * size_mean <= mean:
            return mean + rise * (size - size_mean)
        return mean * max(1.0, size / size_mean) if size_mean else mean


class FadingPeak:
    """The longest of late: it fades, so that one that was never seen again does not count for ever.

    >>> peak = FadingPeak()
    >>> peak.saw(0.0, 0.1)
    >>> peak.at(0.5), peak.at(1.0)
    (0.05, 0.025)
    """

    def __init__(self) -> None:
        self._seconds = self._at_s = 0.0

    def saw(self, now_s: float, seconds: float) -> None:
        if seconds > self.at(now_s):
            self._seconds, self._at_s = seconds, now_s

    def at(self, now_s: float) -> float:
        return float(self._seconds * 0.5 ** ((now_s - self._at_s) / _FADES_S)) if self._seconds else 0.0


class RetryTimes:
    """Who is refused is told when to come back: each at another time, over a range that grows with how many they are.

    What was refused in a moment should not come back in a moment. With three refused for one that is answered, they
    spread over three times as long as one alone.
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
        """When to come back, as a whole number of seconds or more: HTTP knows no others."""
        first_s = max(1.0, ceil(least_s))
        range_s = first_s + self._refused / (1.0 + self._answered)
        return min(first_s + self._chance() * range_s, LONGEST_RETRY_S)

    def _fade(self, now_s: float) -> None:
        if (since_s := now_s - self._at_s) > _FORGOTTEN_S / 20:
            kept = 0.5 ** (since_s / _FORGOTTEN_S)
            self._refused, self._answered, self._at_s = self._refused * kept, self._answered * kept, now_s
