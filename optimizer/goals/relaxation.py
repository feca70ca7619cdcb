"""Lower bounds on the value of every plan. Goals build them from multipliers (prices) of device time and latency.

A second of kind c costs `mu[c]` and a second of latency costs `nu`. A `Cut` is one choice of these multipliers:
value >= mu . loads + nu * latency - offset for every plan that keeps the constraints.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from isobatch.optimizer.effort import EFFORT, Effort, Floats


@dataclass(frozen=True)
class Cut:
    """Multipliers, and the cost of the remaining way: `togo[a, c]` from block a when the batch comes from kind c."""

    mu: Floats
    nu: float
    offset: float
    togo: Floats
    at_s: float  # seconds per input sustained, which turn arrivals into seconds

    @property
    def bound(self) -> float:
        """A lower bound on the value of every plan."""
        return float(self.togo[0, -1]) - self.offset

    def spent(self, loads: Floats, work: Floats, arrivals: Floats) -> Floats:
        """The cost of each partial plan so far; `loads` has a column per kind."""
        paid: Floats = loads @ self.mu + self.nu * (work + arrivals * self.at_s)
        return paid


@dataclass(frozen=True)
class Path:
    """The cheapest plan at some multipliers: its loads by kind, and the parts of its latency."""

    loads: Floats
    work: float
    arrivals: float


@dataclass(frozen=True)
class Relaxation:
    """A planning problem with its constraints turned into multipliers: a shortest path solves it (search/bounds.py)."""

    counts: Floats  # devices, by kind
    prices: Floats  # US dollars per hour of a device, by kind
    most_capacity: Callable[[Floats], float]  # the largest sum of mu over devices that fleet and cost limit allow
    goodput_per_s: float  # that the objective requires
    budget_s: float  # the latency that a plan may have
    cheapest: Callable[[Floats, float, float], tuple[Cut, Path]]  # the cut at mu, nu and an offset, and its plan
    goal_bound: "Callable[[Relaxation], Cut]"  # the goal's bound before any multipliers are improved
    at_s: float  # seconds per input of the fastest plan that matters, for which batches fill soonest
    steps: int = EFFORT.ascent_steps
    enough: float = np.inf  # the search for multipliers stops at this bound
    effort: Effort = EFFORT
    shares: Floats | None = None  # the assumed contribution of every kind, to start from
    lateness: float = 0.0  # the multiplier of latency to start from, for all of the budget
    fixed_shares: bool = False  # stay with these shares: only the multiplier of latency changes
    paths: list[Path] = field(default_factory=list)  # the plans met on the way, some of which keep every constraint

    @property
    def kinds(self) -> int:
        return len(self.counts)

    @cached_property
    def scale(self) -> float:
        """A typical value of the goal, which is the unit of latency's multiplier."""
        bound = self.goal_bound(self).bound
        return max(bound, 1e-12) if np.isfinite(bound) else 1.0

    def fastest(self) -> Cut:
        """The cut of latency alone: the budget that must be left from every block on."""
        return self.cheapest(np.zeros(self.kinds), 1.0, 0.0)[0]

    def evenly(self) -> Cut:
        """The cut of seconds per input, regardless of latency, when every kind contributes the same share."""
        mu = 1 / self.counts
        with np.errstate(divide="ignore"):  # no dollars are left: no device can be paid, and the bound is infinite
            each = mu / self.most_capacity(mu)
        return self.plain_cut(each)

    def plain_cut(self, mu: Floats) -> Cut:
        """The cut at multipliers for device seconds alone."""
        return self.cheapest(mu, 0.0, 0.0)[0]

    def cut(self, mu: Floats, lateness: float = 0.0, offset: float = 0.0) -> tuple[Cut, Path]:
        """The cut at multipliers `mu` for device seconds and `lateness` for the budget, and the cheapest plan then."""
        late = lateness * self.scale if lateness and np.isfinite(self.budget_s) else 0.0
        result, path = self.cheapest(mu, late / self.budget_s, offset + late)
        self.paths.append(path)
        return result, path

    def late(self, path: Path) -> float:
        """The share of the budget by which a plan is late, in units of the goal."""
        latency_s = path.work + path.arrivals * self.at_s
        return (latency_s / self.budget_s - 1) * self.scale if np.isfinite(self.budget_s) else 0.0

    def ascend(
        self, start: Floats, project: Callable[[Floats], Floats], solve: Callable[[Floats], tuple[Cut, Floats]]
    ) -> list[Cut]:
        """Raise the bound by subgradient steps of Polyak's size. Every cut is valid; the last one is the tightest.

        `solve(multipliers)` gives the cut and the amount by which each constraint is overdrawn. Each step aims a little
        above the best bound so far, and lower after steps that did not help.
        """
        multipliers, cuts, best, hope = project(start), [], -np.inf, self.effort.first_hope
        for _ in range(self.steps):
            cut, overdrawn = solve(multipliers)
            cuts.append(cut)
            hope = hope if cut.bound > best else hope * self.effort.hope_after_failure
            best = max(best, cut.bound)
            steep = float(overdrawn @ overdrawn)
            arrived = not np.isfinite(best) or best >= self.enough or steep == 0 or hope < self.effort.last_hope
            if arrived or self.effort.out_of_time():
                break
            multipliers = project(multipliers + (best + hope * abs(best) - cut.bound) / steep * overdrawn)
        return sorted(cuts, key=lambda each: each.bound)


def at_least_0(multipliers: Floats) -> Floats:
    return np.maximum(multipliers, 0.0)
