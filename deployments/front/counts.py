"""The counts of a front. `/stats`, the metrics and the controller read them here."""

import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

import numpy as np

from isobatch.deployments.dispatch.route import Route
from isobatch.deployments.front.answers import Answer
from isobatch.deployments.front.observed import NO_LAUNCH, LaunchShape, LaunchTimes, Observed, latency_bin
from isobatch.profiles.agreement import WATCHED_S, Agreement, AuditedAnswers, PromiseWatch

# Counts of inputs, and of their weight, that the controller reads as they are.
_OBSERVED = (
    "arrivals", "arrived_weight", "refused", "refused_weight", "in_time", "in_time_weight", "full", "full_weight",
    "certain", "certain_weight", "excused", "excused_weight",
)  # fmt: skip
OUTCOMES = ("answered", "refused", "failed", "abandoned")
LATEST = 2000  # answers whose latencies are kept for percentiles
RECENT_WEIGHT = 0.02  # the weight of a request in the mean size of recent requests
QUANTILES = (50, 95, 99)  # percentiles of the latency
BUSY_S = 10.0  # the window in which the busy time of replicas is counted
AUDIT_WINDOW_S = 5.0  # the length of an audit window: the controller's default interval
MOST_SHAPES = 4096  # shapes of launches that are counted: each new plan brings others, and earlier ones are forgotten


class Launches(NamedTuple):
    """The launches of one group from one block on: their number, inputs, weight and room."""

    number: int = 0
    inputs: int = 0
    weight: int = 0
    room: int = 0

    def plus(self, other: "Launches") -> "Launches":
        return Launches(*map(add, self, other))

    @property
    def fill(self) -> float:
        """The mean share of the room that was used.

        >>> Launches(2, inputs=24, weight=24, room=32).fill
        0.75
        """
        return self.weight / self.room if self.room else 0.0


