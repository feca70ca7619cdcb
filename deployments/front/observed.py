"""Observations: the counts of a running application's fronts in one window of time, for the controller."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import log
from typing import NamedTuple

from isobatch.profiles.agreement import Agreement, AuditedAnswers

# The lowest latency that has its own bin.
FASTEST_S = 1e-5
# The ratio of the bounds of a bin: latencies are counted to 5 %.
STEP = 1.05


class LaunchShape(NamedTuple):
    """Launches that should take the same time: blocks `start .. stop - 1` on `size` inputs, on one kind of device."""

    kind: str
    start: int
    stop: int
    size: int


class LaunchTimes(NamedTuple):
    """The number of launches, and the seconds that replicas computed for all of them together.

    `followed` of them waited for the launch before them. `between_s` is the idle time of their replicas before them.
    """

    times: int
    seconds: float
    followed: int = 0
    between_s: float = 0.0

    def plus(self, other: "LaunchTimes") -> "LaunchTimes":
        times, followed = self.times + other.times, self.followed + other.followed
        return LaunchTimes(times, self.seconds + other.seconds, followed, self.between_s + other.between_s)

    def minus(self, other: "LaunchTimes") -> "LaunchTimes":
        return self.plus(LaunchTimes(-other.times, -other.seconds, -other.followed, -other.between_s))


NO_LAUNCH = LaunchTimes(0, 0.0)


@dataclass(frozen=True)
class Observed:
    """The counts of one window, by one front or by several.

    `arrivals` counts all inputs, admitted or not. `refused` of them were not admitted by the front, or by the proxy
    before it, although their clients wait for as long as the SLO. `exits[k]` inputs left behind block k and were
    answered. `unfinished[k]` ended before they left (late, abandoned, failed, or answered by an earlier level), and
    stood before block k then. `full` of the arrivals asked for the full network, so they count in neither of these two;
    `in_time` counts all answers before their deadline.

    `audited[k]` audits of inputs that left behind block k have ended, and in `missed[k]` of them the full network
    disagreed. `certain` of the inputs that left behind the last block passed no open ramp, so they could not disagree.

    `..._weight` and `..._weights` are the weights of the same inputs: tokens of texts, where plans count them.
    `devices` are all devices that a plan could use now, including those in use.
    """

    started_s: float
    seconds: float
    arrivals: int
    in_time: int
    exits: tuple[int, ...]
    launches: Mapping[LaunchShape, LaunchTimes] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[int, int] = field(default_factory=dict)  # answers by `latency_bin`
    arrived_weight: int = 0
    in_time_weight: int = 0
    exit_weights: tuple[int, ...] = ()
    audited: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()
    full: int = 0
    full_weight: int = 0
    unfinished: tuple[int, ...] = ()
    unfinished_weights: tuple[int, ...] = ()
    texts: int = 0  # texts that arrived, where the counts above are in inputs of one length (`counted_in`)
    ended: int = 0  # texts that were finished, where the counts above are in tokens
    lengths: tuple[tuple[int, int], ...] = ()  # tokens of the latest finished texts: of the prompt, and of the answer
    refused: int = 0
    refused_weight: int = 0
    benched: tuple[tuple[str, str], ...] = ()  # replicas that are too slow to be used, and their kinds
    certain: int = 0
    certain_weight: int = 0

    @property
    def ended_s(self) -> float:
        return self.started_s + self.seconds

    @property
    def answered(self) -> int:
        """The answered inputs, without those that asked for the full network."""
        return sum(self.exits)

    @property
    def goodput_per_s(self) -> float:
        return self.in_time / self.seconds if self.seconds else 0.0

    @property
    def arrivals_per_s(self) -> float:
        return self.arrivals / self.seconds if self.seconds else 0.0

    def counted_in(self, length: int | None) -> "Observed":
        """The same counts in the plan's unit: texts with `length` tokens together count as one input.

        >>> texts = Observed(0, 1, 2, 1, (1, 1), arrived_weight=90, in_time_weight=30, exit_weights=(30, 60))
        >>> inputs = texts.counted_in(30)
        >>> inputs.arrivals, inputs.in_time, inputs.exits, inputs.tokens_per_text
        (3, 1, (1, 2), 45.0)
        """
        if length is None:
            return self
        return replace(
            self,
            arrivals=round(self.arrived_weight / length),
            in_time=round(self.in_time_weight / length),
            exits=tuple(round(weight / length) for weight in self.exit_weights),
            full=round(self.full_weight / length),
            unfinished=tuple(round(weight / length) for weight in self.unfinished_weights),
            texts=self.arrivals,
            refused=round(self.refused_weight / length),
            certain=round(self.certain_weight / length),
        )

    @property
    def tokens_per_text(self) -> float | None:
        return self.arrived_weight / self.texts if self.texts else None

    def agreement(self) -> Agreement | None:
        """The agreement with the full network, as estimated from the audits of this window."""
        return self.audits.agreement()

    @property
    def audits(self) -> AuditedAnswers:
        left = (*self.exits[:-1], max(0, self.exits[-1] - self.certain)) if self.certain else self.exits
        return AuditedAnswers(left, self.audited, self.missed)

    def quantile_s(self, share: float) -> float | None:
        """The latency that this share of the answers did not exceed, to 5 %; None without answers.

        >>> latencies = Counter(map(latency_bin, (0.010, 0.100)))
        >>> round(Observed(0, 1, 2, 2, (2,), latencies=latencies).quantile_s(0.99), 2)
        0.1
        """
        needed, count = share * sum(self.latencies.values()), 0
        for number in sorted(self.latencies):
            count += self.latencies[number]
            if count >= needed:
                return float(FASTEST_S * STEP ** (number + 0.5))
        return None


def latency_bin(seconds: float) -> int:
    """The number of the bin in which a latency is counted."""
    return int(log(max(seconds, FASTEST_S) / FASTEST_S) / log(STEP))


def merged(observations: Iterable[Observed]) -> Observed:
    """One observation from those of several fronts, or of consecutive windows. The latest one's devices are taken.

    >>> early = Observed(0, 5, 10, 8, (6, 3), {LaunchShape("v100", 0, 2, 8): LaunchTimes(2, 0.5)}, {"v100": 2})
    >>> late = Observed(5, 5, 4, 4, (1, 3), {LaunchShape("v100", 0, 2, 8): LaunchTimes(1, 0.2)}, {"v100": 1})
    >>> both = merged([early, late])
    >>> both.seconds, both.arrivals, both.in_time, both.exits, both.devices
    (10, 14, 12, (7, 6), {'v100': 1})
    >>> both.launches[LaunchShape("v100", 0, 2, 8)]
    LaunchTimes(times=3, seconds=0.7, followed=0, between_s=0.0)
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
        _sums(part.exits for part in parts),
        _launches(parts),
        next((part.devices for part in reversed(parts) if part.devices), {}),
        sum((Counter(part.latencies) for part in parts), Counter()),
        sum(part.arrived_weight for part in parts),
        sum(part.in_time_weight for part in parts),
        _sums(part.exit_weights for part in parts),
        _sums(part.audited for part in parts),
        _sums(part.missed for part in parts),
        sum(part.full for part in parts),
        sum(part.full_weight for part in parts),
        _sums(part.unfinished for part in parts),
        _sums(part.unfinished_weights for part in parts),
        sum(part.texts for part in parts),
        sum(part.ended for part in parts),
        next((part.lengths for part in reversed(parts) if part.lengths), ()),
        refused=sum(part.refused for part in parts),
        refused_weight=sum(part.refused_weight for part in parts),
        benched=parts[-1].benched,
        certain=sum(part.certain for part in parts),
        certain_weight=sum(part.certain_weight for part in parts),
    )


