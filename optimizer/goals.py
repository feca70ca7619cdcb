"""What a finished set of splits is worth: how many replicas each placement gets, and the value that is minimised."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from optimizer import cost
from optimizer.objective import Objective
from optimizer.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CLOSE = 1e-12  # a replica is not added for the last bit of a float


@dataclass(frozen=True)
class Outcome:
    """The best that can be made of some loads: its value (small is good), its pace, and replicas by column."""

    value: float
    pace: float
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Worth:
    """Values partial and finished plans. A column is a placement; `kind_of[column]` is its kind."""

    facts: Problem
    objective: Objective
    kind_of: tuple[int, ...]

    @cached_property
    def counts(self) -> Floats:
        return np.array([float(device.count) for device in self.facts.devices])

    @cached_property
    def prices(self) -> Floats:
        return np.array([device.price_per_hour for device in self.facts.devices])

    @property
    def allowed(self) -> float:
        return inf if self.objective.cost_per_hour is None else self.objective.cost_per_hour * (1 + CLOSE)

    @property
    def wanted(self) -> float:
        """The rate at which inputs come, however fast the plan is."""
        return self.objective.rate_at(inf)

    def least_pace(self, work: float, fill: float, wait: float) -> float:
        """The pace from which on the latency fits; infinite when no pace helps.

        Both waits shrink as the pace grows, but batches fill no faster than inputs come.
        """
        floor, spare = self.objective.goodput_per_s, self.objective.budget_s - work
        if np.isinf(spare):
            return floor
        if spare < -CLOSE:
            return inf
        pace = (fill + wait) / max(spare, CLOSE)
        if pace > self.wanted:
            spare -= fill / self.wanted
            pace = max(wait / spare, self.wanted) if spare > 0 else inf
        return max(floor, pace)

    def outcome(self, loads: Floats, work: float, fill: float, wait: float, best: float = inf) -> Outcome | None:
        """The best replicas for these loads, if any of them has a value below `best`."""
        pace = self.least_pace(work, fill, wait)
        if np.isinf(pace) or not (loads > 0).any():
            return None
        if self.objective.goal == "goodput" and np.isfinite(best):
            pace = max(pace, 1 / best)  # slower ones would not be taken
        found: Outcome | None = None
        for replicas, sustained in self._staircase(loads, pace):
            value = self._value(replicas, sustained, work, fill, wait)
            if found is None or value < found.value:
                found = Outcome(value, sustained, replicas)
            if self.objective.goal == "cost":
                break
        return found if found and found.value < best else None

    def alone(self, kind: int, loads: Floats, work: Floats, fill: Floats, wait: Floats) -> Floats:
        """Values of plans with one placement, on that kind: as `outcome` has it, of many at once."""
        price, goal = float(self.prices[kind]), self.objective.goal
        most = min(self.counts[kind], np.floor(self.allowed / price)) if price else self.counts[kind]
        paces = self._least_paces(work, fill, wait)
        replicas = np.maximum(1.0, np.ceil(paces * loads * (1 - CLOSE)))
        if goal == "goodput":
            values = loads / max(most, 1.0)
        elif goal == "latency":
            pace = max(most, 1.0) / loads
            values = work + fill / np.minimum(pace, self.wanted) + wait / pace
        else:
            values = price * (np.minimum(replicas, most) if goal == "cost" else loads)
        return np.where(replicas <= most, values, inf)

    def _least_paces(self, work: Floats, fill: Floats, wait: Floats) -> Floats:
        """`least_pace` of many."""
        if np.isinf(self.objective.budget_s):
            return np.full(len(work), self.objective.goodput_per_s)
        spare = self.objective.budget_s - work
        pace = (fill + wait) / np.maximum(spare, CLOSE)
        left = spare - fill / self.wanted
        slower = np.where(left > 0, np.maximum(wait / np.where(left > 0, left, 1.0), self.wanted), inf)
        pace = np.where(pace > self.wanted, slower, pace)
        return np.where(spare < -CLOSE, inf, np.maximum(self.objective.goodput_per_s, pace))

    def _value(self, replicas: Sequence[int], pace: float, work: float, fill: float, wait: float) -> float:
        goal = self.objective.goal
        if goal == "goodput":
            return 1 / pace
        if goal == "latency":
            return cost.latency_s(work, fill, wait, self.objective.rate_at(pace), pace)
        price = float(self.prices[list(self.kind_of)] @ replicas)
        return price if goal == "cost" else price / pace

    def _staircase(self, loads: Floats, pace: float) -> Iterator[tuple[tuple[int, ...], float]]:
        """The fewest replicas for every pace from `pace` on, as far as the fleet goes.

        To go faster, the slowest placement needs one replica more: there is no other way, so nothing is missed.
        """
        used = np.nonzero(loads > 0)[0]
        heavy, kinds = loads[used], np.array(self.kind_of)[used]
        replicas = np.maximum(1.0, np.ceil(pace * heavy * (1 - CLOSE)))
        if self._leaps and self._affordable(replicas, kinds):
            pace = float((self.counts[kinds] / heavy).min())
            replicas = np.maximum(1.0, np.ceil(pace * heavy * (1 - CLOSE)))
        while self._affordable(replicas, kinds):
            paces = replicas / heavy
            slowest = int(paces.argmin())
            yield self._by_column(used, replicas), float(paces[slowest])
            replicas[slowest] += 1

    @cached_property
    def _leaps(self) -> bool:
        """Whether the fastest plan simply takes all devices of a kind for its one placement."""
        alone = len(set(self.kind_of)) == len(self.kind_of)
        return alone and np.isinf(self.allowed) and self.objective.goal in ("goodput", "latency")

    def _affordable(self, replicas: Floats, kinds: Ints) -> bool:
        used = np.bincount(kinds, replicas, len(self.counts))
        return bool((used <= self.counts).all() and used @ self.prices <= self.allowed)

    def _by_column(self, used: Ints, replicas: Floats) -> tuple[int, ...]:
        columns = np.zeros(len(self.kind_of), np.int64)
        columns[used] = replicas
        return tuple(int(count) for count in columns)

    def most_capacity(self, mu: Floats) -> float:
        """The largest sum of mu over devices that the fleet and the money allow (fractions of devices too)."""
        if np.isinf(self.allowed):
            return float(mu @ self.counts)
        worth = mu / np.maximum(self.prices, 1e-300)
        total, money = 0.0, self.allowed
        for kind in np.argsort(-worth):
            count = min(self.counts[kind], money / self.prices[kind]) if self.prices[kind] else self.counts[kind]
            total, money = total + count * mu[kind], money - count * self.prices[kind]
        return float(total)
