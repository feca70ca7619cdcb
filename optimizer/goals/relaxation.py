"""The part of the search that goals use: cuts, which bound the value of every plan, and the means to raise them.

A second of kind c costs `mu[c]` and a second of latency costs `nu`. A `Cut` is one choice of these multipliers:
value >= mu . loads + nu * latency - offset for every plan that keeps the constraints. The search implements
`Relaxation` in search/multipliers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from optimizer.arrays import Floats


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


class PricedFleet(Protocol):
    """The devices of a problem, by kind."""

    @property
    def counts(self) -> Floats: ...

    @property
    def prices(self) -> Floats: ...

    def most_capacity(self, mu: Floats) -> float:
        """The largest sum of mu over devices, fractions included, that the fleet and the cost limit allow."""


class Relaxation(Protocol):
    """A planning problem with its constraints turned into multipliers: a shortest path solves it."""

    @property
    def valuation(self) -> PricedFleet: ...

    @property
    def kinds(self) -> int: ...

    @property
    def goodput_per_s(self) -> float: ...  # that the objective requires

    @property
    def shares(self) -> Floats | None: ...  # the assumed contribution of every kind, to start from

    @property
    def fixed_shares(self) -> bool: ...  # the shares stay: only the multiplier of latency changes

    @property
    def lateness(self) -> float: ...  # the multiplier of latency to start from, for all of the budget

    @property
    def scale(self) -> float: ...  # a typical value of the goal, the unit of latency's multiplier

    def fastest(self) -> Cut:
        """The cut of latency alone: the budget that must be left from every block on."""

    def evenly(self) -> Cut:
        """The cut of seconds per input, regardless of latency, when every kind contributes the same share."""

    def plain_cut(self, mu: Floats) -> Cut:
        """The cut at multipliers for device seconds alone."""

    def cut(self, mu: Floats, lateness: float = 0.0, offset: float = 0.0) -> tuple[Cut, Path]:
        """The cut at multipliers for device seconds and for lateness, and the cheapest plan at these."""

    def late(self, path: Path) -> float:
        """The share of the budget by which a plan is late, in units of the goal."""

    def ascend(
        self, start: Floats, project: Callable[[Floats], Floats], solve: Callable[[Floats], tuple[Cut, Floats]]
    ) -> list[Cut]:
        """Cuts at multipliers that raise the bound, from `start` on, the tightest last."""


def at_least_0(multipliers: Floats) -> Floats:
    return np.maximum(multipliers, 0.0)
