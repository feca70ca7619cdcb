"""What a running application saw in one stretch of time: its fronts count it, the controller asks for it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import log
from typing import NamedTuple

FASTEST_S, STEP = 1e-5, 1.05  # latencies are counted in bins of 5 %


class LaunchShape(NamedTuple):
    """Launches that should take the same time: blocks `start .. stop - 1` on `size` inputs, on one kind of device."""

    kind: str
    start: int
    stop: int
    size: int


class Took(NamedTuple):
    """How many launches, and the seconds that replicas computed for all of them together."""

    times: int
    seconds: float


@dataclass(frozen=True)
class Observed:
    """Counts of one stretch of time, by one front or by several.

    `arrivals` are inputs that asked, admitted or not. `exits[k]` inputs were answered after block k; `in_time` of them
    within their deadline. `devices` are all that the plan could have now, those it uses among them.
    """

    started_s: float
    seconds: float
    arrivals: int
    in_time: int
    exits: tuple[int, ...]
    launches: Mapping[LaunchShape, Took] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[int, int] = field(default_factory=dict)  # answers by `latency_bin`

    @property
    def ended_s(self) -> float:
        return self.started_s + self.seconds

    @property
    def answered(self) -> int:
        return sum(self.exits)

    @property
    def goodput_per_s(self) -> float:
        return self.in_time / self.seconds if self.seconds else 0.0

    @property
    def arrivals_per_s(self) -> float:
        return self.arrivals / self.seconds if self.seconds else 0.0

    def quantile_s(self, share: float) -> float | None:
        """The latency that this share of the answers kept, to 5 %; None where there is no answer.

        >>> latencies = Counter(map(latency_bin, (0.010, 0.100)))
        >>> round(Observed(0, 1, 2, 2, (2,), latencies=latencies).quantile_s(0.99), 2)
        0.1
        """
        wanted, seen = share * sum(self.latencies.values()), 0
        for each in sorted(self.latencies):
            seen += self.latencies[each]
            if seen >= wanted:
                return float(FASTEST_S * STEP ** (each + 0.5))
        return None


def latency_bin(seconds: float) -> int:
    return int(log(max(seconds, FASTEST_S) / FASTEST_S) / log(STEP))


def merged(observations: Iterable[Observed]) -> Observed:
    """Of several fronts, or of one stretch of time after the other. Of the devices the latest observation knows best.

    >>> early = Observed(0, 5, 10, 8, (6, 3), {LaunchShape("v100", 0, 2, 8): Took(2, 0.5)}, {"v100": 2})
    >>> late = Observed(5, 5, 4, 4, (1, 3), {LaunchShape("v100", 0, 2, 8): Took(1, 0.2)}, {"v100": 1})
    >>> both = merged([early, late])
    >>> both.seconds, both.arrivals, both.in_time, both.exits, both.devices
    (10, 14, 12, (7, 6), {'v100': 1})
    >>> both.launches[LaunchShape("v100", 0, 2, 8)]
    Took(times=3, seconds=0.7)
    """
    parts = sorted(observations, key=lambda part: part.ended_s)
    if not parts:
        raise ValueError("nothing to merge")
    started_s = min(part.started_s for part in parts)
    return Observed(
        started_s,
        parts[-1].ended_s - started_s,
        sum(part.arrivals for part in parts),
        sum(part.in_time for part in parts),
        tuple(sum(counts) for counts in zip_longest(*(part.exits for part in parts), fillvalue=0)),
        _launches(parts),
        next((part.devices for part in reversed(parts) if part.devices), {}),
        sum((Counter(part.latencies) for part in parts), Counter()),
    )


def _launches(parts: list[Observed]) -> dict[LaunchShape, Took]:
    launches: dict[LaunchShape, Took] = {}
    for part in parts:
        for shape, took in part.launches.items():
            before = launches.get(shape, Took(0, 0.0))
            launches[shape] = Took(before.times + took.times, before.seconds + took.seconds)
    return launches


def since(now: Observed, before: Observed | None) -> Observed:
    """What one front counted between two times of asking.

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
        launches=_new_launches(now.launches, before.launches),
        latencies=dict(Counter(now.latencies) - Counter(before.latencies)),  # which leaves out what did not grow
    )


def _new_launches(now: Mapping[LaunchShape, Took], before: Mapping[LaunchShape, Took]) -> dict[LaunchShape, Took]:
    none = Took(0, 0.0)
    both = {shape: (took, before.get(shape, none)) for shape, took in now.items()}
    return {
        shape: Took(late.times - early.times, late.seconds - early.seconds)
        for shape, (late, early) in both.items()
        if late.times > early.times
    }