def _sums(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """
    >>> _sums([(1, 2), (), (3,)])
    (4, 2)
    """
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _launches(parts: list[Observed]) -> dict[LaunchShape, LaunchTimes]:
    launches: dict[LaunchShape, LaunchTimes] = {}
    for part in parts:
        for shape, times in part.launches.items():
            launches[shape] = launches.get(shape, NO_LAUNCH).plus(times)
    return launches


def since(now: Observed, before: Observed | None) -> Observed:
    """The difference between two observations of the same front.

    >>> first, second = Observed(0, 5, 10, 8, (6, 3)), Observed(0, 7, 14, 11, (7, 6))
    >>> between = since(second, first)
    >>> between.started_s, between.seconds, between.arrivals, between.in_time, between.exits
    (5, 2, 4, 3, (1, 3))
    """
    if before is None:
        return now
    return replace(
        now,
        started_s=before.ended_s,
        seconds=now.ended_s - before.ended_s,
        arrivals=now.arrivals - before.arrivals,
        in_time=now.in_time - before.in_time,
        exits=_difference(now.exits, before.exits),
        launches=_new_launches(now.launches, before.launches),
        latencies=dict(Counter(now.latencies) - Counter(before.latencies)),  # without zeros
        arrived_weight=now.arrived_weight - before.arrived_weight,
        in_time_weight=now.in_time_weight - before.in_time_weight,
        exit_weights=_difference(now.exit_weights, before.exit_weights),
        audited=_difference(now.audited, before.audited),
        missed=_difference(now.missed, before.missed),
        full=now.full - before.full,
        full_weight=now.full_weight - before.full_weight,
        unfinished=_difference(now.unfinished, before.unfinished),
        unfinished_weights=_difference(now.unfinished_weights, before.unfinished_weights),
        texts=now.texts - before.texts,
        ended=now.ended - before.ended,
        refused=now.refused - before.refused,
        refused_weight=now.refused_weight - before.refused_weight,
        certain=now.certain - before.certain,
        certain_weight=now.certain_weight - before.certain_weight,
    )


def _difference(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(late - early for late, early in zip_longest(now, before, fillvalue=0))


def _new_launches(
    now: Mapping[LaunchShape, LaunchTimes], before: Mapping[LaunchShape, LaunchTimes]
) -> dict[LaunchShape, LaunchTimes]:
    new = {shape: times.minus(before.get(shape, NO_LAUNCH)) for shape, times in now.items()}
    return {shape: times for shape, times in new.items() if times.times > 0}
