"""What a simulated run came to, in memory that does not grow with it: histograms by window of time."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
WINDOWS = 200
FASTEST_S, SLOWEST_S, BINS = 1e-6, 1e3, 4096  # a bin is half a percent wide
FLUSH = 1 << 16


class Tally:
    """Counts what happens, by window; the answers' latencies in bins of half a percent."""

    def __init__(self, seconds: float, slo_s: float) -> None:
        self.seconds, self.slo_s = seconds, slo_s
        self.arrived, self.good, self.refused, self.expired, self.failed = (
            np.zeros(WINDOWS, np.int64) for _ in range(5)
        )
        self._bins = np.zeros((WINDOWS, BINS), np.int32)
        self._ends_s: list[float] = []
        self._latencies_s: list[float] = []

    def window(self, at_s: float) -> int:
        """What comes after the last arrival belongs to the last window."""
        return min(int(at_s / self.seconds * WINDOWS), WINDOWS - 1)

    def arrive(self, times_s: Floats) -> None:
        self.arrived += np.bincount(self._windows(times_s), minlength=WINDOWS)

    def answer(self, now_s: float, latencies_s: list[float]) -> None:
        self._latencies_s += latencies_s
        self._ends_s += [now_s] * len(latencies_s)
        if len(self._latencies_s) >= FLUSH:
            self.flush()

    def flush(self) -> None:
        latencies, windows = np.array(self._latencies_s), self._windows(np.array(self._ends_s))
        np.add.at(self._bins, (windows, _bins(latencies)), 1)
        self.good += np.bincount(windows[latencies <= self.slo_s * (1 + 1e-9)], minlength=WINDOWS)
        self._latencies_s.clear()
        self._ends_s.clear()

    def quantile_s(self, share: float) -> float:
        """Of all answers; not a number when there are none."""
        return _quantile(self._bins.sum(0), share)

    def quantiles_s(self, share: float) -> Floats:
        """The same in every window."""
        return np.array([_quantile(row, share) for row in self._bins])

    @property
    def answered(self) -> Ints:
        return np.asarray(self._bins.sum(1), np.int64)

    def _windows(self, at_s: Floats) -> Ints:
        return np.minimum((at_s / self.seconds * WINDOWS).astype(np.int64), WINDOWS - 1)


def _bins(latencies_s: Floats) -> Ints:
    """A latency of exactly 0 falls into the fastest bin."""
    clipped = np.clip(latencies_s, FASTEST_S, SLOWEST_S)
    share = np.log(clipped / FASTEST_S) / np.log(SLOWEST_S / FASTEST_S)
    return np.asarray(share * (BINS - 1), np.int64)


def _quantile(counts: NDArray[np.int32], share: float) -> float:
    total = counts.sum()
    if not total:
        return float("nan")
    at = int(np.searchsorted(np.cumsum(counts), share * total))
    return float(FASTEST_S * (SLOWEST_S / FASTEST_S) ** ((at + 0.5) / (BINS - 1)))


@dataclass
class Fill:
    """The launches of one split."""

    batch: int
    launches: int = 0
    inputs: int = 0
    busy_s: float = 0.0

    def add(self, inputs: int, busy_s: float) -> None:
        self.launches, self.inputs, self.busy_s = self.launches + 1, self.inputs + inputs, self.busy_s + busy_s

    @property
    def share(self) -> float:
        """Inputs per launch, as a share of the full batch."""
        return self.inputs / (self.launches * self.batch) if self.launches else 0.0


@dataclass(frozen=True)
class Report:
    """A finished run. Rates are per second of simulated time."""

    tally: Tally = field(repr=False)
    fills: tuple[dict[int, Fill], ...]  # of every pipeline, by the first block of each split
    cost_per_hour: float

    @property
    def arrived(self) -> int:
        return int(self.tally.arrived.sum())

    @property
    def good(self) -> int:
        """Answers within the SLO."""
        return int(self.tally.good.sum())

    @property
    def answered(self) -> int:
        return int(self.tally.answered.sum())

    @property
    def refused(self) -> int:
        return int(self.tally.refused.sum())

    @property
    def expired(self) -> int:
        return int(self.tally.expired.sum())

    @property
    def failed(self) -> int:
        return int(self.tally.failed.sum())

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.tally.seconds

    @property
    def good_share(self) -> float:
        return self.good / self.arrived if self.arrived else 1.0
