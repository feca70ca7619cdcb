"""What a launch takes on simulated devices, and who leaves it where: tables, links, jitter, stragglers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deployments.dispatch.messages import Launch
from deployments.dispatch.pools import Place
from deployments.dispatch.route import stops
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.errors import UserError


@dataclass(frozen=True)
class Outage:
    """A replica that is gone for a while. What it runs fails; nobody knows of it before it comes back."""

    replica: str
    from_s: float
    until_s: float


@dataclass(frozen=True)
class Troubles:
    """What goes wrong. Without any, launches take exactly what the tables say."""

    jitter: float = 0.0  # standard deviation of the logarithm of a launch's time
    slow: Mapping[str, float] = field(default_factory=dict)  # replica -> how many times slower it is
    fail_share: float = 0.0  # of all launches
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        if self.jitter < 0 or not 0 <= self.fail_share < 1:
            raise UserError(f"jitter = {self.jitter} must be 0 or more, fail_share = {self.fail_share} in 0..1")


@dataclass(frozen=True)
class Leg:
    """A stretch of a launch at whose end inputs may leave. `seconds[n]` is what it takes with n inputs inside.

    A replica calls its model once per leg (deployments/split.py), so that each pays what a launch costs.
    """

    stop: int
    lets_go: bool
    seconds: tuple[float, ...]


class Flight(NamedTuple):
    """A launch under way: what it will have been once it is over."""

    starts_s: float
    ends_s: float
    early: Sequence[tuple[float, Sequence[int]]]  # when, and which rows leave before the end
    last: Sequence[int]  # rows that leave at the end
    survivors: dict[int, Place]


@dataclass
class Devices:
    """The replicas of one plan. A replica computes one launch at a time and receives the next one meanwhile."""

    plan: Plan
    facts: Problem
    troubles: Troubles
    random: np.random.Generator

    def __post_init__(self) -> None:
        self.groups = {
            f"{index}-{each.kind}": tuple(f"{index}-{each.kind}/{n}" for n in range(each.replicas))
            for index, each in enumerate(self.plan.placements)
        }
        self.names = dict(zip(self.plan.placements, self.groups, strict=True))
        self._kind_of = {name: each.kind for each in self.plan.placements for name in self.groups[self.names[each]]}
        if strangers := set(self.troubles.slow) - set(self._kind_of):
            raise UserError(f"there is no replica {min(strangers)!r} to slow down: {', '.join(self._kind_of)}")
        self._free_s = dict.fromkeys(self._kind_of, 0.0)
        self._received_s = dict.fromkeys(self._kind_of, 0.0)
        self._legs: dict[tuple[str, int], tuple[Leg, ...]] = {}
        self._transfers: dict[tuple[str, int], tuple[float, ...]] = {}

    def begin(self, launch: Launch, now_s: float) -> Flight:
        replica = launch.replica
        kind = self._kind_of[replica]
        starts_s = max(self._arrives_s(kind, launch, now_s), self._free_s[replica])
        slower, took_s = self._slower(replica), 0.0
        inside: Sequence[tuple[int, Place]] = list(enumerate(launch.places))
        departures = []
        for leg in self._legs.get((kind, launch.cursor)) or self._new_legs(kind, launch):
            took_s += leg.seconds[len(inside)] * slower
            if leg.lets_go and (leaving := [row for row, place in inside if place.row <= leg.stop]):
                departures.append((starts_s + took_s, leaving))
                inside = [each for each in inside if each[1].row > leg.stop]
                if not inside:
                    break
        self._free_s[replica] = ends_s = starts_s + took_s
        last = departures.pop()[1] if departures and departures[-1][0] == ends_s else ()
        return Flight(starts_s, ends_s, departures, last, dict(inside))

    def _arrives_s(self, kind: str, launch: Launch, now_s: float) -> float:
        """One launch after another comes over a replica's link; what enters the network is small."""
        if not launch.cursor:
            return now_s
        transfer_s = self._transfer_s(kind, launch.cursor, len(launch.places))
        self._received_s[launch.replica] = max(now_s, self._received_s[launch.replica]) + transfer_s
        return self._received_s[launch.replica]

    def fails(self) -> bool:
        return bool(self.troubles.fail_share) and self.random.random() < self.troubles.fail_share

    def _slower(self, replica: str) -> float:
        factor = self.troubles.slow.get(replica, 1.0)
        return factor * self.random.lognormal(0.0, self.troubles.jitter) if self.troubles.jitter else factor

    def _new_legs(self, kind: str, launch: Launch) -> tuple[Leg, ...]:
        """Until the plan changes, every launch from this block on has the same legs."""
        table, sizes = self.facts.table(kind), np.arange(1, self._largest + 1)
        blocks_s, ramps_s = table.block_times_s(sizes), table.ramp_times_s(sizes)
        legs, start = [], launch.cursor
        for stop in stops(launch.cursor, launch.stop, launch.ramps):
            has_ramp = stop - 1 in launch.ramps
            seconds = table.launch_s + blocks_s[:, start:stop].sum(1) + (ramps_s[:, stop - 1] if has_ramp else 0.0)
            legs.append(Leg(stop, has_ramp or stop == self.facts.num_blocks, (0.0, *seconds.tolist())))
            start = stop
        self._legs[kind, launch.cursor] = found = tuple(legs)
        return found

    @property
    def _largest(self) -> int:
        return max(split.batch_size for split in self.plan.splits)

    def _transfer_s(self, kind: str, cursor: int, size: int) -> float:
        if (kind, cursor) not in self._transfers:
            source = next(self.plan.placement_of(split).kind for split in self.plan.splits if split.stop == cursor)
            link, each = self.facts.links[source, kind], self.facts.table(source).hidden_bytes[cursor - 1]
            self._transfers[kind, cursor] = tuple(link.transfer_s(n * each) for n in range(self._largest + 1))
        return self._transfers[kind, cursor][size]
