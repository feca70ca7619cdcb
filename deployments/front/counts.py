"""Counts everything that a front counts, each thing once. `/stats`, the metrics and the controller read it here."""

import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.dispatch.route import Route
from deployments.front.answers import Answer
from deployments.front.observed import NO_LAUNCH, LaunchShape, LaunchTimes, Observed, latency_bin
from deployments.metrics import LATENCY_BOUNDS_MS
from profiles.agreement import WATCHED_S, Agreement, AuditedAnswers, PromiseWatch

OUTCOMES = ("answered", "refused", "failed", "abandoned")
LATEST = 2000
LATELY = 0.02  # the weight of the newest request in what is known of requests of late
QUANTILES = (50, 95, 99)
BUSY_S = 10.0  # over so long it is told how busy a replica is
LOOK_S = 5.0  # as often as a controller looks, unless told otherwise


@dataclass
class Launches:
    """The launches of one group from one block on: their inputs, what these weigh, and the room that there was."""

    count: int = 0
    inputs: int = 0
    weight: int = 0
    room: int = 0

    def add(self, other: "Launches") -> None:
        self.count += other.count
        self.inputs += other.inputs
        self.weight += other.weight
        self.room += other.room

    @property
    def fill(self) -> float:
        """
        >>> Launches(2, inputs=24, weight=24, room=32).fill
        0.75
        """
        return self.weight / self.room if self.room else 0.0


