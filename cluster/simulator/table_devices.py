"""Simulated devices. They compute from tables and links how long a launch takes, and at which block inputs leave."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from isobatch.cluster.simulator.event_loop import Departure, HostCosts, LaunchSchedule
from isobatch.deployments.dispatch.messages import Launch, Place, RowKind
from isobatch.deployments.dispatch.route import named_groups, seconds_at, stops
from isobatch.optimizer.plan import Placement, Plan
from isobatch.optimizer.problem import Problem


class LaunchPart(NamedTuple):
    """A part of a launch at whose end inputs may leave. `seconds[n]` is its time with n inputs inside.

    Where inputs are texts, `seconds[0]` is its time with hardly any tokens. The first part of a launch includes the
    cost of the launch, each later part the cost of a stop.
    """

    stop: int
    lets_go: bool
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class _Post:
    """A placement and the times of its launches, which are computed once for each block that launches start from."""

    pipeline: Plan
    placement: Placement
    # By the block before a launch, and whether it has ramps.
    parts: dict[tuple[int, bool], tuple[LaunchPart, ...]] = field(default_factory=dict)
    transfers_s: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by size; empty where nothing travels
    turn_s: float = 0.0  # the time from the end of a launch until its replica has an order that was not sent ahead


def group_names(plan: Plan, facts: Problem) -> list[str]:
    numbers = count()
    return named_groups(plan, facts, lambda each: f"{next(numbers)}-{each.kind}")


class TableDevices:
    """The replicas of a plan, which may change. Each computes one launch at a time and receives the next meanwhile."""

    def __init__(
        self, plan: Plan, facts: Problem, jitter: float, random: np.random.Generator, host: HostCosts | None = None
    ) -> None:
        self.facts, self._jitter, self._random, self._host = facts, jitter, random, host
        self._turn_s = host.turn_s if host else 0.0
        self._free_s: dict[str, float] = {}
        self._received_s: dict[str, float] = {}
        self.follow(plan)

    def follow(self, plan: Plan, benched: Collection[str] = ()) -> None:
        """Switch to this plan. Benched replicas work only where others do not suffice, in their kind's last group."""
        free = {kind: self._of_kind(kind, used, benched) for kind, used in plan.devices().items()}
        posts = [self._post(pipeline, placement) for pipeline in plan.pipelines for placement in pipeline.placements]
        names = group_names(plan, self.facts)
        self._posts = dict(zip(names, posts, strict=True))
        self._groups: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
        last_of_kind = {post.placement.kind: number for number, post in enumerate(posts)}
        for number, (name, post) in enumerate(zip(names, posts, strict=True)):
            kind = post.placement.kind
            here = islice(free[kind], None if number == last_of_kind[kind] else post.placement.replicas)
            self._groups[name] += tuple(here)
        self._largest = max(split.batch_size for each in plan.all_placements for split in each.splits)

    def _post(self, pipeline: Plan, placement: Placement) -> _Post:
        """Where splits take turns, an order takes its time to its replica; host costs simulate that time."""
        waits = placement.local and len(placement.splits) > 1 and not self._host
        return _Post(pipeline, placement, turn_s=self.facts.turn_s(placement.kind) if waits else 0.0)

    def _of_kind(self, kind: str, used: int, benched: Collection[str]) -> Iterator[str]:
        """The replicas of a kind that a plan uses, benched ones last."""
        slow = {each for each in benched if each.rpartition("/")[0] == kind}
        count = max(used, min(used + len(slow), self.facts.device(kind).count)) if slow else used
        return iter(sorted((f"{kind}/{number}" for number in range(count)), key=lambda each: each in slow))

    def groups(self) -> dict[str, list[str]]:
        """The replicas of every placement."""
        return {name: list(all_) for name, all_ in self._groups.items()}

    def kind(self, group: str) -> str:
        return self._posts[group].placement.kind

    def begin(self, launch: Launch, now_s: float) -> LaunchSchedule:
        replica, places = launch.replica, launch.places
        post = self._posts[launch.group]
        arrives_s = self._arrives_s(post, launch, now_s) if launch.cursor else now_s
        starts_s = max(arrives_s, now_s + post.turn_s, self._free_s.get(replica, 0.0))
        slower, ends_s = self._random.lognormal(0.0, self._jitter) if self._jitter else 1.0, starts_s + self._turn_s
        inside: Sequence[int] = range(len(places))
        departures, stopped, kinds = list[Departure](), launch.stop, bytearray(launch.kinds)
        may_stop = RowKind.SHADOW not in kinds and RowKind.EARLY not in kinds
        known = post.parts.get((launch.cursor, bool(launch.ramps)))
        for stop, lets_go, seconds in known or self._new_parts(post, launch):
            if kinds and may_stop and all(kinds[row] == RowKind.SHADOW for row in inside):
                break
            ends_s += (seconds[len(inside)] if launch.length is None else _of_texts(seconds, launch, inside)) * slower
            stopped = stop
            if lets_go and (leaving := self._leaving(places, inside, stop, launch)):
                answered, gone = self._answered(kinds, leaving, stop) if kinds else (leaving, leaving)
                answers = self._answers(places, answered, stop) if kinds else ()
                departures.append(Departure(ends_s, stop, answered, answers))
                if len(gone) == len(inside):
                    inside = ()
                    break
                inside = sorted(set(inside).difference(gone))
        self._free_s[replica] = ends_s
        last = departures.pop() if departures and departures[-1].at_s == ends_s else None
        survivors = {row: places[row] for row in inside} if inside else {}
        return LaunchSchedule(starts_s, ends_s, departures, last, survivors, stopped)

    def _leaving(self, places: Sequence[Place], inside: Sequence[int], stop: int, launch: Launch) -> list[int]:
        """Those of these rows whose inputs may leave before this block."""
        return [row for row in inside if places[row].row <= stop]

    def _answers(self, places: Sequence[Place], rows: Sequence[int], stop: int) -> list[object]:
        """The answers of these rows. They are unknown, so that audits always agree."""
        return [None] * len(rows)

    def _answered(self, kinds: bytearray, leaving: list[int], stop: int) -> tuple[list[int], list[int]]:
        """The rows that are answered, and those that leave, as on a replica (deployments/replica/split.py)."""
        if stop == self.facts.num_blocks:
            return leaving, leaving
        answered = [row for row in leaving if kinds[row] in (RowKind.PLAIN, RowKind.AUDITED, RowKind.EARLY)]
        gone = [row for row in leaving if kinds[row] == RowKind.PLAIN]
        for row in answered:
            kinds[row] = RowKind.SHADOW if kinds[row] != RowKind.PLAIN else RowKind.PLAIN
        return answered, gone

    def _arrives_s(self, post: _Post, launch: Launch, now_s: float) -> float:
        """When a launch has reached its replica: one after another over its link, at once for inputs before block 0."""
        if launch.cursor not in post.transfers_s:
            post.transfers_s[launch.cursor] = self._transfers_s(post, launch.cursor)
        if not (transfers_s := post.transfers_s[launch.cursor]):
            return now_s
        texts = launch.length is not None
        taken_s = (
            _of_texts(transfers_s, launch, range(len(launch.places))) if texts else transfers_s[len(launch.places)]
        )
        received_s = max(now_s, self._received_s.get(launch.replica, 0.0)) + taken_s
        self._received_s[launch.replica] = received_s
        return received_s

    def _transfers_s(self, post: _Post, cursor: int) -> tuple[float, ...]:
        """Seconds by size from the placement that runs the block before; empty where inputs stay on their replica."""
        before = next(split for split in post.pipeline.splits if split.start < cursor <= split.stop)
        source = post.pipeline.placement_of(before)
        if post.placement.local and source is post.placement:
            return ()
        link, each = self.facts.links[source.kind, post.placement.kind], self.facts.table(source.kind).hidden_bytes
        if self._host:  # the measured cost of a hand-over includes the link's latency, which is an assumption
            link = replace(link, latency_s=0.0)
        return tuple(link.transfer_s(size * each[cursor - 1]) for size in range(self._largest + 1))

    def _new_parts(self, post: _Post, launch: Launch) -> tuple[LaunchPart, ...]:
        """The parts of launches from this block on, which stay the same until the plan changes."""
        table = self.facts.table(post.placement.kind)
        own = max(split.batch_size for split in post.placement.splits)
        largest = max(own, min(self._largest, table.largest))  # a long text may exceed its launch's batch
        sizes = np.array([min(1, table.batch_sizes[0]), *range(1, largest + 1)], float)
        blocks_s, ramps_s = table.block_times_s(sizes), table.ramp_times_s(sizes)
        parts, start = [], launch.cursor
        for stop in stops(launch.cursor, launch.stop, launch.ramps):
            has_ramp = stop - 1 in launch.ramps
            begins_s = table.launch_s if start == launch.cursor else table.each_stop_s
            seconds = begins_s + blocks_s[:, start:stop].sum(1) + (ramps_s[:, stop - 1] if has_ramp else 0.0)
            parts.append(LaunchPart(stop, has_ramp or stop == self.facts.num_blocks, tuple(seconds.tolist())))
            start = stop
        post.parts[launch.cursor, bool(launch.ramps)] = tuple(parts)
        return tuple(parts)


def _of_texts(seconds: Sequence[float], launch: Launch, inside: Sequence[int]) -> float:
    """The time of a launch of texts, by their tokens."""
    assert launch.length, "This is a bug: a text has a length."
    weight = launch.weight if len(inside) == len(launch.weights) else sum([launch.weights[row] for row in inside])
    return seconds_at(weight / launch.length, seconds[0], seconds[1:])
