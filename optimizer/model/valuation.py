"""Values plans by their loads: finds the best number of replicas for each placement, and the value of the goal."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

import numpy as np

from isobatch.optimizer.effort import LAST_BITS, SAME, Floats, Ints, Number
from isobatch.optimizer.model import split_costs
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.problem import Problem

NO_MONEY = 1e-200  # dollars per hour: no device costs so little


@dataclass(frozen=True)
class Staffing:
    """The best replicas for some loads, by column, with the value (the smaller, the better) and the goodput."""

    value: float
    goodput_per_s: float
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Valuation:
    """Values partial and finished plans. A column is a placement, of kind `kind_of[column]`."""

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
        """The dollars per hour that a plan may cost: above 0, since free devices are divided by their price, too."""
        most = self.objective.cost_per_hour
        return inf if most is None else max(most * (1 + LAST_BITS), NO_MONEY)

    def least_goodput_per_s(self, work: Number, arrivals: Number) -> Number:
        """The least goodput at which the latency is within budget; infinite if there is none."""
        spare = self.objective.budget_s - work
        goodput = arrivals / np.maximum(spare, LAST_BITS)
        return np.where(spare < -LAST_BITS, inf, np.maximum(self.objective.goodput_per_s, goodput))[()]

    def _least_per_s(self, work: float, arrivals: float) -> float:
        """`least_goodput_per_s` of one plan, in plain numbers: arrays would take ten times as long."""
        spare = self.objective.budget_s - work
        return inf if spare < -LAST_BITS else max(self.objective.goodput_per_s, arrivals / max(spare, LAST_BITS))

    def staffed(self, loads: Floats, work: float, arrivals: float, below: float = inf) -> Staffing | None:
        """The best replicas for these loads, if any of them has a value below `below`."""
        goal, least = self.objective.aim, self._least_per_s(work, arrivals)
        least = max(least, goal.least_goodput_per_s(below))  # with less goodput, the value is above `below`
        if not self._may_be_below(below, loads, work, arrivals, least):
            return None
        used = np.nonzero(loads > 0)[0]
        heavy, kinds = loads[used], np.array(self.kind_of)[used]
        replicas = _fewest(least, heavy)
        if not self._affordable(replicas, kinds):
            return None
        if self._takes_all:
            replicas = _fewest((self.counts[kinds] / heavy).min(), heavy)
        elif goal.best_with != "fewest":
            steps = self._steps(replicas, heavy, kinds)
            values = self._values(steps, heavy, kinds, work, arrivals)
            replicas = steps[int((values <= values.min() * (1 + LAST_BITS)).argmax())]  # the fewest of equal values
        columns = np.zeros(len(self.kind_of), np.int64)
        columns[used] = replicas
        value = float(self._values(replicas, heavy, kinds, work, arrivals))
        return Staffing(value, float((replicas / heavy).min()), tuple(columns.tolist())) if value < below else None

    def _may_be_below(self, below: float, loads: Floats, work: float, arrivals: float, least: float) -> bool:
        """Whether these loads may have a value below `below` with at least the goodput `least`: at the price of the
        fewest replicas, and with the goodput of the most. Plain numbers rule out most loads quickly."""
        price, goodput_per_s = 0.0, inf
        for kind, load in zip(self.kind_of, loads.tolist(), strict=True):
            if load > 0:
                device = self.facts.devices[kind]
                if (replicas := max(1.0, least * load * (1 - LAST_BITS))) > device.count:
                    return False
                price += ceil(replicas) * device.price_per_hour
                goodput_per_s = min(goodput_per_s, device.count / load)
        if goodput_per_s == inf:
            return False
        latency_s = split_costs.latency_s(work, arrivals, goodput_per_s)
        return bool(self.objective.aim.value(goodput_per_s, price, latency_s) < below * (1 + SAME))

    def _values(self, replicas: Floats, heavy: Floats, kinds: Ints, work: float, arrivals: float) -> Number:
        """The value of the goal with these replicas, or with those of each row."""
        goodputs = (replicas / heavy).min(axis=-1)
        latencies_s = split_costs.latency_s(work, arrivals, goodputs)
        return self.objective.aim.value(goodputs, replicas @ self.prices[kinds], latencies_s)

    def of_one_placement(self, kind: int, loads: Floats, work: Floats, arrivals: Floats) -> Floats:
        """`staffed` for arrays of plans with one placement on this kind: their values."""
        price = float(self.prices[kind])
        most = min(self.counts[kind], np.floor(self.allowed / price)) if price else self.counts[kind]
        fewest = _fewest(self.least_goodput_per_s(work, arrivals), loads)

        def latency_s(goodputs: Floats) -> Floats:
            return np.asarray(work + arrivals / goodputs)

        values = self.objective.aim.of_one_placement(loads, fewest, most, price, latency_s)
        return np.where(fewest <= most, values, inf)

    def _steps(self, first: Floats, heavy: Floats, kinds: Ints) -> Floats:
        """The fewest replicas for every goodput from that of the first ones up, as far as the fleet goes, as rows.

        More goodput always needs one more replica of some placement, so nothing is missed.
        """
        most = np.minimum(self.counts[kinds], self.allowed / np.maximum(self.prices[kinds], 1e-300))
        numbers = zip(first, most, heavy, strict=True)
        goodputs = np.unique(np.concatenate([np.arange(low, high + 1) / each for low, high, each in numbers]))
        rows = np.maximum(first, _fewest(goodputs[:, None], heavy))
        return rows[: bisect_left(range(len(rows)), True, key=lambda row: not self._affordable(rows[row], kinds))]

    @cached_property
    def _takes_all(self) -> bool:
        """Whether the best plan is to take all devices of a kind for its one placement."""
        alone = len(set(self.kind_of)) == len(self.kind_of)
        return alone and np.isinf(self.allowed) and self.objective.aim.best_with == "most"

    def _affordable(self, replicas: Floats, kinds: Ints) -> bool:
        used = np.bincount(kinds, replicas, len(self.counts))
        return bool((used <= self.counts).all() and used @ self.prices <= self.allowed)

    def most_capacity(self, mu: Floats) -> float:
        """The largest sum of mu over devices, fractions included, that the fleet and the cost limit allow."""
        if np.isinf(self.allowed):
            return float(mu @ self.counts)
        per_dollar = mu / np.maximum(self.prices, 1e-300)
        total, money = 0.0, self.allowed
        for kind in np.argsort(-per_dollar):
            count = min(self.counts[kind], money / self.prices[kind]) if self.prices[kind] else self.counts[kind]
            total, money = total + count * mu[kind], money - count * self.prices[kind]
        return float(total)


def _fewest(goodput_per_s: Number, heavy: Floats) -> Floats:
    """The fewest replicas of each placement that sustain this goodput."""
    replicas: Floats = np.maximum(1.0, np.ceil(goodput_per_s * heavy * (1 - LAST_BITS)))
    return replicas
