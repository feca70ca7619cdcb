"""The relaxation of one problem, from which the goals (optimizer/goals) build their bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from optimizer.arrays import Floats
from optimizer.effort import EFFORT, Effort
from optimizer.goals.relaxation import Cut, Path
from optimizer.model.valuation import Valuation
from optimizer.search.bounds import ascend, cut
from optimizer.search.options import Options


@dataclass(frozen=True)
class LagrangianRelaxation:
    """The problem with its constraints turned into multipliers, as goals use it (goals/relaxation.py)."""

    options: Sequence[Options]
    valuation: Valuation
    at_s: float  # seconds per input of the fastest plan that matters, for which batches fill soonest
    shares: Floats | None = None
    lateness: float = 0.0
    fixed_shares: bool = False
    steps: int = EFFORT.ascent_steps
    enough: float = np.inf  # the search for multipliers stops at this bound
    effort: Effort = EFFORT
    paths: list[Path] = field(default_factory=list)  # the plans met on the way, some of which keep every constraint

    @property
    def kinds(self) -> int:
        return len(self.valuation.counts)

    @property
    def goodput_per_s(self) -> float:
        return self.valuation.objective.goodput_per_s

    def cuts(self) -> list[Cut]:
        """Cuts of the goal, the tightest last."""
        return self.valuation.objective.aim.cuts(self)

    def first_bound(self) -> Cut:
        """The goal's bound before any multipliers are improved."""
        return self.valuation.objective.aim.first_bound(self)

    def fastest(self) -> Cut:
        return cut(self.options, np.zeros(self.kinds), 1.0, 0.0, self.at_s)[0]

    def evenly(self) -> Cut:
        mu = 1 / self.valuation.counts
        return self.plain_cut(mu / self.valuation.most_capacity(mu))

    def plain_cut(self, mu: Floats) -> Cut:
        return cut(self.options, mu, 0.0, 0.0, self.at_s)[0]

    @cached_property
    def scale(self) -> float:
        bound = self.first_bound().bound
        return max(bound, 1e-12) if np.isfinite(bound) else 1.0

    def cut(self, mu: Floats, lateness: float = 0.0, offset: float = 0.0) -> tuple[Cut, Path]:
        budget_s = self.valuation.objective.budget_s
        late = lateness * self.scale if lateness and np.isfinite(budget_s) else 0.0
        result, path = cut(self.options, mu, late / budget_s, offset + late, self.at_s, self._late_s)
        self.paths.append(path)
        return result, path

    def ascend(
        self, start: Floats, project: Callable[[Floats], Floats], solve: Callable[[Floats], tuple[Cut, Floats]]
    ) -> list[Cut]:
        return ascend(start, project, solve, self.steps, self.enough, self.effort)

    @cached_property
    def _late_s(self) -> list[Floats]:
        return [each.latency_s(self.at_s) for each in self.options]

    def late(self, path: Path) -> float:
        budget_s = self.valuation.objective.budget_s
        return ((path.work + path.arrivals * self.at_s) / budget_s - 1) * self.scale if np.isfinite(budget_s) else 0.0
