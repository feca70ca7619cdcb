"""Ramps that a plan has closed hide who would leave there. Now and then they are opened for a moment.

Without it, a plan without ramps could never find out that inputs have become easy again.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.controller.config import Patience
from optimizer.plan import Placement, Plan, Split

OFTEN = 3  # times while a plan is expected to hold: behind a closed ramp inputs may change unseen all that time


@dataclass(frozen=True)
class Peek:
    """Back to `before` after one look. `number` is its event's."""

    before: Plan
    number: int


class Peeking:
    """When to open closed ramps: now and then, and when inputs have surprised since all were open last.

    One open ramp is no reason to wait longer: whether inputs are sure there, or were three blocks before, looks alike.
    """

    def __init__(self, patience: Patience, now_s: float) -> None:
        self._patience = patience
        self.opened_s = self.surprised_s = now_s

    def is_due(self, plan: Plan, ramp_blocks: Collection[int], now_s: float, *, idle: bool) -> bool:
        """`idle`: nothing else is to be done."""
        if set(ramp_blocks) <= set(plan.ramps):
            return False
        since_s, window_s = now_s - self.opened_s, self._patience.replan_every_s
        if self.surprised_s > self.opened_s and since_s >= window_s:
            return True
        return idle and since_s >= self._patience.hold_windows * window_s / OFTEN


def opened(plan: Plan, ramp_blocks: Collection[int]) -> Plan:
    """The same plan with every ramp open.

    >>> from optimizer import Placement
    >>> opened(Plan((Placement("v100", 1, (Split(0, 3, 8),)),)), [0, 1]).ramps
    (0, 1)
    """
    first, *others = (
        replace(lane, placements=tuple(_opened(each, ramp_blocks) for each in lane.placements)) for lane in plan.lanes
    )
    return replace(first, promise=plan.promise, beside=tuple(others))


def _opened(placement: Placement, ramp_blocks: Collection[int]) -> Placement:
    def ramps(split: Split) -> tuple[int, ...]:
        return tuple(ramp for ramp in sorted(ramp_blocks) if split.start <= ramp < split.stop)

    return replace(placement, splits=tuple(replace(split, ramps=ramps(split)) for split in placement.splits))
