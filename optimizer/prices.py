"""The cuts of each goal: linear functions of loads and latency that no plan undercuts (see optimizer/bounds.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from optimizer.bounds import ROUNDS, Cut, Floats, Path, Rates, ascend, cut, onto_simplex
from optimizer.goals import Worth
from optimizer.options import Options


@dataclass(frozen=True)
class Pricing:
    """Bounds for one graph of options."""

    options: Sequence[Options]
    worth: Worth
    at: Rates  # no plan of interest fills its batches, or paces its launches, faster
    shares: Floats | None = None  # what every kind is thought to contribute, to start from
    lateness: float = 0.0  # the price of latency to start from, of all the budget
    held: bool = False  # stay with these shares: only latency gets another price
    rounds: int = ROUNDS
    enough: float = np.inf  # a bound that need not be exceeded
    paths: list[Path] = field(default_factory=list)  # the plans met on the way: some keep every constraint

    def cuts(self) -> list[Cut]:
        """Cuts of the goal, the tightest last."""
        by_goal: dict[str, Callable[[], list[Cut]]] = {
            "goodput": self._goodput,
            "cost": self._cost,
            "goodput-per-dollar": self._dollars,
            "latency": lambda: [self.fastest()],
        }
        return by_goal[self.worth.objective.goal]()

    def fastest(self) -> Cut:
        """Latency alone: what of the budget must be left from every block on."""
        return cut(self.options, np.zeros(len(self.worth.counts)), 1.0, 0.0, self.at)[0]

    def lightest(self) -> Cut:
        """Seconds per input without regard to latency, at even prices: a first idea of the pace."""
        mu = 1 / self.worth.counts
        return cut(self.options, mu / self.worth.most_capacity(mu), 0.0, 0.0, self.at)[0]

    def relaxed(self) -> Cut:
        """The goal without regard to latency and to how many devices there are of each kind."""
        goal, objective = self.worth.objective.goal, self.worth.objective
        if goal == "goodput":
            return self.lightest()
        if goal == "latency":
            return self.fastest()
        pace = objective.goodput_per_s if goal == "cost" else 1.0
        return cut(self.options, pace * self.worth.prices, 0.0, 0.0, self.at)[0]

    @cached_property
    def scale(self) -> float:
        """A typical value: prices are counted in it."""
        bound = self.relaxed().bound
        return max(bound, 1e-12) if np.isfinite(bound) else 1.0

    def _goodput(self) -> list[Cut]:
        """1 / pace >= (mu . loads + nu * (latency - budget)) / (the most that mu gives on the devices)."""
        counts = self.worth.counts

        def solve(prices: Floats) -> tuple[Cut, Floats]:
            mu = prices[:-1] / counts
            found, path = self._cut(mu / self.worth.most_capacity(mu), prices[-1])
            uneven = path.loads / counts * (not self.held)
            return found, np.append(uneven - uneven.mean(), self._late(path))

        shares = np.full(len(counts), 1 / len(counts)) if self.shares is None else self.shares

        def project(prices: Floats) -> Floats:
            return np.append(shares if self.held else onto_simplex(prices[:-1]), max(prices[-1], 0.0))

        return ascend(np.append(shares, self.lateness / self.scale), project, solve, self.rounds, self.enough)

    def _cost(self) -> list[Cut]:
        """dollars >= pace * (price + eta) . loads - eta . counts + nu * (latency - budget)."""
        worth, pace = self.worth, self.worth.objective.goodput_per_s

        def solve(prices: Floats) -> tuple[Cut, Floats]:
            eta = prices[:-1] * self.scale / worth.counts
            found, path = self._cut(pace * (worth.prices + eta), prices[-1], float(eta @ worth.counts))
            return found, np.append((pace * path.loads / worth.counts - 1) * self.scale, self._late(path))

        return ascend(np.zeros(len(worth.counts) + 1), _at_least_0, solve, self.rounds, self.enough)

    def _dollars(self) -> list[Cut]:
        """dollars per input >= price . loads + nu * (latency - budget)."""

        def solve(prices: Floats) -> tuple[Cut, Floats]:
            found, path = self._cut(self.worth.prices, float(prices[0]))
            return found, np.array([self._late(path)])

        return ascend(np.zeros(1), _at_least_0, solve, self.rounds, self.enough)

    def _cut(self, mu: Floats, lateness: float, offset: float = 0.0) -> tuple[Cut, Path]:
        budget_s = self.worth.objective.budget_s
        price = lateness * self.scale if np.isfinite(budget_s) else 0.0
        found, path = cut(self.options, mu, price / budget_s, offset + price, self.at, self._late_s)
        self.paths.append(path)
        return found, path

    @cached_property
    def _late_s(self) -> list[Floats]:
        return [self.at.latency(each.work_s, each.fill, each.wait) for each in self.options]

    def _late(self, path: Path) -> float:
        """By how much of the budget a plan is late, in units of the goal."""
        budget_s = self.worth.objective.budget_s
        return (self.at.of(path) / budget_s - 1) * self.scale if np.isfinite(budget_s) else 0.0


def _at_least_0(prices: Floats) -> Floats:
    return np.maximum(prices, 0.0)
