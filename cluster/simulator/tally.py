"""Counts of a simulated run, in memory that does not grow with it: histograms by window of time."""

from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from isobatch.cluster.simulator.event_loop import Departure
from isobatch.deployments.dispatch.messages import Ending, Launch, RowKind
from isobatch.deployments.front.observed import FASTEST_S as FINEST_S
from isobatch.deployments.front.observed import NO_LAUNCH, STEP, LaunchShape, LaunchTimes, Observed, since

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LaunchKey = tuple[str, str, int, int, int]  # group, kind, blocks, size
WINDOWS = 200  # of equal time, for the pictures over time
FASTEST_S = 1e-6  # latencies below it fall into the first bin
SLOWEST_S = 1e3  # latencies above it fall into the last bin
BINS = 4096  # so that a bin is half a percent wide
FLUSH = 1 << 16  # latencies that are collected before they are counted


class Tally:
    """Counts what happens, by window; the answers' latencies in bins of half a percent."""

    def __init__(self, seconds: float, slo_s: float, num_blocks: int) -> None:
        self.seconds, self.slo_s = seconds, slo_s
        self.arrived, self.good, self.refused, self.expired = (np.zeros(WINDOWS, np.int64) for _ in range(4))
        self.launched: dict[LaunchKey, list[float]] = {}  # how many, and their seconds
        self.launched_since_s, self._launched_before = 0.0, dict[LaunchKey, tuple[float, float]]()
        self._exits, self.audited, self.missed = ([0] * num_blocks for _ in range(3))
        self.arrived_weight, self.good_weight, self._exit_weights = 0, 0, [0] * num_blocks
        self.refused_weight = 0
        self._full = self._full_weight = 0  # arrivals that asked for the whole network; not in the exits
        self._unfinished, self._unfinished_weights = ([0] * num_blocks for _ in range(2))
        self._certain = self._certain_weight = 0  # exits at the end that no open ramp could have answered
        self._bins = np.zeros((WINDOWS, BINS), np.int32)
        self._observed_bins = np.zeros(BINS, np.int64)
        self._ends_s: list[float] = []
        self._latencies_s: list[float] = []
        self._before = Observed(0.0, 0.0, 0, 0, (0,) * num_blocks)

    def window(self, at_s: float) -> int:
        """The window of this time; all that happens after the last arrival belongs to the last window."""
        return min(int(at_s / self.seconds * WINDOWS), WINDOWS - 1)

    def arrive(self, times_s: Floats, weight: int, full: int = 0, full_weight: int = 0) -> None:
        self._full += full
        self._full_weight += full_weight
        self.arrived_weight += weight
        self.arrived += np.bincount(self._windows(times_s), minlength=WINDOWS)

    def refuse(self, at_s: float, weight: int) -> None:
        self.refused[self.window(at_s)] += 1
        self.refused_weight += weight

    def lose(self, ending: Ending, at_s: float) -> None:
        self.expired[self.window(at_s)] += len(ending.tickets)
        for block, weight in ending.unfinished:
            self._unfinished[block] += 1
            self._unfinished_weights[block] += weight

    def launch(self, launch: Launch, kind: str, took_s: float) -> None:
        key = (launch.group, kind, launch.cursor, launch.stop, launch.size)
        if (total := self.launched.get(key)) is None:
            total = self.launched[key] = [0, 0.0]
        total[0] += 1
        total[1] += took_s

    def start_launches(self, now_s: float) -> None:
        """Begin `new_launches` again, for another plan."""
        self.launched_since_s = now_s
        self._launched_before = {key: (times, seconds) for key, (times, seconds) in self.launched.items()}

    @property
    def new_launches(self) -> dict[LaunchKey, tuple[float, float]]:
        """The launches of the running plan, as in `launched`."""
        none, before = (0.0, 0.0), self._launched_before
        both = {key: (times, seconds, *before.get(key, none)) for key, (times, seconds) in self.launched.items()}
        return {key: (late - early, all_s - early_s) for key, (late, all_s, early, early_s) in both.items()}

    def audit(self, block: int, agrees: bool) -> None:
        self.audited[block] += 1
        self.missed[block] += not agrees

    def answer(self, now_s: float, launch: Launch, departure: Departure, ends_s: Sequence[float] | None) -> None:
        """Count the rows that left; the place of each holds its arrival time."""
        places, rows = launch.places, departure.rows
        full = [row for row in rows if launch.kinds[row] == RowKind.FULL] if launch.kinds else []
        certain = departure.stop == len(self._exits) and not launch.ramps
        self._exits[departure.stop - 1] += len(rows) - len(full)
        self._certain += len(rows) - len(full) if certain else 0
        if ends_s is None:
            latencies_s = [now_s - places[row].payload for row in rows]
        else:
            latencies_s = [end_s - places[row].payload for row, end_s in zip(rows, ends_s, strict=True)]
        self._latencies_s += latencies_s
        if launch.weights:
            weights = [launch.weights[row] for row in rows]
            of_others = sum(weights) - sum([launch.weights[row] for row in full])
            self._exit_weights[departure.stop - 1] += of_others
            self._certain_weight += of_others if certain else 0
            self.good_weight += sum(compress(weights, [each <= self.slo_s * (1 + 1e-9) for each in latencies_s]))
        self._ends_s += [now_s] * len(rows)
        if len(self._latencies_s) >= FLUSH:
            self.flush()

    @property
    def lost(self) -> int:
        """Inputs that have ended without an answer."""
        return int((self.refused + self.expired).sum())

    def flush(self) -> None:
        latencies, windows = np.array(self._latencies_s), self._windows(np.array(self._ends_s))
        np.add.at(self._bins, (windows, _bins(latencies)), 1)
        self._observed_bins += np.bincount(_observed_bins(latencies), minlength=BINS)
        self.good += np.bincount(windows[latencies <= self.slo_s * (1 + 1e-9)], minlength=WINDOWS)
        self._latencies_s.clear()
        self._ends_s.clear()

    def observed(self, now_s: float, devices: Mapping[str, int]) -> Observed:
        self.flush()
        launches: dict[LaunchShape, LaunchTimes] = {}
        for (_, kind, start, stop, size), (times, seconds) in self.launched.items():
            key = LaunchShape(kind, start, stop, size)
            launches[key] = launches.get(key, NO_LAUNCH).plus(LaunchTimes(int(times), seconds))
        filled = np.flatnonzero(self._observed_bins)
        latencies = dict(zip(filled.tolist(), self._observed_bins[filled].tolist(), strict=True))
        arrived, good = int(self.arrived.sum()), int(self.good.sum())
        before, self._before = self._before, Observed(
            0.0, now_s, arrived, good, tuple(self._exits), launches, devices, latencies, self.arrived_weight,
            self.good_weight, tuple(self._exit_weights), tuple(self.audited), tuple(self.missed),
            self._full, self._full_weight, tuple(self._unfinished), tuple(self._unfinished_weights),
            refused=int(self.refused.sum()), refused_weight=self.refused_weight,
            certain=self._certain, certain_weight=self._certain_weight,
        )  # fmt: skip
        return since(self._before, before)

    def quantile_s(self, share: float) -> float:
        """This quantile of all answers' latencies; NaN when there are none."""
        return _quantile(self._bins.sum(0), share)

    @property
    def mean_s(self) -> float:
        """The mean of all answers' latencies, to half a percent; NaN when there are none."""
        counts = self._bins.sum(0)
        middles = FASTEST_S * (SLOWEST_S / FASTEST_S) ** ((np.arange(BINS) + 0.5) / (BINS - 1))
        return float(counts @ middles / counts.sum()) if counts.any() else float("nan")

    def quantiles_s(self, share: float) -> Floats:
        return np.array([_quantile(row, share) for row in self._bins])

    @property
    def answered(self) -> Ints:
        return np.asarray(self._bins.sum(1), np.int64)

    def _windows(self, at_s: Floats) -> Ints:
        return np.minimum((at_s / self.seconds * WINDOWS).astype(np.int64), WINDOWS - 1)


def _bins(latencies_s: Floats) -> Ints:
    """The bin of each latency; a latency of exactly 0 falls into the fastest one."""
    clipped = np.clip(latencies_s, FASTEST_S, SLOWEST_S)
    share = np.log(clipped / FASTEST_S) / np.log(SLOWEST_S / FASTEST_S)
    return np.asarray(share * (BINS - 1), np.int64)


def _observed_bins(latencies_s: Floats) -> Ints:
    """The bins in which a running application counts latencies, for the controller."""
    return np.asarray(np.log(np.maximum(latencies_s, FINEST_S) / FINEST_S) / np.log(STEP), np.int64)


def _quantile(counts: NDArray[np.int32], share: float) -> float:
    total = counts.sum()
    if not total:
        return float("nan")
    at = int(np.searchsorted(np.cumsum(counts), share * total))
    return float(FASTEST_S * (SLOWEST_S / FASTEST_S) ** ((at + 0.5) / (BINS - 1)))