class Counts:
    """Requests, inputs and launches since the start. Counts only grow, so that any number of readers can compare them.

    A request carries one input or several. Requests are counted when they end, inputs when they arrive and when they
    leave the network.
    """

    def __init__(
        self,
        kinds: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        latest: int | None = LATEST,
    ) -> None:
        self._kinds = {} if kinds is None else kinds  # of devices, by replica
        self.clock = clock  # one that all fronts share, wherever they run
        self._started_s = clock()
        self.observations = 0  # how often a controller has read the counts

        # Requests
        self.outcomes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of answered requests: "all", "queued", "computed"
        self._latest_s: deque[float] = deque(maxlen=latest)  # latencies of answered requests

        # Inputs. Their weight is the number of tokens of a text where the plan counts them, else 1.
        self.arrivals = self.arrived_weight = 0
        self.refused = self.refused_weight = 0  # only inputs whose clients wait for as long as the SLO
        self.in_time = self.in_time_weight = 0
        self.excused = self.excused_weight = 0  # inputs that failed, or whose clients left before their deadline
        self.exits: Counter[int] = Counter()  # by the block after which they left
        self.exit_weights: Counter[int] = Counter()
        # Inputs that asked for the full network: among the arrivals, and among the exits.
        self.full = self.full_weight = 0
        self.full_exits: Counter[int] = Counter()
        self.full_exit_weights: Counter[int] = Counter()
        # Other inputs that ended inside the network, by the block that would have been next.
        self.unfinished: Counter[int] = Counter()
        self.unfinished_weights: Counter[int] = Counter()
        self._latencies: Counter[int] = Counter()  # by `latency_bin`
        self._inputs_per_request = self._weight_per_request = 1.0  # means of recent requests

        # Audits, by the block after which their inputs left: those that ended, and those that disagreed.
        self.audited: Counter[int] = Counter()
        self.missed: Counter[int] = Counter()
        # Inputs that left after the last block and passed no open ramp, so they agree with the full network anyway.
        self.certain = self.certain_weight = 0
        # Recent agreement, by windows of `AUDIT_WINDOW_S`. The windows of all fronts end at the same times.
        self.promised: float | None = None  # the agreement that audits should confirm
        self._watch, self._audited_before = PromiseWatch(), AuditedAnswers()  # finished windows, and their sums
        self._window_ends_s = _next_end_s(self._started_s)
        self._last_end_s = self._window_ends_s - AUDIT_WINDOW_S
        self._route: Route | None = None  # the route of the present window

        self.canary: defaultdict[str, float] = defaultdict(float)  # as `Canary` counts

        # Launches
        self.launches: dict[tuple[str, int], Launches] = defaultdict(Launches)  # by group and first block
        self.survivor_bytes: Counter[str] = Counter()  # returned "by_value", or "held" on their replica
        self._took: dict[LaunchShape, LaunchTimes] = {}  # the shape of the latest launch last
        self._computed: dict[str, deque[tuple[float, float]]] = {}  # recent (start, end) of launches, by replica

    # Events that are counted

    def answers_known(self, answers: Sequence[Answer], took_s: float) -> None:
        """All answers to a request are known. The request ends later: its client may go before it has them."""
        self.seconds["all"] += took_s
        self.seconds["queued"] += sum([answer.queued_ms for answer in answers]) / len(answers) / 1e3
        self.seconds["computed"] += sum([answer.computed_ms for answer in answers]) / len(answers) / 1e3
        self._latest_s.append(took_s)

    def inputs_arrived(self, inputs: int, weight: int, full: bool = False) -> None:
        """Inputs arrived, and may be admitted or refused. `full`: they asked for the full network."""
        if full:
            self.full += inputs
            self.full_weight += weight
        self.arrivals += inputs
        self.arrived_weight += weight
        self._inputs_per_request += RECENT_WEIGHT * (inputs - self._inputs_per_request)
        self._weight_per_request += RECENT_WEIGHT * (weight - self._weight_per_request)

    def refused_unread(self, weight: int, most: int, waits: bool, full: bool = False) -> None:
        """A request was refused before it was read. Its inputs count as arrived.

        `weight`: estimated from its size; `most`: the most inputs that a request may have, since it may lie about its
        size; `waits`: its client waits for as long as the SLO.
        """
        mean_weight = self.arrived_weight / self.arrivals if self.arrivals else 1.0
        inputs = max(1, min(round(weight / mean_weight), most))
        self.inputs_arrived(inputs, round(inputs * mean_weight), full)
        if waits:
            self.inputs_refused(inputs, round(inputs * mean_weight))

    def inputs_refused(self, inputs: int, weight: int) -> None:
        """Inputs that had arrived were refused, and their clients wait for as long as the SLO."""
        self.refused += inputs
        self.refused_weight += weight

    def refused_outside(self, requests: int) -> None:
        """A proxy before this front has refused requests, which are taken to be like recent other ones."""
        inputs, weight = round(requests * self._inputs_per_request), round(requests * self._weight_per_request)
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
        """An input was answered after this block. `full`: it had asked for the full network.

        `could_disagree`: it passed an open ramp.
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

    def input_excused(self, weight: int) -> None:
        """An input got no answer in time, for which no plan is to blame."""
        self.excused += 1
        self.excused_weight += weight

    def input_unfinished(self, block: int, weight: int) -> None:
        """An input ended before this block (late, abandoned, failed, or answered by an earlier level)."""
        self.unfinished[block] += 1
        self.unfinished_weights[block] += weight

    def audit_ended(self, block: int, agrees: bool) -> None:
        """An audit ended of an input that was answered after this block. `agrees`: the full answer is the same."""
        self.audited[block] += 1
        self.missed[block] += not agrees

    def end_windows(self, route: Route) -> None:
        """End the audit windows that are over. Must be called before answers under this route are counted.

        A window also ends when other ramps or thresholds apply from now on.
        """
        now_s, before = self.clock(), self._route or route
        if now_s < self._window_ends_s - 2 * AUDIT_WINDOW_S:  # the clock was set back: later times would stay recent
            self._watch = PromiseWatch(score=self._watch.score, scored=self._watch.scored)
            self._window_ends_s = _next_end_s(now_s)
            self._last_end_s = self._window_ends_s - AUDIT_WINDOW_S
        if now_s - self._window_ends_s > WATCHED_S:  # no input came for longer than windows matter
            self._end_window(before, self._window_ends_s)
            self._window_ends_s = _next_end_s(now_s - WATCHED_S)
        while now_s >= self._window_ends_s:
            self._end_window(before, self._window_ends_s)
            self._window_ends_s += AUDIT_WINDOW_S
        self._route = route
        if route is not before and (_ramps(route), route.thresholds) != (_ramps(before), before.thresholds):
            self._end_window(before, (self._last_end_s + self._window_ends_s) / 2)  # the same time in all fronts
            if route.thresholds != before.thresholds:
                self._watch.restart()

    def _end_window(self, route: Route, at_s: float) -> None:
        audits = self._audits(route.num_blocks)
        self._watch.follow(audits.since(self._audited_before), at_s, self.promised, _ramps(route))
        self._audited_before, self._last_end_s = audits, at_s

    def launch_began(self, group: str, block: int, inputs: int, weight: int, room: int) -> None:
        self.launches[group, block] = self.launches[group, block].plus(Launches(1, inputs, weight, room))

    def launch_ended(
        self, replica: str, start: int, stop: int, size: int, seconds: float, followed_s: float | None = None
    ) -> None:
        """A launch came back, for which the replica computed for `seconds`.

        `followed_s`: the time since the previous launch came back, if this one waited for it.
        """
        now_s = self.clock()
        if replica not in self._computed:
            self._forget_idle(now_s)
        computed = self._computed.setdefault(replica, deque())
        computed.append((now_s - seconds, now_s))
        while not now_s - BUSY_S <= computed[0][1] <= now_s:  # later than now: the clock was set back
            computed.popleft()
        shape = LaunchShape(self._kinds.get(replica, ""), start, stop, size)
        between = (0, 0.0) if followed_s is None else (1, max(0.0, followed_s - seconds))
        self._took[shape] = self._took.pop(shape, NO_LAUNCH).plus(LaunchTimes(1, seconds, *between))
        if len(self._took) > MOST_SHAPES:
            del self._took[next(iter(self._took))]

    # Values that are read

    def busy_s(self) -> dict[str, tuple[str, float]]:
        """The kind and the seconds of compute of each replica that has computed in the last `BUSY_S`."""
        now_s, busy_s = self.clock(), {}
        since_s = now_s - BUSY_S
        self._forget_idle(now_s)
        for replica, computed in self._computed.items():
            spent_s = sum(max(0.0, ended_s - max(began_s, since_s)) for began_s, ended_s in computed)
            busy_s[replica] = self._kinds.get(replica, ""), spent_s
        return busy_s

    def _forget_idle(self, now_s: float) -> None:
        """Forget replicas that have not computed in the last `BUSY_S`: they may have gone."""
        ended_s = {replica: spans[-1][1] for replica, spans in self._computed.items()}
        # An end later than now: the clock was set back.
        self._computed = {each: self._computed[each] for each, at_s in ended_s.items() if 0 <= now_s - at_s < BUSY_S}

    def __getstate__(self) -> dict[str, object]:
        """The state for other fronts, which do not read single launches."""
        return {**vars(self), "_computed": {}}

    def observed(self, num_blocks: int) -> Observed:
        """Everything since the start, for the controller."""
        self.observations += 1
        now_s = self.clock()
        self._forget_idle(now_s)

        def by_block(counts: Counter[int], without: Mapping[int, int] | None = None) -> tuple[int, ...]:
            return tuple(counts[block] - (without or {}).get(block, 0) for block in range(num_blocks))

        return Observed(
            self._started_s,
            now_s - self._started_s,
            exits=by_block(self.exits, self.full_exits),
            exit_weights=by_block(self.exit_weights, self.full_exit_weights),
            launches=dict(self._took),
            latencies=Counter(self._latencies),
            audited=by_block(self.audited),
            missed=by_block(self.missed),
            unfinished=by_block(self.unfinished),
            unfinished_weights=by_block(self.unfinished_weights),
            **{name: getattr(self, name) for name in _OBSERVED},
        )

    def agreement(self, num_blocks: int) -> Agreement | None:
        """The agreement since the start, of all answers that could disagree, as estimated from audits."""
        return self._audits(num_blocks).agreement()

    def watched(self, route: Route) -> PromiseWatch:
        """The recent agreement, including the present window."""
        self.end_windows(route)
        watch, latest = self._watch.copy(), self._audits(route.num_blocks).since(self._audited_before)
        if any(latest.left) or any(latest.audited):
            watch.follow(latest, self._window_ends_s, self.promised, _ramps(route))
        return watch

    def _audits(self, num_blocks: int) -> AuditedAnswers:
        left, audited, missed = (
            [counts[block] for block in range(num_blocks)]
            for counts in (self.exits - self.full_exits, self.audited, self.missed)
        )
        left[-1] -= self.certain
        return AuditedAnswers(tuple(left), tuple(audited), tuple(missed))

    def latency_ms(self) -> dict[str, float]:
        """Percentiles of the latest requests' latencies."""
        if not self._latest_s:
            return {}
        values = 1e3 * np.percentile(self._latest_s, QUANTILES)
        return {f"p{quantile}": round(float(value), 2) for quantile, value in zip(QUANTILES, values, strict=True)}

    def add(self, other: "Counts") -> None:
        for name, own in vars(self).items():
            if isinstance(own, Counter):
                own.update(getattr(other, name))
            elif isinstance(own, int):
                setattr(self, name, own + getattr(other, name))
        self._latest_s.extend(other._latest_s)
        for key, launches in other.launches.items():
            self.launches[key] = self.launches[key].plus(launches)
        for totals, more in ((self.seconds, other.seconds), (self.canary, other.canary)):
            for name, amount in more.items():
                totals[name] += amount


