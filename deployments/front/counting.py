"""What a front counts of its inputs, for whoever decides what should run next. A plain object."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from deployments.front.observed import Launched, Observed, Took, latency_bin


class Counting:
    """Counts only grow: who asks twice learns the difference by `since`, and nobody takes anything from anybody."""

    def __init__(self, kinds: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        self._kinds = kinds  # of devices, by replica
        self._clock = clock  # one that all fronts share, wherever they run
        self._started_s = clock()
        self._in_time = 0
        self._exits: Counter[int] = Counter()
        self._latencies: Counter[int] = Counter()
        self._times: Counter[Launched] = Counter()
        self._seconds: defaultdict[Launched, float] = defaultdict(float)
        self.arrivals = 0

    def answered(self, block: int, took_s: float, in_time: bool) -> None:
        self._exits[block] += 1
        self._latencies[latency_bin(took_s)] += 1
        self._in_time += in_time

    def launched(self, replica: str, start: int, stop: int, size: int, seconds: float) -> None:
        launched = Launched(self._kinds.get(replica, ""), start, stop, size)
        self._times[launched] += 1
        self._seconds[launched] += seconds

    def observed(self, num_blocks: int) -> Observed:
        """Everything since the start."""
        return Observed(
            self._started_s,
            self._clock() - self._started_s,
            self.arrivals,
            self._in_time,
            tuple(self._exits[block] for block in range(num_blocks)),
            {launched: Took(times, self._seconds[launched]) for launched, times in self._times.items()},
            latencies=Counter(self._latencies),
        )


def since(now: Observed, before: Observed | None) -> Observed:
    """What one front counted from one asking to the next.

    >>> first, second = Observed(0, 5, 10, 8, (6, 3)), Observed(0, 7, 14, 11, (7, 6))
    >>> since(second, first)
    Observed(started_s=5, seconds=2, arrivals=4, in_time=3, exits=(1, 3), launches={}, devices={}, latencies={})
    """
    if before is None:
        return now
    return replace(
        now,
        started_s=before.ended_s,
        seconds=now.ended_s - before.ended_s,
        arrivals=now.arrivals - before.arrivals,
        in_time=now.in_time - before.in_time,
        exits=tuple(late - early for late, early in zip(now.exits, before.exits, strict=True)),
        launches=_launches(now.launches, before.launches),
        latencies={each: n - before.latencies.get(each, 0) for each, n in now.latencies.items()},
    )


def _launches(now: Mapping[Launched, Took], before: Mapping[Launched, Took]) -> dict[Launched, Took]:
    none = Took(0, 0.0)
    both = {launched: (took, before.get(launched, none)) for launched, took in now.items()}
    return {
        launched: Took(late.times - early.times, late.seconds - early.seconds)
        for launched, (late, early) in both.items()
        if late.times > early.times
    }