class Counts:
    """Requests, inputs and launches since the start. Counts only grow, so that any number of readers can ask.

    A request carries one input or several. What becomes of requests is counted when they end, what becomes of inputs
    when they come and when they leave the network.
    """

    def __init__(
        self,
        kinds: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        latest: int | None = LATEST,
    ) -> None:
        self._kinds = {} if kinds is None else kinds  # of devices, by replica
        self._clock = clock  # one that all fronts share, wherever they run
        self._started_s = clock()
        self.observations = 0  # times that a controller has asked
        # Requests
        self.outcomes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of answered requests: "all", "queued", "computed"
        self.buckets = [0] * (
            len(LATENCY_BOUNDS_MS) + 1
        )  # answered requests by latency: up to each bound, above the last
        self._latest_s: deque[float] = deque(maxlen=latest)  # latencies of answered requests
        # Inputs
        self.arrivals = 0
        self.refused = self.refused_weight = 0  # though their clients wait for as long as the SLO
        self.in_time = 0
        self.exits: Counter[int] = Counter()  # by the block they left after
        self.degraded: Counter[int] = Counter()  # answered without the next level, by the block they stood behind
        # What they weigh: texts their tokens, where the plan counts them; all others 1.
        self.arrived_weight = self.in_time_weight = 0
        self.exit_weights: Counter[int] = Counter()
        # Inputs that asked for the whole network: among the arrivals, and among the exits.
        self.full = self.full_weight = 0
        self.full_exits: Counter[int] = Counter()
        self._inputs_each = self._weight_each = 1.0  # of a request, of late
        self.full_exit_weights: Counter[int] = Counter()
        # Of the others, those that ended before they left, by the block before which they stood.
        self.unfinished: Counter[int] = Counter()
        self.unfinished_weights: Counter[int] = Counter()
        self._latencies: Counter[int] = Counter()  # by `latency_bin`
        # Of those that were audited, by the block they left after: how many got to the end, and who disagrees there.
        self.audited: Counter[int] = Counter()
        self.missed: Counter[int] = Counter()
        # Of those that left after the last block, those that could not disagree with the full network.
        self.certain = self.certain_weight = 0
        # The agreement lately, look by look. Looks of all fronts end at the same times.
        self.promised: float | None = None  # the agreement that audits are held against
        self._watch, self._seen = PromiseWatch(), AuditedAnswers()  # the looks that have ended, and all that they saw
        self._look_ends_s = _next_end_s(self._started_s)
        self._looked_s = self._look_ends_s - LOOK_S  # when the last one ended
        self._route: Route | None = None  # that of this look
        # Launches
        self.launches: dict[tuple[str, int], Launches] = defaultdict(Launches)  # by group and first block
        self.survivor_bytes: Counter[str] = Counter()  # that came back "by_value", or were "held" where they were
        self._took: dict[LaunchShape, LaunchTimes] = {}
        self._computed: dict[str, deque[tuple[float, float]]] = {}  # of late, by replica: from when until when

    # What is counted

    def request_ended(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def request_answered(self, answers: Sequence[Answer], took_s: float) -> None:
        self.request_ended("answered")
        self.seconds["all"] += took_s
        self.seconds["queued"] += sum([answer.queued_ms for answer in answers]) / len(answers) / 1e3
        self.seconds["computed"] += sum([answer.computed_ms for answer in answers]) / len(answers) / 1e3
        self.buckets[bisect_left(LATENCY_BOUNDS_MS, 1e3 * took_s)] += 1
        self._latest_s.append(took_s)

    def inputs_arrived(self, inputs: int, weight: int, full: bool = False) -> None:
        """So many inputs asked, whether they are admitted or not. `full`: for the whole network."""
        if full:
            self.full += inputs
            self.full_weight += weight
        self.arrivals += inputs
        self.arrived_weight += weight
        self._inputs_each += LATELY * (inputs - self._inputs_each)
        self._weight_each += LATELY * (weight - self._weight_each)

    def refused_unread(self, weight: int, most: int, waits: bool, full: bool = False) -> None:
        """A request that probably weighs so much was refused before it was read. Its inputs asked all the same.

        It has so many inputs at `most`: it may only have said that it is long. `waits`: its client waits for as long as
        the SLO.
        """
        each = self.arrived_weight / self.arrivals if self.arrivals else 1.0
        inputs = max(1, min(round(weight / each), most))
        self.inputs_arrived(inputs, round(inputs * each), full)
        if waits:
            self.inputs_refused(inputs, round(inputs * each))

    def inputs_refused(self, inputs: int, weight: int) -> None:
        """So many inputs that have arrived were refused, though their clients wait for as long as the SLO."""
        self.refused += inputs
        self.refused_weight += weight

    def refused_outside(self, requests: int) -> None:
        """A proxy before this front has refused so many requests, taken to be like those that came through."""
        inputs, weight = round(requests * self._inputs_each), round(requests * self._weight_each)
        full = self.full / self.arrivals if self.arrivals else 0.0
        self.outcomes["refused"] += requests
        self.full += round(full * inputs)
        self.full_weight += round(full * weight)
        self.arrivals += inputs
        self.arrived_weight += weight
        self.inputs_refused(inputs, weight)

    def input_left(
        self, block: int, took_s: float, in_time: bool, weight: int = 1, full: bool = False, could_disagree: bool = True
    ) -> None:
        """One input was answered after this block. `full`: it had asked for the whole network.

        `could_disagree`: a ramp might have let it go.
        """
        if full:
            self.full_exits[block] += 1
            self.full_exit_weights[block] += weight
        elif not could_disagree:
            self.certain += 1
            self.certain_weight += weight
        self.exits[block] += 1
        self.exit_weights[block] += weight
        self._latencies[latency_bin(took_s)] += 1
        self.in_time += in_time
        self.in_time_weight += weight if in_time else 0

    def input_unfinished(self, block: int, weight: int = 1) -> None:
        """One input ended before it left (late, given up, failed, or answered by the level before): it stood here."""
        self.unfinished[block] += 1
        self.unfinished_weights[block] += weight

    def audit_ended(self, block: int, agrees: bool) -> None:
        """An input that was answered after this block has run to the end, whose answer is the same or not."""
        self.audited[block] += 1
        self.missed[block] += not agrees

    def look(self, route: Route) -> None:
        """To be called before answers are counted, which are given under this route: ends the looks that are over.

        A look ends, too, where other ramps are open from now on, or with other thresholds.
        """
        now_s, before = self._clock(), self._route or route
        if now_s - self._look_ends_s > WATCHED_S:  # nothing came for so long
            self._end_look(before, self._look_ends_s)
            self._look_ends_s = _next_end_s(now_s - WATCHED_S)
        while now_s >= self._look_ends_s:
            self._end_look(before, self._look_ends_s)
            self._look_ends_s += LOOK_S
        self._route = route
        if route is not before and (_ramps(route), route.thresholds) != (_ramps(before), before.thresholds):
            self._end_look(before, (self._looked_s + self._look_ends_s) / 2)  # in all fronts the same
            if route.thresholds != before.thresholds:
                self._watch.restart()

    def _end_look(self, route: Route, at_s: float) -> None:
        seen = self._audits(route.num_blocks)
        self._watch.follow(seen.since(self._seen), at_s, self.promised, _ramps(route))
        self._seen, self._looked_s = seen, at_s

    def launch_began(self, group: str, block: int, inputs: int, weight: int, room: int) -> None:
        self.launches[group, block].add(Launches(1, inputs, weight, room))

    def launch_ended(
        self, replica: str, start: int, stop: int, size: int, seconds: float, followed_s: float | None = None
    ) -> None:
        """A launch came back, for which the replica computed for `seconds`.

        `followed_s`: it waited while another ran there, and came back so long after that one.
        """
        now_s, computed = self._clock(), self._computed.setdefault(replica, deque())
        computed.append((now_s - seconds, now_s))
        while computed[0][1] < now_s - BUSY_S:
            computed.popleft()
        shape = LaunchShape(self._kinds.get(replica, ""), start, stop, size)
        between = (0, 0.0) if followed_s is None else (1, max(0.0, followed_s - seconds))
        self._took[shape] = self._took.get(shape, NO_LAUNCH).plus(LaunchTimes(1, seconds, *between))

    # What is read

    @property
    def now_s(self) -> float:
        """On the clock that all fronts share."""
        return self._clock()

    def busy_s(self) -> dict[str, tuple[str, float]]:
        """The kind of each replica that has computed in the last `BUSY_S`, and for how many of these seconds."""
        since_s, found = self._clock() - BUSY_S, {}
        for replica, computed in self._computed.items():
            if spent_s := sum(max(0.0, ended_s - max(began_s, since_s)) for began_s, ended_s in computed):
                found[replica] = self._kinds.get(replica, ""), spent_s
        self._computed = {replica: each for replica, each in self._computed.items() if replica in found}
        return found

    def __getstate__(self) -> dict[str, object]:
        """What other fronts are told, who need not know of single launches."""
        return {**vars(self), "_computed": {}}

    def observed(self, num_blocks: int) -> Observed:
        """Everything since the start, for the controller."""
        self.observations += 1

        def each(counts: Counter[int], without: Mapping[int, int] | None = None) -> tuple[int, ...]:
            return tuple(counts[block] - (without or {}).get(block, 0) for block in range(num_blocks))

        return Observed(
            self._started_s,
            self._clock() - self._started_s,
            self.arrivals,
            self.in_time,
            each(self.exits, self.full_exits),
            dict(self._took),
            latencies=Counter(self._latencies),
            arrived_weight=self.arrived_weight,
            in_time_weight=self.in_time_weight,
            exit_weights=each(self.exit_weights, self.full_exit_weights),
            audited=each(self.audited),
            missed=each(self.missed),
            full=self.full,
            full_weight=self.full_weight,
            unfinished=each(self.unfinished),
            unfinished_weights=each(self.unfinished_weights),
            refused=self.refused,
            refused_weight=self.refused_weight,
            certain=self.certain,
            certain_weight=self.certain_weight,
        )

    def agreement(self, num_blocks: int) -> Agreement | None:
        """Of all answers since the start that could disagree, as far as audits tell."""
        return self._audits(num_blocks).agreement()

    def watched(self, route: Route) -> PromiseWatch:
        """What was seen lately of the agreement, the look that has not ended among it."""
        self.look(route)
        watch, news = self._watch.copy(), self._audits(route.num_blocks).since(self._seen)
        if any(news.left) or any(news.audited):
            watch.follow(news, self._look_ends_s, self.promised, _ramps(route))
        return watch

    def _audits(self, num_blocks: int) -> AuditedAnswers:
        left, audited, missed = (
            [counts[block] for block in range(num_blocks)]
            for counts in (self.exits - self.full_exits, self.audited, self.missed)
        )
        left[-1] -= self.certain
        return AuditedAnswers(tuple(left), tuple(audited), tuple(missed))

    def latency_ms(self) -> dict[str, float]:
        """Percentiles of the latest answers, from when a request was read to when its last input was answered."""
        if not self._latest_s:
            return {}
        values = 1e3 * np.percentile(self._latest_s, QUANTILES)
        return {f"p{quantile}": round(float(value), 2) for quantile, value in zip(QUANTILES, values, strict=True)}

    def add(self, other: "Counts") -> None:
        """Add what another front has counted."""
        self.observations += other.observations
        self.outcomes.update(other.outcomes)
        self.exits.update(other.exits)
        self.degraded.update(other.degraded)
        self.exit_weights.update(other.exit_weights)
        self.audited.update(other.audited)
        self.missed.update(other.missed)
        self.full_exits.update(other.full_exits)
        self.certain += other.certain
        self.certain_weight += other.certain_weight
        self.arrived_weight += other.arrived_weight
        self.in_time_weight += other.in_time_weight
        self.survivor_bytes.update(other.survivor_bytes)
        self.arrivals += other.arrivals
        self.refused += other.refused
        self.refused_weight += other.refused_weight
        self.in_time += other.in_time
        self.buckets = [ours + theirs for ours, theirs in zip(self.buckets, other.buckets, strict=True)]
        self._latest_s.extend(other._latest_s)
        for place, launches in other.launches.items():
            self.launches[place].add(launches)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds


def together(parts: Iterable[Counts]) -> Counts:
    """The counts of several fronts as if they were one: all that `/stats` reads. (Observations have `merged`.)

    >>> one, other = Counts(), Counts()
    >>> one.launch_began("gpu", 0, 4, 4, 8), other.launch_began("gpu", 0, 8, 8, 8)
    (None, None)
    >>> together([one, other]).launches["gpu", 0].fill
    0.75
    """
    whole = Counts(latest=None)
    for part in parts:
        whole.add(part)
    return whole


def _ramps(route: Route) -> frozenset[int]:
    return frozenset[int]().union(*(stage.ramps for stage in route.all_stages))


def _next_end_s(now_s: float) -> float:
    """When a look ends that began before now.

    >>> _next_end_s(7.0), _next_end_s(10.0)
    (10.0, 15.0)
    """
    return (now_s // LOOK_S + 1) * LOOK_S


def by_level(counted: Mapping[int, int], edges: Sequence[int]) -> Counter[int]:
    """Counts by block as counts by the level of a cascade that the block belongs to.

    >>> by_level({0: 1, 3: 2, 4: 5}, edges=[4])
    Counter({1: 5, 0: 3})
    """
    levels: Counter[int] = Counter()
    for block, count in counted.items():
        levels[bisect_right(edges, block)] += count
    return levels


def survival(left: Mapping[int, int], num_blocks: int) -> list[float]:
    """The share of what was answered that entered each block, by how much left after each.

    >>> survival(Counter({0: 1, 2: 3}), 3)
    [1.0, 0.75, 0.75]
    """
    if not (total := sum(left.values())):
        return []
    gone = np.cumsum([0, *(left.get(block, 0) for block in range(num_blocks - 1))])
    return [round(float(share), 4) for share in (total - gone) / total]