def together(parts: Iterable[Counts]) -> Counts:
    """The sums of several fronts' counts, for `/stats`. (For observations see `merged`.)

    >>> first, second = Counts(), Counts()
    >>> first.launch_began("gpu", 0, 4, 4, 8), second.launch_began("gpu", 0, 8, 8, 8)
    (None, None)
    >>> together([first, second]).launches["gpu", 0].fill
    0.75
    """
    total = Counts(latest=None)
    for part in parts:
        total.add(part)
    return total


def _ramps(route: Route) -> frozenset[int]:
    return frozenset[int]().union(*(stage.ramps for stage in route.all_stages))


def _next_end_s(now_s: float) -> float:
    """The end of the present audit window.

    >>> _next_end_s(7.0), _next_end_s(10.0)
    (10.0, 15.0)
    """
    return (now_s // AUDIT_WINDOW_S + 1) * AUDIT_WINDOW_S


def by_level(counted: Mapping[int, int], edges: Sequence[int]) -> Counter[int]:
    """Sum counts by block over the levels of a cascade.

    >>> by_level({0: 1, 3: 2, 4: 5}, edges=[4])
    Counter({1: 5, 0: 3})
    """
    levels: Counter[int] = Counter()
    for block, count in counted.items():
        levels[bisect_right(edges, block)] += count
    return levels


def survival(left: Mapping[int, int], num_blocks: int) -> list[float]:
    """The share of the answered inputs that entered each block, from the number that left after each.

    >>> survival(Counter({0: 1, 2: 3}), 3)
    [1.0, 0.75, 0.75]
    """
    if not (total := sum(left.values())):
        return []
    gone = np.cumsum([0, *(left.get(block, 0) for block in range(num_blocks - 1))])
    return [round(float(share), 4) for share in (total - gone) / total]
