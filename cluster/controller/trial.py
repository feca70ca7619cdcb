"""A new plan is on trial: is it at least as good as the one before would have been, for the same arrivals?

What the old plan would have done is what the cost model says of it now, times the share of such sayings that it kept
while it ran. So neither harder inputs nor a quieter hour speak against the new plan.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deployments.front.observed import Observed, merged
from optimizer.plan import Plan

ENOUGH = 50  # arrivals before anything can be said
BUSY = 0.9  # of what the old plan sustained: with fewer arrivals no gain can be seen, only a loss


@dataclass(frozen=True)
class Outcome:
    """What a trial came to. `gain` is None where there was too little to do to see one."""

    gain: float | None
    failed: bool
    why: str


@dataclass
class Trial:
    """Of the change that event `number` tells. `kept` is the share of its promise that the old plan kept."""

    number: int
    before: Plan
    kept: float
    seen: Observed | None = None
    moved: bool = False  # the first look still saw the old plan, and the move itself

    def add(self, observed: Observed) -> None:
        if not self.moved:
            self.moved = True
            return
        self.seen = merged([self.seen, observed]) if self.seen else observed

    def judge(self, sustained: Callable[[Plan], float], least_loss: float) -> Outcome | None:
        """`sustained` is the cost model, for the inputs and the tables of now. None: too early to say."""
        if self.seen is None or self.seen.arrivals < ENOUGH:
            return None
        arrivals, achieved = self.seen.arrivals_per_s, self.seen.goodput_per_s
        would = self.kept * min(arrivals, sustained(self.before))
        gain = achieved / would - 1 if would else 0.0
        chance = 2 / (would * self.seen.seconds) ** 0.5 if would else 1.0  # two standard deviations of a count
        failed = -gain > least_loss + chance
        told = f"{achieved:.4g} in time per second; the plan before would have made {would:.4g} of the same arrivals"
        return Outcome(gain if failed or arrivals > BUSY * sustained(self.before) else None, failed, told)


class Barred:
    """Plans that were rolled back, and the like of them, until when."""

    def __init__(self) -> None:
        self._until_s: dict[object, float] = {}
        self._times: dict[object, int] = {}

    def bar(self, plan: Plan, now_s: float, seconds: float) -> None:
        """Each time for twice as long."""
        shape = _shape(plan)
        self._until_s[shape] = now_s + seconds * 2 ** self._times.get(shape, 0)
        self._times[shape] = self._times.get(shape, 0) + 1

    def until_s(self, plan: Plan, now_s: float) -> float | None:
        until_s = self._until_s.get(_shape(plan), now_s)
        return until_s if until_s > now_s else None


def _shape(plan: Plan) -> object:
    """What makes two plans alike: the same cuts on the same kinds, and batches of about the same size."""
    return frozenset(
        (lane, placement.kind, split.start, split.stop, split.ramps, split.batch_size.bit_length())
        for lane, each in enumerate(plan.lanes)
        for placement in each.placements
        for split in placement.splits
    )
