"""Observations: the counts of a running application's fronts in one window of time, for the controller."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import zip_longest
from math import log
from operator import add, sub
from typing import Any, NamedTuple

from isobatch.profiles.agreement import AuditedAnswers

FASTEST_S = 1e-5  # the lowest latency that has its own bin
STEP = 1.05  # the ratio of the bounds of a bin: latencies are counted to 5 %


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
        return LaunchTimes(*map(add, self, other))

    def minus(self, other: "LaunchTimes") -> "LaunchTimes":
        return LaunchTimes(*map(sub, self, other))


NO_LAUNCH = LaunchTimes(0, 0.0)


class StandbyReplica(NamedTuple):
    """A replica on a device that applications share, and whether this application uses it."""

    kind: str
    device_id: str
    is_used: bool


@dataclass(frozen=True)
class Observed:
    """The counts of one window, by one front or by several.

    `arrivals` counts all inputs, admitted or not. `refused` of them were not admitted by the front, or by the proxy
    before it, although their clients wait for as long as the SLO. `exits[k]` inputs left after block k and were
    answered. `unfinished[k]` ended before they left (late, abandoned, failed, or answered by an earlier level), and
    stood before block k then. `full` of the arrivals asked for the full network, so they count in neither of these two;
    `in_time` counts all answers before their deadline. `excused` of the arrivals failed, or their clients left before
    the deadline, so no plan is to blame.

    `audited[k]` audits of inputs that left after block k have ended, and in `missed[k]` of them the full network
    disagreed. `certain` of the inputs that left after the last block passed no open ramp, so they could not disagree.

    `..._weight` and `..._weights` are the weights of the same inputs: tokens of texts, where plans count them.
    `devices` are all devices that a plan could use now, including those in use. `standby`: None where replicas end with
    the use of their device; `parked`: all have ended. `holds_inputs`: some were still inside.
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
    excused: int = 0
    excused_weight: int = 0
    standby: tuple[StandbyReplica, ...] | None = ()
    parked: bool = False
    holds_inputs: bool = False
    could_disagree: tuple[int, ...] = ()  # `audits.left`, where the counts above are in inputs of one length

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
    def answerable(self) -> int:
        """The arrivals that plans are judged by."""
        return max(0, self.arrivals - self.excused)

    @property
    def arrivals_per_s(self) -> float:
        return self.arrivals / self.seconds if self.seconds else 0.0

    def counted_in(self, length: int | None) -> "Observed":
        """The same counts in the plan's unit: texts with `length` tokens together count as one input."""
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
            could_disagree=self.audits.left,
            refused=round(self.refused_weight / length),
            certain=round(self.certain_weight / length),
            excused=round(self.excused_weight / length),
        )

    @property
    def tokens_per_text(self) -> float | None:
        return self.arrived_weight / self.texts if self.texts else None

    @property
    def audits(self) -> AuditedAnswers:
        """What audits show of inputs: a promise is about inputs, whatever plans count."""
        if self.could_disagree:
            return AuditedAnswers(self.could_disagree, self.audited, self.missed)
        left = (*self.exits[:-1], max(0, self.exits[-1] - self.certain)) if self.certain else self.exits
        return AuditedAnswers(left, self.audited, self.missed)

    def quantile_s(self, share: float) -> float | None:
        """The latency that this share of the answers did not exceed, to 5 %; None without answers."""
        needed, count = share * sum(self.latencies.values()), 0
        for number in sorted(self.latencies):
            count += self.latencies[number]
            if count >= needed:
                return float(FASTEST_S * STEP ** (number + 0.5))
        return None


def latency_bin(seconds: float) -> int:
    return int(log(max(seconds, FASTEST_S) / FASTEST_S) / log(STEP))


def merged(observations: Iterable[Observed]) -> Observed:
    """One observation from those of several fronts, or of consecutive windows. The latest one's devices are taken.

    If the clock was set back in one of them, the sum has a negative length, too.
    """
    parts = sorted(observations, key=lambda part: part.ended_s)
    if not parts:
        raise ValueError("nothing to merge")
    started_s, shortest_s = min(part.started_s for part in parts), min(part.seconds for part in parts)
    launches = dict[LaunchShape, LaunchTimes]()
    for part in parts:
        for shape, times in part.launches.items():
            launches[shape] = launches.get(shape, NO_LAUNCH).plus(times)
    return replace(
        parts[-1],
        started_s=started_s,
        seconds=shortest_s if shortest_s < 0 else parts[-1].ended_s - started_s,
        launches=launches,
        devices=next((part.devices for part in reversed(parts) if part.devices), {}),
        latencies=sum((Counter(part.latencies) for part in parts), Counter()),
        lengths=next((part.lengths for part in reversed(parts) if part.lengths), ()),
        holds_inputs=any(part.holds_inputs for part in parts),
        **{name: reduce(_plus, (getattr(part, name) for part in parts)) for name in _SUMMED},
    )


def since(now: Observed, before: Observed | None) -> Observed:
    """The difference between two observations of the same front."""
    if before is None:
        return now
    launches = {shape: times.minus(before.launches.get(shape, NO_LAUNCH)) for shape, times in now.launches.items()}
    return replace(
        now,
        started_s=before.ended_s,
        seconds=now.ended_s - before.ended_s,
        launches={shape: times for shape, times in launches.items() if times.times > 0},
        latencies=dict(Counter(now.latencies) - Counter(before.latencies)),  # without zeros
        **{name: _plus(getattr(now, name), getattr(before, name), -1) for name in _SUMMED},
    )


# Counts that add up: numbers, and tuples of numbers by block.
_NOT_SUMMED = (
    "started_s", "seconds", "launches", "devices", "latencies", "lengths", "benched", "standby", "parked",
    "holds_inputs",
)  # fmt: skip
_SUMMED = [each.name for each in fields(Observed) if each.name not in _NOT_SUMMED]


def _plus(one: Any, other: Any, sign: int = 1) -> Any:
    if isinstance(one, tuple):
        return tuple(first + sign * second for first, second in zip_longest(one, other, fillvalue=0))
    return one + sign * other
