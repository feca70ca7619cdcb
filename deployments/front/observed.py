"""What a running application saw in one stretch of time: its fronts count it, the controller asks for it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import log
from typing import NamedTuple

from profiles.agreement import Agreement, AuditedAnswers

FASTEST_S, STEP = 1e-5, 1.05  # latencies are counted in bins of 5 %


class LaunchShape(NamedTuple):
    """Launches that should take the same time: blocks `start .. stop - 1` on `size` inputs, on one kind of device."""

    kind: str
    start: int
    stop: int
    size: int


class LaunchTimes(NamedTuple):
    """How many launches, and the seconds that replicas computed for all of them together.

    `followed` of them were waiting when the launch before them ended. Between the two their replicas computed nothing
    for `between_s`.
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
    """Counts of one stretch of time, by one front or by several.

    `arrivals` are inputs that asked, admitted or not. `refused` of them were not admitted though their clients wait for
    as long as the application's SLO, here or by the proxy before the front. `exits[k]` inputs were answered after block
    k because they left there; `unfinished[k]` ended before they left (late, given up, failed, or answered by the level
    before), and stood before block k then. `full` of the arrivals asked for the whole network, so they are in neither,
    however they ended; `in_time` counts all answers within their deadline. `devices` are all that the plan could have
    now, those it uses among them. `arrived_weight`, `in_time_weight`, `exit_weights`, `full_weight` and
    `unfinished_weights` are what these inputs weigh: texts their tokens, where plans count them.
    Of those that left after block k, audits of `audited[k]` have ended, and the full network disagreed in `missed[k]`.
    `certain` of those that left after the last block could not disagree: they passed no ramp that might let them go.
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
    # Where what is counted above is inputs of one length (`counted_in`): the texts that arrived. Where it is tokens
    # that are written: the texts that have ended, and their tokens.
    texts: int = 0
    ended: int = 0
    lengths: tuple[tuple[int, int], ...] = ()  # of the latest texts that were written: of the prompt, and of the answer
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
        """Those that left, of the inputs that might have left anywhere."""
        return sum(self.exits)

    @property
    def goodput_per_s(self) -> float:
        return self.in_time / self.seconds if self.seconds else 0.0

    @property
    def arrivals_per_s(self) -> float:
        return self.arrivals / self.seconds if self.seconds else 0.0

    def counted_in(self, length: int | None) -> "Observed":
        """The same as plans count it: texts that weigh `length` tokens together are an input.

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
        """As far as the audits of this time tell."""
        return self.audits.agreement()

    @property
    def audits(self) -> AuditedAnswers:
        left = (*self.exits[:-1], max(0, self.exits[-1] - self.certain)) if self.certain else self.exits
        return AuditedAnswers(left, self.audited, self.missed)

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
        for shape, took in part.launches.items():
            launches[shape] = launches.get(shape, NO_LAUNCH).plus(took)
    return launches


def since(now: Observed, before: Observed | None) -> Observed:
    """What one front counted between two times of asking.

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
        exits=_more(now.exits, before.exits),
        launches=_new_launches(now.launches, before.launches),
        latencies=dict(Counter(now.latencies) - Counter(before.latencies)),  # which leaves out what did not grow
        arrived_weight=now.arrived_weight - before.arrived_weight,
        in_time_weight=now.in_time_weight - before.in_time_weight,
        exit_weights=_more(now.exit_weights, before.exit_weights),
        audited=_more(now.audited, before.audited),
        missed=_more(now.missed, before.missed),
        full=now.full - before.full,
        full_weight=now.full_weight - before.full_weight,
        unfinished=_more(now.unfinished, before.unfinished),
        unfinished_weights=_more(now.unfinished_weights, before.unfinished_weights),
        texts=now.texts - before.texts,
        ended=now.ended - before.ended,
        refused=now.refused - before.refused,
        refused_weight=now.refused_weight - before.refused_weight,
        certain=now.certain - before.certain,
        certain_weight=now.certain_weight - before.certain_weight,
    )


def _more(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(late - early for late, early in zip_longest(now, before, fillvalue=0))


def _new_launches(
    now: Mapping[LaunchShape, LaunchTimes], before: Mapping[LaunchShape, LaunchTimes]
) -> dict[LaunchShape, LaunchTimes]:
    news = {shape: took.minus(before.get(shape, NO_LAUNCH)) for shape, took in now.items()}
    return {shape: took for shape, took in news.items() if took.times > 0}
