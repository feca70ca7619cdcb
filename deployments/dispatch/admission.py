"""Whether an input is admitted, and to which lane: by its risk, the probability that its answer is late.

The risk follows from the work ahead of the input, from the speed of the replicas, and from where inputs leave. Two
rules decide for each lane, the lane with the earliest answer first:

1. No input has a risk above `highest_risk`: usually 50 %. It is higher where a late input costs others little: on idle
   replicas, and in launches that take no longer with it. An empty lane admits every input that has time by the plan.
2. Few of all admitted inputs are late: 1 %, or more where refusing would not help (`_tolerated`). An account holds the
   number of inputs that may still be late. Each admission adds the tolerated share, and subtracts the input's risk.
   When the input ends, its risk is added again, and 1 is subtracted if it was late. A request counts as one input: it
   has the risk of the input that should end last, and is late if any of its inputs was late.

The tolerated share is higher than 1 % in two cases, because each refusal costs an answer:
- Launches have room: a refusal would only waste the replicas' time.
- Launches vary a lot (a shared device, a busy machine), so that inputs may be late even in an empty lane. Refusals do
  not change that share, so twice that share may be late.

Where the application is parked, an input counts as if it arrived when replicas run again.

The 1 % is `MAX_LATE`. The other constants are judgements that hold in simulation: with them, beyond chance, no random
plan answers fewer inputs in time than without refusals (tests/unit/simulator/test_admission_gains.py).
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from isobatch.deployments.dispatch.lanes import LEARNING_RATE, MAX_LATE, ExpectedTimes, Lane
from isobatch.deployments.dispatch.messages import Limits, Refusal

# The highest risk (rule 1)

MOST_RISK = 0.5  # a probability: the highest risk where replicas are busy, and each input makes a launch longer
MOST_CHEAP_RISK = 0.9  # a probability: the highest risk where a late input costs others least
# Shares of the replicas' time. From the first one down to the second one, the highest risk rises.
BUSY_USED, IDLE_USED = 0.8, 0.45
# Shares of a full launch that are empty. From the first one up to the second one, the highest risk rises.
LITTLE_ROOM, MUCH_ROOM = 0.1, 0.3

# The share that may be late (rule 2)

# A factor: this many times the share of inputs that would be late in an empty lane may be late.
OVER_UNAVOIDABLE = 2.0
# A factor: if 10 % of full launches stay empty, 40 % of the inputs may be late.
LATE_PER_ROOM = 4.0
# A share of inputs. The more of them are late, the less the room in launches counts; from this share on, not at all.
TOO_LATE = 0.4
LATE_RATE = 0.01  # the weight of one input in the learned share of late ones: about the last hundred matter
# Inputs: the account lies between minus this number and this number, so that no more of them are late in a row.
MOST_SAVED_INPUTS = 8.0


class Admitted(NamedTuple):
    """The lane that admits an input, and the input's expected times and risk there."""

    lane: Lane
    expected: ExpectedTimes
    risk: float  # the probability of being late


