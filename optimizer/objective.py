"""The objective of a plan: its goal, and the limits that it must keep."""

from dataclasses import dataclass, replace

from isobatch.optimizer.goals import GOALS, Goal
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import MOST_BATCH


@dataclass(frozen=True)
class Objective:
    """The goal by its name (optimizer/goals), and the limits that every plan must keep.

    >>> Objective(slo_s=0.5).budget_s
    0.4
    """

    goal: str = "goodput"
    slo_s: float | None = None
    slack: float = 0.2  # the share of the SLO that is reserved for bursts
    goodput_per_s: float = 0.0  # at least
    cost_per_hour: float | None = None  # US dollars, at most
    max_batch: int = MOST_BATCH  # beside this, a latency table's largest batch is a limit
    fixed_batch: int | None = None  # every split launches exactly this batch size, as in E3's figures
    # Early answers (optimizer/early_answers.py): ramps may delay the network by this share of its time; None: no.
    ramp_budget: float | None = None
    cuts: tuple[int, ...] | None = None  # the network is cut exactly before these blocks; None: where it pays

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UserError(f"goal = {self.goal!r} must be one of {', '.join(GOALS)}")
        if self.slo_s is not None and not self.slo_s > 0:
            raise UserError(f"slo_s = {self.slo_s} must be positive")
        if not 0 <= self.slack < 1:
            raise UserError(f"slack = {self.slack} must be at least 0 and less than 1")
        if not self.goodput_per_s >= 0 or (self.aim.at_given_goodput and self.goodput_per_s == 0):
            raise UserError(f"goodput_per_s = {self.goodput_per_s} must be above 0: which rate must the plan sustain?")
        if self.cost_per_hour is not None and not self.cost_per_hour >= 0:
            raise UserError(f"cost_per_hour = {self.cost_per_hour} must be 0 or more")
        if not 1 <= self.max_batch <= MOST_BATCH:
            raise UserError(f"max_batch = {self.max_batch} must be from 1 to {MOST_BATCH}")
        if self.fixed_batch is not None and self.fixed_batch < 1:
            raise UserError(f"fixed_batch = {self.fixed_batch} must be at least 1")
        if self.cuts is not None and list(self.cuts) != sorted({cut for cut in self.cuts if cut > 0}):
            raise UserError(f"cuts = {self.cuts} must ascend, from 1 up")

    @property
    def aim(self) -> Goal:
        return GOALS[self.goal]

    @property
    def batches(self) -> tuple[int, int]:
        """The smallest and the largest batch that a split may have."""
        return (1, self.max_batch) if self.fixed_batch is None else (self.fixed_batch, self.fixed_batch)

    @property
    def budget_s(self) -> float:
        """The latency a plan may have: the SLO less its slack."""
        return float("inf") if self.slo_s is None else self.slo_s * (1 - self.slack)

    @property
    def for_most_goodput(self) -> "Objective":
        """The same SLO, for the most goodput at any cost."""
        return replace(self, goal="goodput", goodput_per_s=0.0, cost_per_hour=None)

    def within(self, limit: float) -> "Objective":
        """The same objective, with this share of the SLO as the limit of the estimated latency, and no slack."""
        assert self.slo_s
        return replace(self, slo_s=limit * self.slo_s, slack=0.0)
