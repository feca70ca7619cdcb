"""A lane: one pipeline at work, with the queues of its stages, its groups of replicas, and its expected times.

The expected times of a new input follow from the work ahead of it. They are corrected by how much later or earlier
recent inputs left, since the computed times ignore inputs that are not yet queued, launches that vary, and a front that
is late. The mean of these delays corrects the computed time, and their spread gives its certainty. Both are small if
launches take their planned times. Delays are measured in full launches, so that they scale with the replicas' speed.
(In units of an input's own launch, a few milliseconds would be a large delay in an empty lane, and then be expected in
a crowded one.)

An input that leaves at the end of a launch takes many times longer than one that leaves at the first ramp. This
difference is planned, so each exit point has its own computed time, and only the delay at that point is learned.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from typing import NamedTuple

from isobatch.deployments.dispatch.batching import Queue, Queues, StageQueues, Ticket
from isobatch.deployments.dispatch.groups import Group, Replica
from isobatch.deployments.dispatch.messages import Limits
from isobatch.deployments.dispatch.route import Route, Stage

LEARNING_RATE = 0.02  # the weight of one launch in the learned mean and variance: about the last fifty launches matter
PRIOR_LAUNCHES = 8  # the weight of the initial values, in launches
MOST_DELAY = 5.0  # the longest delay that is learned, in full launches, so that one outlier does not dominate
SURE_SPREADS = 3.0  # beyond the mean plus this many spreads, almost no input is later
MAX_LATE = 0.01  # the share of all inputs that may be late
FULL = 0.9  # launches that are fuller than this share have no room left
_STEEPNESS = 1.702  # the slope of the logistic curve that is closest to the normal distribution


class ExpectedTimes(NamedTuple):
    """When a new input is expected at each exit point of a lane, in seconds after `now_s`."""

    estimates: "Estimates"  # of that lane
    now_s: float
    ends_s: Sequence[float]
    full_launch_s: float  # the time of full launches through the lane: the unit of delays

    @property
    def mean_s(self) -> float:
        """The mean time until the input has its answer."""
        exits = zip(self.estimates.leaving, self.ends_s, self.estimates.delay, strict=True)
        return sum([leaving * (end_s + delay * self.full_launch_s) for leaving, end_s, delay in exits])

    @property
    def rank_s(self) -> float:
        """The time by which lanes are compared: halfway between the mean and the last answers.

        The mean alone would hide late answers behind many early ones.
        """
        number = self.estimates.last
        return (self.mean_s + self.ends_s[number] + self.estimates.delay[number] * self.full_launch_s) / 2

    @property
    def latest_s(self) -> float:
        """The time by which the input almost certainly has its answer."""
        number = self.estimates.last
        return self.ends_s[number] + self.estimates.latest[number] * self.full_launch_s

    @property
    def latest_end_s(self) -> float:
        """The time at which an input that leaves at no ramp has almost certainly reached the end."""
        return self.ends_s[-1] + self.estimates.latest[-1] * self.full_launch_s

    def needed_s(self, chance: float) -> float:
        """The time that the input may take, if it may exceed it with about this probability.

        Exit points are taken to be far apart.
        """
        estimates, number = self.estimates, 0
        while estimates.unanswered[number] >= chance:
            number += 1
        share = max(1e-6, (chance - estimates.unanswered[number]) / estimates.leaving[number])  # of those leaving there
        spreads = log(1.0 / share - 1.0) / _STEEPNESS if share < 1.0 else -SURE_SPREADS
        delay = estimates.delay[number] + spreads * estimates.spread[number]
        return self.ends_s[number] + delay * self.full_launch_s

    def late(self, left_s: float) -> float:
        """The probability that the input has no answer within this time."""
        estimates, full_s = self.estimates, self.full_launch_s
        if self.latest_s <= left_s:
            return estimates.unanswered[estimates.last]
        exits = zip(estimates.leaving, self.ends_s, estimates.delay, estimates.spread, strict=True)
        return sum(
            [
                leaving * tail(left_s - end_s - delay * full_s, spread * full_s)
                for leaving, end_s, delay, spread in exits
                if leaving
            ]
        )

    def learn(self, number: int, now_s: float) -> None:
        """Learn from the input's delay: it is at this exit point now."""
        if self.full_launch_s > 0.0:
            self.estimates.learn(number, (now_s - self.now_s - self.ends_s[number]) / self.full_launch_s)


