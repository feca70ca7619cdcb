"""Whether an input is admitted: if it is likely to be in time, by what is ahead of it and by how fast replicas are.

Nobody knows before where an input leaves, nor exactly how long it waits. So an input has a probability to be late, by
what is expected and by how far off that was of late. It is refused if it would probably be late, or if too many would
be: of all that are admitted few may be late. Who is in time makes room for who may not be.

Where launches vary so much (a device that is shared, a busy machine) that most inputs might be late though nobody were
ahead of them, no refusal makes the late few, and each refusal costs an answer. Then twice as many may be late as would
be by that alone.
"""

from collections.abc import Sequence

from deployments.dispatch.estimates import FEW, FORGETS, ExpectedTimes
from deployments.dispatch.lanes import Lane
from deployments.dispatch.messages import Limits, Refusal
from deployments.dispatch.queues import StageQueues

EVEN = 0.5  # whose probability is higher will probably be late
TWICE = 2.0  # as many may be late as would be if nobody were ahead, where these are more than few
MOST_SAVED = 8.0  # late inputs that may come together, where few were late for long


class Admission:
    """Who is admitted by one dispatcher, and how many of them may still be late."""

    def __init__(self) -> None:
        self._may_be_late = 1.0  # inputs
        self._unavoidable = 0.0  # the probability to be late though nobody were ahead: the mean of those who asked

    def risk(
        self, lane: Lane, expected: ExpectedTimes, deadline_s: float, inside: int, limits: Limits, weight: int = 1,
        others: int = 0, full: bool = False,
    ) -> float | Refusal:  # fmt: skip
        """The probability that an input is late that is admitted to this lane, or why it is not admitted.

        `inside`: how many inputs have not ended. So many `others` are admitted just before it. `full`: no ramp lets it
        go.
        """
        left_s, sure_s = deadline_s - expected.now_s, expected.sure_s
        alone = alone_risk(lane, expected, left_s, weight)
        self._unavoidable += FORGETS * (alone - self._unavoidable)
        few = self._few(alone)
        if sure_s > left_s:
            late_s = self._needed_s(expected, few) - left_s
            # While nobody is in the lane, the plan's own times decide. Otherwise replicas that were so slow for a while
            # that all are refused would get nothing to do by which they could show that they are fast again.
            if late_s > 0 and (lane.busy or others or lane.alone_s(weight) > left_s):
                return Refusal("the deadline cannot be met with what is ahead", late_s)
        if (
            full
            and (late_s := expected.whole_s - left_s) > 0
            and (lane.busy or others or lane.whole_s(weight) > left_s)
        ):
            return Refusal("the deadline cannot be met by the full network", late_s)
        if inside + others >= limits.backlog:
            return Refusal(f"the backlog of {limits.backlog} inputs is full", sure_s)
        found = expected.late(left_s)
        self._add(few - found)
        return found

    def ended(self, risk: float, late: bool) -> None:
        """An input of this risk has ended. So what is expected may be too dark, and few are late all the same."""
        self._add(risk - late)

    def needed_s(self, lane: Lane, expected: ExpectedTimes, left_s: float, weight: int = 1) -> float:
        """How much time an input must have to be admitted to this lane, which has about so much."""
        return self._needed_s(expected, self._few(alone_risk(lane, expected, left_s, weight)))

    def _few(self, alone: float) -> float:
        """How many may be late of inputs that are late with this probability though nobody is ahead.

        Where others have time enough, who has little may not be late more often than they.
        """
        few = min(EVEN, TWICE * min(alone, self._unavoidable)) if self._unavoidable > FEW else FEW
        return max(FEW, few)

    def _needed_s(self, expected: ExpectedTimes, few: float) -> float:
        """As above. Where nothing is saved, few may be late all the same.

        If none might be, a rush would be followed by refusing all until hardly anybody is inside.
        """
        return expected.needed_s(max(few, min(EVEN, self._may_be_late)))

    def _add(self, inputs: float) -> None:
        self._may_be_late = max(-MOST_SAVED, min(MOST_SAVED, self._may_be_late + inputs))


def alone_risk(lane: Lane, expected: ExpectedTimes, left_s: float, weight: int) -> float:
    """The probability that an input is late that has so much time, if nobody were ahead of it in this lane."""
    if expected.sure_s <= left_s:
        return 0.0
    return expected._replace(ends_s=lane.alone_until_s(weight, slow=True)).late(left_s)


def soonest(lanes: Sequence[Lane], now_s: float, weight: int = 1, more: int = 0) -> tuple[Lane, ExpectedTimes]:
    """The lane where a newcomer is expected to be answered first, by `ExpectedTimes.rank_s`."""
    if len(lanes) == 1:
        return lanes[0], expected_in(lanes[0], now_s, weight, more)
    return min([(each, expected_in(each, now_s, weight, more)) for each in lanes], key=lambda way: way[1].rank_s)


def expected_in(lane: Lane, now_s: float, weight: int = 1, more: int = 0) -> ExpectedTimes:
    """When an input is at each exit point: it begins at a stage when it gets there, and what is ahead of it is done.

    Launches count as long as replicas really take. If the table is wrong and all are slower than planned, a promise by
    the table would let in inputs that expire half-way. `more`: what others of its request weigh, admitted before it.
    """
    costs = lane.entry.costs_s(more) if more else {}
    at_s = full_s = 0.0
    ends_s = list[float]()
    for stage in lane.promised:
        if stage.is_alone and not stage.stage.start:
            launches = (stage.waiting + more) // stage.stage.room
            ahead_s = stage.group.free_s(now_s, launches, stage.stage.launch_s[-1])
            full = ahead_s > 0.0
        else:
            full = False
            ahead_s = stage.group.ahead_s(now_s, costs.get(stage.group, 0.0))
        full_s += stage.stage.launch_s[-1] * stage.group.slowdown
        launched = _launched(stage, weight, full)
        ends_s += stage.leaves_s(ahead_s if ahead_s > at_s else at_s, launched, stage.group.slowdown)
        at_s = ends_s[-1]
    return ExpectedTimes(lane.estimates, now_s, ends_s, full_s)


def _launched(queues: StageQueues, weight: int, full: bool) -> int:
    """What the launch of an input weighs, if it joins those who wait for this stage now.

    `full`: others will join it while it waits.
    """
    stage, beside = queues.stage, queues.stage.room if full else queues.waiting
    if stage.local and stage.start:
        beside //= max(1, len(queues.group.members))
    if stage.length is None:  # as below, where all weigh 1: every request asks
        return beside + 1 if beside < stage.batch else stage.batch
    return max(weight, min(beside + weight, stage.room))