class Admission:
    """Admits inputs to the lanes of one dispatcher, and counts the inputs that may still be late."""

    def __init__(self) -> None:
        self._may_be_late = 1.0  # the account: the number of inputs that may still be late
        self._late = 0.0  # the share of recent inputs that were late
        self.wakes_in_s: float | None = None  # from a parked application's next input until replicas run
        self._begins_s = -inf  # when replicas are expected; if none runs then, the next input sets a new time

    def park(self, wakes_in_s: float | None) -> None:
        """The application has no replicas until this time after its next input; None: it has some."""
        if wakes_in_s is None:
            self._begins_s = -inf
            self._may_be_late, self._late = 1.0, 0.0  # inputs were late for lack of replicas, which is over
        self.wakes_in_s = wakes_in_s

    def place(
        self, lanes: Sequence[Lane], now_s: float, deadline_s: float, inside: int, limits: Limits, weight: int = 1,
        more: int = 0, full: bool = False,
    ) -> Admitted | Refusal:  # fmt: skip
        """The first lane that admits an input, or the refusal that ends first. Parameters as in `risk`."""
        begins_s, first = now_s, None
        if self.wakes_in_s is not None:
            if self._begins_s < now_s:
                self._begins_s = now_s + self.wakes_in_s
            begins_s = self._begins_s
        for lane, expected in ranked(lanes, begins_s, weight, more):
            risk = self.risk(lane, expected, deadline_s, inside, limits, weight, more, full)
            if not isinstance(risk, Refusal):
                return Admitted(lane, expected, risk)
            if first is None or risk.retry_after_s < first.retry_after_s:
                first = risk
        if self.wakes_in_s is not None:
            return Refusal("the application is parked; its replicas are starting", begins_s - now_s, parked=True)
        assert first, "This is a bug: there is no lane."
        return first

    def risk(
        self, lane: Lane, expected: ExpectedTimes, deadline_s: float, inside: int, limits: Limits, weight: int = 1,
        more: int = 0, full: bool = False,
    ) -> float | Refusal:  # fmt: skip
        """The probability that an input is late if it is admitted to this lane, or why it is refused.

        `inside`: the number of inputs that were admitted before and have not ended; `more`: the weight of the inputs of
        the same request that go to this lane before this one; `full`: the input leaves at no ramp.
        """
        left_s = deadline_s - expected.now_s
        alone, risk = alone_risk(lane, expected, left_s, weight), expected.late(left_s)
        if self.wakes_in_s is None:
            lane.unavoidable += LEARNING_RATE * (alone - lane.unavoidable)
        # `_tolerated` takes time. Its result does not matter here: an input with a risk of at most MAX_LATE is admitted
        # whatever share is tolerated, and a full account stays full.
        is_safe = risk <= MAX_LATE
        tolerated = MAX_LATE if is_safe and self._may_be_late == MOST_SAVED_INPUTS else self._tolerated(lane, alone)
        # In an empty lane only the plan's times decide. Otherwise replicas that were slow for a while, so that all
        # inputs are refused, would get no launch that could show that they are fast again.
        if (
            not is_safe
            and risk > (allowed := self._allowed_risk(lane, tolerated))
            and (lane.busy or lane.alone_s(weight, more) > left_s)
        ):
            late_s = max(0.0, expected.needed_s(allowed) - left_s)
            return Refusal("the deadline cannot be met with what is ahead", late_s)
        full_late_s = expected.latest_end_s - left_s if full else 0.0
        if full_late_s > 0 and (lane.busy or lane.alone_until_s(weight, more)[-1] > left_s):
            return Refusal("the deadline cannot be met by the full network", full_late_s)
        if inside >= limits.max_inside:
            problem = f"at most {limits.max_inside} inputs may be inside this front at once (max_inside under args:)"
            return Refusal(problem, expected.latest_s)
        self._late -= LATE_RATE * self._late
        self._add(tolerated - risk)
        return risk

    def ended(self, risk: float, late: bool) -> None:
        """Count an input that ended. If the risks are too pessimistic, the account grows."""
        self._late += LATE_RATE * late
        self._add(risk - late)

    def needed_s(self, lane: Lane, expected: ExpectedTimes, left_s: float, weight: int = 1) -> float:
        """The time that an input needs to be admitted to this lane, if it has about `left_s`."""
        tolerated = self._tolerated(lane, alone_risk(lane, expected, left_s, weight))
        return expected.needed_s(self._allowed_risk(lane, tolerated))

    def _tolerated(self, lane: Lane, alone: float) -> float:
        """The share of a lane's inputs that may be late. `alone`: the risk of this input in an empty lane.

        If most inputs have enough time, the lane's mean is small, and an input with little time may not be late either.
        """
        unavoidable = OVER_UNAVOIDABLE * min(alone, lane.unavoidable) if lane.unavoidable > MAX_LATE else 0.0
        spare = LATE_PER_ROOM * lane.room_left * max(0.0, 1.0 - self._late / TOO_LATE)
        return max(MAX_LATE, min(MOST_RISK, max(unavoidable, spare)))

    def _allowed_risk(self, lane: Lane, tolerated: float) -> float:
        """The highest risk that is admitted now. It is at least the tolerated share, even if the account is empty.

        Otherwise, after a rush, all inputs would be refused until the lanes are almost empty.
        """
        return max(tolerated, min(highest_risk(lane, tolerated), self._may_be_late))

    def _add(self, inputs: float) -> None:
        self._may_be_late = max(-MOST_SAVED_INPUTS, min(MOST_SAVED_INPUTS, self._may_be_late + inputs))


def highest_risk(lane: Lane, tolerated: float) -> float:
    """The highest risk that a busy lane admits, where `tolerated` is the share of its inputs that may be late.

    It is `MOST_RISK` and the larger of two additions:
    - Replicas are idle: the share of inputs that leave at the first exit point. An input that has time for the first
      exit point only would otherwise always be refused, and the replicas' time be wasted.
    - Launches have room and take as long as full ones, so that a late input takes no time from others. The addition
      falls quickly where each input makes a launch longer: hence the fourth power.
    """
    idle = min(1.0, max(0.0, (BUSY_USED - lane.used) / (BUSY_USED - IDLE_USED)))
    leaves = min(MOST_RISK + lane.estimates.leaving[0], MOST_CHEAP_RISK) - MOST_RISK
    roomy = min(1.0, max(0.0, (lane.room_left - LITTLE_ROOM) / (MUCH_ROOM - LITTLE_ROOM)))
    costs_nothing = (MOST_CHEAP_RISK - MOST_RISK) * roomy * lane.free_joining**4
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


def deciding(lanes: Sequence[Lane], now_s: float, weights: Sequence[int]) -> tuple[int, int]:
    """The weight of the input of a request that should end last, and the weight before it in each lane.

    That is the last input, or the heaviest one.
    """
    heaviest, last = max(weights), (weights[-1], sum(weights[:-1]) // len(lanes))
    if heaviest == weights[-1]:
        return last
    heavy = heaviest, sum(weights[: weights.index(heaviest)]) // len(lanes)
    return max(last, heavy, key=lambda each: ranked(lanes, now_s, *each)[0][1].latest_s)
