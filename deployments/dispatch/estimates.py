"""How far off it was of late when inputs were expected to leave a lane, or to be through its stages.

What is expected leaves things out: what waits in bulk, launches that vary, a front that is late. They
show in how much later or earlier inputs really were. Their mean corrects what is expected, their spread says how sure
that is; both become small where all goes as planned. They are counted in what full launches take, so that they grow and
shrink with these where replicas become slower or faster. (In what an input's own launches take, a few milliseconds are
much for one that meets nobody, and the same share of a full launch was then feared for those who meet many.)

Where an input leaves is nobody's error: who goes on to the end of a launch takes many times longer than who leaves at
its first ramp, and the plan says how many do either. So each exit point has a time of its own, and what is learned is
how far off that was.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from typing import NamedTuple

from deployments.dispatch.route import Stage

FORGETS = 0.02  # the share of what was seen before that a launch replaces
FIRST = 8  # launches that what is believed before any is as good as
MOST_OFF = 5.0  # full launches: one outlier should not count for all
SURE = 3.0  # spreads beyond the mean: nearly nobody is later
FEW = 0.01  # of all inputs, who may be late
_STEEP = 1.702  # of the logistic curve that is nearest to the normal one


class ExpectedTimes(NamedTuple):
    """When a newcomer is expected at each exit point of a lane: seconds from now."""

    estimates: "Estimates"  # in that lane
    now_s: float
    ends_s: Sequence[float]
    full_s: float  # what full launches take on its way: the measure of how far off it is

    @property
    def mean_s(self) -> float:
        """When it has its answer, in the mean."""
        each = zip(self.estimates.leave, self.ends_s, self.estimates.off, strict=True)
        return sum([leave * (end_s + off * self.full_s) for leave, end_s, off in each])

    @property
    def rank_s(self) -> float:
        """By this, lanes are compared: halfway between when it has its answer in the mean and when the last ones do.

        The mean alone would hide behind many who leave early that the others are late.
        """
        number = self.estimates.last
        return (self.mean_s + self.ends_s[number] + self.estimates.off[number] * self.full_s) / 2

    @property
    def sure_s(self) -> float:
        """By when it has its answer, nearly for sure."""
        number = self.estimates.last
        return self.ends_s[number] + self.estimates.sure[number] * self.full_s

    @property
    def whole_s(self) -> float:
        """By when it is at the end, nearly for sure, if it leaves at no ramp."""
        return self.ends_s[-1] + self.estimates.sure[-1] * self.full_s

    def needed_s(self, chance: float) -> float:
        """How much time it must have, to be late with about this probability, if exit points are far apart."""
        estimates, number = self.estimates, 0
        while estimates.beyond[number] >= chance:
            number += 1
        # Of those who leave there.
        share = max(1e-6, (chance - estimates.beyond[number]) / estimates.leave[number])
        spreads = log(1.0 / share - 1.0) / _STEEP if share < 1.0 else -SURE
        return self.ends_s[number] + (estimates.off[number] + spreads * estimates.spread[number]) * self.full_s

    def late(self, left_s: float) -> float:
        """The probability that it has no answer within this time."""
        estimates, full_s = self.estimates, self.full_s
        if self.sure_s <= left_s:
            return estimates.beyond[estimates.last]
        each = zip(estimates.leave, self.ends_s, estimates.off, estimates.spread, strict=True)
        return sum(
            [
                leave * tail(left_s - end_s - off * full_s, spread * full_s)
                for leave, end_s, off, spread in each
                if leave
            ]
        )

    def learn(self, number: int, now_s: float) -> None:
        """It is at this exit point now."""
        if self.full_s > 0.0:
            self.estimates.learn(number, (now_s - self.now_s - self.ends_s[number]) / self.full_s)


class Estimates:
    """What was seen in one lane: how much later inputs left than expected, in what full launches take.

    All exit points of a stage share what was seen at any of them.
    """

    def __init__(self, stages: Sequence[Stage], slack: float) -> None:
        """Before any was seen, some are believed to be later by `slack`."""
        counts = [len(stage.exits) for stage in stages]
        self._exits = [slice(after - count, after) for count, after in zip(counts, accumulate(counts), strict=True)]
        self._stage_of = [number for number, count in enumerate(counts) for _ in range(count)]
        self._by_block = [
            here.start + stage.exit_at(block)
            for here, stage in zip(self._exits, stages, strict=True)
            for block in range(stage.start, stage.stop)
        ]
        self.off, self.spread = [0.0] * sum(counts), [slack / 2] * sum(counts)
        self.sure = [SURE * slack / 2] * sum(counts)  # nearly nobody is later
        self._variance, self._seen = [(slack / 2) ** 2] * len(stages), [0] * len(stages)
        reach = [*accumulate(_shares(stages), min), 0.0]
        self.leave = [here - after for here, after in pairwise(reach)]  # who has the answer at each exit point
        self.beyond = reach[1:]  # and who has not
        self.last = next(number for number, after in enumerate(self.beyond) if after <= FEW)

    def exit_at(self, block: int) -> int | None:
        """The number of the exit point at this block, or of the first behind it; None: nobody is promised so much."""
        return self._by_block[block] if block < len(self._by_block) else None

    def learn(self, number: int, off: float) -> None:
        """An input was at this exit point so much later than expected."""
        stage = self._stage_of[number]
        self._seen[stage] = seen = self._seen[stage] + 1
        share = max(FORGETS, 1.0 / (seen + FIRST))
        apart = max(-MOST_OFF, min(off, MOST_OFF)) - self.off[number]
        mean = self.off[number] + share * apart
        variance = self._variance[stage] = (1.0 - share) * (self._variance[stage] + share * apart * apart)
        self.believe(stage, mean, sqrt(variance))

    def believe(self, stage: int, off: float, spread: float) -> None:
        """From now on, inputs are expected to be so much later at all exit points of this stage."""
        here = self._exits[stage]
        count = here.stop - here.start
        self.off[here], self.spread[here] = [off] * count, [spread] * count
        self.sure[here] = [off + SURE * spread] * count


def _shares(stages: Sequence[Stage]) -> Iterator[float]:
    """Of the inputs that come, the share before the first exit point and behind each but the last.

    Where none was expected even at the first stage, all get to the end.
    """
    all_in = stages[0].survival
    for stage in stages:
        for share in (stage.survival, *(point.survival for point in stage.exits[:-1])):
            yield share / all_in if all_in else 1.0


def tail(above: float, spread: float) -> float:
    """The probability to be so far above the mean or further, by the logistic curve that is nearest to the normal one.

    >>> round(tail(0.0, 1.0), 3), round(tail(2.0, 1.0), 3), tail(-1e-9, 0.0), tail(0.0, 0.0)
    (0.5, 0.032, 1.0, 0.0)
    """
    if abs(above) >= 20.0 * spread:
        return 1.0 if above < 0.0 else 0.0
    return 1.0 / (1.0 + exp(_STEEP * above / spread))
