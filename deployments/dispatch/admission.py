"""Whether an input is admitted, and to which lane: it depends on the work ahead of it and on the replicas' speed.

Where an input will leave and how long it will wait are uncertain, so admission computes its probability to be late. An
input that would probably be late is refused. Others are admitted as long as few of all admitted inputs are late: an
input that ends in time makes room for a risky one. Every lane is asked, the one with the earliest answer first.

Where the application is parked, an input counts as if it arrived when replicas run again.

Two things raise the share that may be late, because each refusal costs an answer:
- Launches with room. A lane whose launches are not full has time left, which a refusal only wastes.
- Launches that vary a lot (a shared device, a busy machine), so that most inputs may be late even in an empty lane. No
  refusal makes that share small. Then twice that share may be late.

Riskier inputs are admitted by idle replicas, where an input may leave at the first exit point, and to launches that
take as long when they are full (`highest_risk`).
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from isobatch.deployments.dispatch.lanes import LEARNING_RATE, MAX_LATE, ExpectedTimes, Lane
from isobatch.deployments.dispatch.messages import Limits, Refusal

MOST_RISK = 0.5  # an input with a higher probability to be late is not admitted to a lane whose replicas are busy
HOPELESS = 0.9  # the same where a risky input costs others least
# Replicas that work for less of their time than `BUSY_USED` admit riskier inputs: the riskiest at `IDLE_USED`.
BUSY_USED, IDLE_USED = 0.8, 0.45
# With more of a full launch left than `LITTLE_ROOM`, inputs that take no time from others may be riskier: the riskiest
# at `MUCH_ROOM`.
LITTLE_ROOM, MUCH_ROOM = 0.1, 0.3
# Where lateness cannot be avoided, the share of inputs that may be late, as a multiple of the unavoidable share.
MOST_OVER_UNAVOIDABLE = 2.0
# The most late inputs that may follow each other after a time with few: more would break the promise.
MOST_SAVED_INPUTS = 8.0
OVER_ROOM = 4.0  # the share of inputs that may be late, as a multiple of the room that is left in launches
TOO_LATE = 0.4  # where this share of the inputs is late, they cost others more than they gain
LATE_RATE = 0.01  # the weight of one input in the learned share of late ones


class Admitted(NamedTuple):
    """The lane that admits an input, and the input's expected times and risk there."""

    lane: Lane
    expected: ExpectedTimes
    risk: float  # the probability to be late