class Estimates:
    """The learned delays of one lane, by exit point. All exit points of a stage share their delays.

    Before any input was measured, the spread is half of `slack`, in full launches.
    """

    def __init__(self, stages: Sequence[Stage], slack: float) -> None:
        counts = [len(stage.exits) for stage in stages]
        self._exits = [slice(after - count, after) for count, after in zip(counts, accumulate(counts), strict=True)]
        self._stage_of = [number for number, count in enumerate(counts) for _ in range(count)]
        # The index of the exit point at each block, or of the first after it.
        self.exit_at = [
            exits.start + stage.exit_at(block)
            for exits, stage in zip(self._exits, stages, strict=True)
            for block in range(stage.start, stage.stop)
        ]
        self.delay, self.spread = [0.0] * sum(counts), [slack / 2] * sum(counts)
        self.latest = [SURE_SPREADS * slack / 2] * sum(counts)  # almost no input has a longer delay
        self._variance, self._launches = [(slack / 2) ** 2] * len(stages), [0] * len(stages)
        reach = [*accumulate(_shares(stages), min), 0.0]
        self.leaving = [before - after for before, after in pairwise(reach)]  # the share that leaves at each exit point
        self.unanswered = reach[1:]  # the share that is unanswered after it
        self.last = next(number for number, share in enumerate(self.unanswered) if share <= MAX_LATE)

    def learn(self, number: int, delay: float) -> None:
        """Learn the delay of an input at this exit point."""
        stage = self._stage_of[number]
        self._launches[stage] = launches = self._launches[stage] + 1
        share = max(LEARNING_RATE, 1.0 / (launches + PRIOR_LAUNCHES))
        difference = max(-MOST_DELAY, min(delay, MOST_DELAY)) - self.delay[number]
        mean = self.delay[number] + share * difference
        variance = self._variance[stage] = (1.0 - share) * (self._variance[stage] + share * difference * difference)
        self.expect(stage, mean, sqrt(variance))

    def expect(self, stage: int, delay: float, spread: float) -> None:
        """Expect this delay and spread at all exit points of a stage from now on."""
        exits = self._exits[stage]
        count = exits.stop - exits.start
        self.delay[exits], self.spread[exits] = [delay] * count, [spread] * count
        self.latest[exits] = [delay + SURE_SPREADS * spread] * count


def _shares(stages: Sequence[Stage]) -> Iterator[float]:
    """The share of inputs before the first exit point, then after each but the last.

    If the plan expects no input even at the first stage, all inputs count as running to the end.
    """
    arriving = stages[0].survival
    for stage in stages:
        for share in (stage.survival, *(point.survival for point in stage.exits[:-1])):
            yield share / arriving if arriving else 1.0


def tail(above: float, spread: float) -> float:
    """The probability of a value at least this far above the mean, by a logistic curve that is close to the normal one.

    >>> round(tail(0.0, 1.0), 3), round(tail(2.0, 1.0), 3), tail(-1e-9, 0.0), tail(0.0, 0.0)
    (0.5, 0.032, 1.0, 0.0)
    """
    if abs(above) >= 20.0 * spread:
        return 1.0 if above < 0.0 else 0.0
    return 1.0 / (1.0 + exp(_STEEPNESS * above / spread))


