"""Exploration: closed ramps are opened for one look now and then, to count the inputs that would leave there.

Otherwise a plan without ramps could never learn that inputs have become easy again.
"""

from collections.abc import Collection
from dataclasses import replace

from isobatch.cluster.controller.config import Patience
from isobatch.optimizer.plan import Plan, Split

EXPLORATIONS_PER_HOLD = 3  # while a plan is expected to hold: in between, exits at closed ramps are unknown


class ExplorationSchedule:
    """When to open all ramps for a look: regularly, and one window after inputs contradicted the forecast.

    A plan with some open ramps is explored as often as a plan without any: an input that was sure three blocks before
    an open ramp looks like an input that is sure at that ramp.
    """

    def __init__(self, patience: Patience, now_s: float) -> None:
        self._patience = patience
        self.explored_s = self.surprised_s = now_s

    def is_due(self, plan: Plan, ramp_blocks: Collection[int], now_s: float, *, idle: bool) -> bool:
        """Whether to explore now. `idle`: the plan is not about to be changed anyway."""
        if all(set(ramp_blocks) <= set(pipeline.ramps) for pipeline in plan.pipelines):
            return False
        since_s, window_s = now_s - self.explored_s, self._patience.replan_every_s
        if self.surprised_s > self.explored_s and since_s >= window_s:
            return True
        return idle and since_s >= self._patience.hold_windows * window_s / EXPLORATIONS_PER_HOLD


def with_all_ramps(plan: Plan, ramp_blocks: Collection[int]) -> Plan:
    """The same plan with every ramp open.

    >>> from isobatch.optimizer import Placement
    >>> with_all_ramps(Plan((Placement("v100", 1, (Split(0, 3, 8),)),)), [0, 1]).ramps
    (0, 1)
    """

    def opened(split: Split) -> Split:
        return replace(split, ramps=tuple(ramp for ramp in sorted(ramp_blocks) if split.start <= ramp < split.stop))

    def of_pipeline(pipeline: Plan) -> Plan:
        placements = (replace(each, splits=tuple(map(opened, each.splits))) for each in pipeline.placements)
        return replace(pipeline, placements=tuple(placements))

    return plan.with_each(of_pipeline)