class Admission:
    """Admits inputs to the lanes of one dispatcher, and counts the inputs that may still be late."""

    def __init__(self) -> None:
        self._may_be_late = 1.0  # inputs
        self._late = 0.0  # the share of recent inputs that were late
        self.wakes_in_s: float | None = None  # from a parked application's next input until replicas run
        self._begins_s = -inf  # when they are expected; once that has passed without any, it is set anew

    def park(self, wakes_in_s: float | None) -> None:
        """The application has no replicas until so long after its next input; None: it has some."""
        if wakes_in_s is None:
            self._begins_s = -inf
            self._may_be_late, self._late = 1.0, 0.0  # replicas that come late say nothing about those that run
        self.wakes_in_s = wakes_in_s

    def place(
        self, lanes: Sequence[Lane], now_s: float, deadline_s: float, inside: int, limits: Limits, weight: int = 1,
        more: int = 0, full: bool = False,
    ) -> Admitted | Refusal:  # fmt: skip
        """The first lane that admits an input, or why all refuse. `more`: see `Lane.expected`, the rest: see `risk`."""
        refusals, begins_s = list[Refusal](), now_s
        if self.wakes_in_s is not None:
            if self._begins_s < now_s:
                self._begins_s = now_s + self.wakes_in_s
            begins_s = self._begins_s
        for lane, expected in ranked(lanes, begins_s, weight, more):
            risk = self.risk(lane, expected, deadline_s, inside, limits, weight, more, full)
            if not isinstance(risk, Refusal):
                return Admitted(lane, expected, risk)
            refusals.append(risk)
        if self.wakes_in_s is not None:
            return Refusal("the application is parked; its replicas are starting", begins_s - now_s, parked=True)
        return min(refusals, key=lambda each: each.retry_after_s)

    def risk(
        self, lane: Lane, expected: ExpectedTimes, deadline_s: float, inside: int, limits: Limits, weight: int = 1,
        more: int = 0, full: bool = False,
    ) -> float | Refusal:  # fmt: skip
        """The probability that an input is late if it is admitted to this lane, or why it is refused.

        `inside`: the number of inputs that are admitted before it and have not ended; `more`: the weight of those that
        belong to the same request and go to the same lane; `full`: the input leaves at no ramp.
        """
        left_s = deadline_s - expected.now_s
        alone = alone_risk(lane, expected, left_s, weight)
        if self.wakes_in_s is None:
            lane.unavoidable += LEARNING_RATE * (alone - lane.unavoidable)
        tolerated = self._tolerated(lane, alone)
        allowed = self._allowed_risk(lane, tolerated)
        risk = expected.late(left_s)
        # In an empty lane only the plan's times decide. Otherwise replicas that were slow for a while, so that all
        # inputs are refused, would get no launch that could show that they are fast again.
        if risk > allowed and (lane.busy or lane.alone_s(weight, more) > left_s):
            late_s = max(0.0, expected.needed_s(allowed) - left_s)
            return Refusal("the deadline cannot be met with what is ahead", late_s)
        full_late_s = expected.latest_end_s - left_s if full else 0.0
        if full_late_s > 0 and (lane.busy or lane.alone_until_s(weight, more)[-1] > left_s):
            return Refusal("the deadline cannot be met by the full network", full_late_s)
        if inside >= limits.backlog:
            return Refusal(f"the backlog of {limits.backlog} inputs is full", expected.latest_s)
        self._late -= LATE_RATE * self._late
        self._add(tolerated - risk)
        return risk

    def ended(self, risk: float, late: bool) -> None:
        """Count an input that ended. If estimates are too pessimistic, this leaves room for more inputs."""
        self._late += LATE_RATE * late
        self._add(risk - late)

    def needed_s(self, lane: Lane, expected: ExpectedTimes, left_s: float, weight: int = 1) -> float:
        """The time that an input needs to be admitted to this lane, if it has about `left_s`."""
        tolerated = self._tolerated(lane, alone_risk(lane, expected, left_s, weight))
        return expected.needed_s(self._allowed_risk(lane, tolerated))

    def _tolerated(self, lane: Lane, alone: float) -> float:
        """The share of a lane's inputs that may be late, of those that are late with probability `alone` if alone.

        If other inputs have enough time, an input with little time may not be late more often than they are.
        """
        unavoidable = MOST_OVER_UNAVOIDABLE * min(alone, lane.unavoidable) if lane.unavoidable > MAX_LATE else 0.0
        spare = OVER_ROOM * lane.room_left * max(0.0, 1.0 - self._late / TOO_LATE)
        return max(MAX_LATE, min(MOST_RISK, max(unavoidable, spare)))

    def _allowed_risk(self, lane: Lane, tolerated: float) -> float:
        """The highest risk that is admitted. The tolerated share may always be late, even if more than that were late.

        Otherwise a rush would be followed by a time in which all inputs are refused until the lanes are almost empty.
        """
        return max(tolerated, min(highest_risk(lane, tolerated), self._may_be_late))

    def _add(self, inputs: float) -> None:
        self._may_be_late = max(-MOST_SAVED_INPUTS, min(MOST_SAVED_INPUTS, self._may_be_late + inputs))


def highest_risk(lane: Lane, tolerated: float) -> float:
    """The highest risk that a busy lane admits, where `tolerated` is the share of its inputs that may be late.

    Where replicas are idle, the share of inputs that leave at the first exit point is added: an input with time for no
    more than that would otherwise always be refused, and the replicas' time be wasted. Where launches have room and
    take as long as full ones, a risky input takes no time from others. Where each input adds half of its share of a
    full launch, that is no longer so: hence the fourth power.
    """
    idle = min(1.0, max(0.0, (BUSY_USED - lane.used) / (BUSY_USED - IDLE_USED)))
    leaves = min(MOST_RISK + lane.leaving_first, HOPELESS) - MOST_RISK
    roomy = min(1.0, max(0.0, (lane.room_left - LITTLE_ROOM) / (MUCH_ROOM - LITTLE_ROOM)))
    costs_nothing = (HOPELESS - MOST_RISK) * roomy * lane.free_joining**4
    return MOST_RISK + max(leaves * idle * tolerated / MOST_RISK, costs_nothing)


def alone_risk(lane: Lane, expected: ExpectedTimes, left_s: float, weight: int) -> float:
    """The probability that an input with this much time is late in a lane without other inputs."""
    if expected.latest_s <= left_s:
        return 0.0
    return expected._replace(ends_s=lane.alone_until_s(weight, slow=True)).late(left_s)


def ranked(lanes: Sequence[Lane], now_s: float, weight: int = 1, more: int = 0) -> Sequence[tuple[Lane, ExpectedTimes]]:
    """The lanes, the earliest expected answer first (`ExpectedTimes.rank_s`); `more` as in `Lane.expected`."""
    choices = [(lane, lane.expected(now_s, weight, more)) for lane in lanes]
    return choices if len(choices) == 1 else sorted(choices, key=lambda choice: choice[1].rank_s)


def soonest(lanes: Sequence[Lane], now_s: float, weight: int = 1) -> tuple[Lane, ExpectedTimes]:
    return ranked(lanes, now_s, weight)[0]