class Lane:
    """A pipeline's route, the queues before its stages, and the groups that run it (which no other lane uses)."""

    def __init__(self, route: Route, groups: Mapping[str, Group], limits: Limits) -> None:
        self.route = route
        self.groups = tuple(groups[name] for name in route.groups)
        self.stages = tuple(StageQueues(route, stage, groups, limits.queue_order) for stage in route.stages)
        self.estimates = Estimates(route.stages, limits.slack)
        for stage in self.stages:
            stage.is_alone = [other.group for other in self.stages].count(stage.group) == 1
        self.by_group = tuple(
            (group, tuple(stage for stage in self.stages if stage.group is group)) for group in self.groups
        )
        self._first_of_groups = tuple({stage.group: stage for stage in reversed(self.stages)}.values())
        # Stages that take turns on a group wait until they are full: each input costs them its whole share.
        self.free_joining = min(each.is_alone * _free_joining(each.stage.launch_s) for each in self.stages)
        self.unavoidable = 0.0  # the mean probability that recent inputs would be late in an empty lane
        self.kept_queues: dict[Replica, Queues] = {}  # queues of inputs that only this replica has
        self._retries = limits.retries
        for group in self.groups:
            group.forget_kept()
            group.transfer_s = max(stage.transfer_s for stage in route.stages if stage.group == group.name)
        self.entry = self.queue(0, None)

    @property
    def open(self) -> bool:
        """Whether an input can get to the end: every group has a replica."""
        return all(group.members for group in self.groups)

    @property
    def busy(self) -> bool:
        """Whether any input waits or runs in this lane."""
        return any(group.running for group in self.groups) or any(stage.waiting for stage in self.stages)

    @property
    def room_left(self) -> float:
        """The part of a full launch that stays empty, at the stage whose recent launches were fullest.

        The inputs that wait for the next launch count, too. Idle replicas are room as well, even if their launches are
        full. Of the stages that take turns on a group only the first one counts: later ones wait until they are full.
        """
        fill = max([min(stage.fill, stage.group.used) for stage in self._first_of_groups])
        return max(0.0, FULL - max(fill, self.entry.weight / self.entry.stage.room))

    @property
    def used(self) -> float:
        """The share of their time in which the replicas of the busiest group worked."""
        return max(stage.group.used for stage in self._first_of_groups)

    def alone_s(self, weight: int, more: int = 0) -> float:
        """The planned time until half of the inputs have their answers, in a lane without inputs of other requests."""
        half = next(number for number, unanswered in enumerate(self.estimates.unanswered) if unanswered <= 0.5)
        return self.alone_until_s(weight, more)[half]

    def alone_until_s(self, weight: int, more: int = 0, slow: bool = False) -> list[float]:
        """The planned time until each exit point, for an input that meets no other request; `slow`: the measured time.

        `more`: the weight of its own request's inputs that are admitted before it.
        """
        costs = self._costs(more)
        ends_s, at_s = list[float](), 0.0
        for queues in self.stages:
            group, launched = queues.group, max(weight, min(weight + more, queues.stage.room))
            ahead_s = costs.get(group, 0.0) / max(1, len(group.members))
            ends_s += queues.exit_times_s(max(at_s, ahead_s), launched, group.slowdown if slow else 1.0)
            at_s = ends_s[-1]
        return ends_s

    def expected(self, now_s: float, weight: int = 1, more: int = 0) -> ExpectedTimes:
        """When a new input is at each exit point. At each stage it waits until the work ahead of it is done.

        Launches count with the replicas' measured speed. If the latency table is wrong and all replicas are slower than
        planned, the table would admit inputs that expire half-way. `more`: the weight of the request's inputs that are
        admitted before it.
        """
        costs = self._costs(more)
        at_s = full_launch_s = 0.0
        ends_s: list[float] = []
        for queues in self.stages:
            stage, group = queues.stage, queues.group
            if queues.is_alone and not stage.start:
                ahead_s = group.free_s(now_s, (queues.waiting + more) // stage.room, stage.launch_s[-1])
                fills_up = ahead_s > 0.0
            else:
                ahead_s = group.ahead_s(now_s, costs.get(group, 0.0))
                fills_up = False
            full_launch_s += stage.launch_s[-1] * group.slowdown
            launched = _launch_weight(queues, weight, fills_up, 0 if stage.start else more)
            ends_s += queues.exit_times_s(ahead_s if ahead_s > at_s else at_s, launched, group.slowdown)
            at_s = ends_s[-1]
        return ExpectedTimes(self.estimates, now_s, ends_s, full_launch_s)

    def _costs(self, weight: int) -> dict[Group, float]:
        """The planned time for each group of inputs of this weight."""
        return {group: weight * seconds for group, seconds in self.entry.costs} if weight else {}

    @property
    def may_launch_newcomer(self) -> bool:
        """Whether the input that was just admitted may have made a launch possible.

        That needs an idle replica, a full batch, or the first waiting input and a replica that is nearly idle.
        """
        entry, group = self.entry, self.entry.owner.group
        return entry.weight >= entry.stage.room or group.has_idle or (entry.size == 1 and group.early_s > 0)

    def wait(self, tickets: list[Ticket], cursor: int, kept_by: str | None, broken: int) -> None:
        """Let inputs wait before one block; either one replica keeps them all, or none keeps any."""
        queue = self.queue(cursor, kept_by, broken)
        if len(tickets) == 1:
            queue.add(tickets[0])
        else:
            queue.add_all(tickets)
        if queue.only_replica is not None:
            queue.owner.group.may_run_kept.add(queue.only_replica)

    def queues(self) -> Iterator[Queue]:
        """All queues that are not empty."""
        for stage in self.stages:
            yield from (queue for queue in stage.shared.values() if queue.size)
        for group in self.groups:
            for replica in group.members.values():
                yield from (queue for queue in self.kept_queues.get(replica, {}).values() if queue.size)

    def forget_gone(self) -> None:
        """Remove the queues of replicas that have left their group."""
        self.kept_queues = {
            replica: queues
            for replica, queues in self.kept_queues.items()
            if not any(queue.is_gone for queue in queues.values())
        }

    def queue(self, cursor: int, kept_by: str | None, broken: int = 0) -> Queue:
        """The queue before a block, of inputs that any replica can have or that the replica `kept_by` keeps.

        `broken`: as in `Ticket`. With each, launches get smaller, and at its last attempt an input is alone. So an
        input that breaks the network, or ends replicas, does not fail the others of its batch.
        """
        stage = self.stages[self.route.numbers[cursor]]
        replica = stage.group.members.get(kept_by) if stage.stage.local and kept_by is not None else None
        if replica is not None:
            replica.keeps_inputs = True
        queues = stage.shared if replica is None else self.kept_queues.setdefault(replica, {})
        if (key := (cursor, broken)) not in queues:
            room = _room_after(stage.stage, broken / self._retries) if broken else stage.stage.room
            queues[key] = Queue(stage, cursor, room, replica)
        return queues[key]


def _room_after(stage: Stage, tried: float) -> int:
    """The weight of a launch of inputs that have had this share of their further attempts; 1: it has a single input.

    >>> texts = Stage(0, 4, batch=16, group="a", launch_s=(0.01,) * 16, length=10)
    >>> _room_after(texts, 0.5), _room_after(texts, 1.0)
    (40, 1)
    """
    return round(stage.batch ** (1 - tried)) * (stage.length or 1) if tried < 1 else 1


def _free_joining(launch_s: Sequence[float]) -> float:
    """What an input saves if it joins a launch, as a share of a full launch's time per input.

    1: launches of all sizes take the same time, so the input adds nothing; 0: it adds that time per input.

    >>> _free_joining((2.0, 2.0)), _free_joining((1.0, 2.0)), _free_joining((1.0,)), _free_joining((2.2, 2.0))
    (1.0, 0.0, 0.0, 1.0)
    """
    size, one_s, full_s = len(launch_s), launch_s[0], launch_s[-1]
    if size == 1 or not full_s:
        return 0.0
    return min(1.0, max(0.0, 1.0 - (full_s - one_s) / (size - 1) / (full_s / size)))


def _launch_weight(queues: StageQueues, weight: int, fills_up: bool, more: int) -> int:
    """The weight of an input's launch, if it joins the inputs that wait for this stage now.

    `fills_up`: the input waits, so that others join the launch until it is as full as recent ones. `more`: the weight
    of other inputs of its request.
    """
    stage, beside = queues.stage, queues.waiting + more
    if fills_up:
        beside = max(beside, round(queues.fill * stage.room))
    if stage.local and stage.start:
        beside //= max(1, len(queues.group.members))
    if stage.length is None:  # a fast path for the last line with `weight` 1, since every request comes here
        return beside + 1 if beside < stage.batch else stage.batch
    return max(weight, min(beside + weight, stage.room))
