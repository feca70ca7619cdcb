"""The requirements of each application of a fleet, and the goodput of its best plan on some of the devices."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from isobatch.optimizer.effort import EFFORT, SAME, Bools, Floats
from isobatch.optimizer.infeasible import reason
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.ceiling import Ceiling
from isobatch.optimizer.pipelines.sharing import Alone, bound_per_s, by_itself, promised_per_s
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device
from isobatch.profiles.errors import UserError

SOMETHING = 1e-6  # the least goodput of an application for which none is given: it gets some device
KindCounts = tuple[int, ...]  # devices of each kind, in the order of the fleet
FleetGoal = Literal["goodput", "cost", "fairness"]
# The worth of goodput above the required rate, as a share of that below it. It is above 0, so that no device idles.
BEYOND = 1e-3
NEAR = 0.03  # the gap of the plans of a larger fleet
LEAST_KEPT = 0.1  # of an estimate, after a simulation that sustains less
ALIKE = 0.01  # a change of a plan's goodput after which the devices are divided with the same plans


@dataclass(frozen=True)
class FleetApplication:
    """One application. `facts`: its network on the whole fleet, without the kinds that its profile lacks.

    `weight` multiplies its goodput for the goal goodput, and divides it for the goal fairness. `kept`: the share of its
    estimated goodput that was confirmed by simulation.
    """

    name: str
    facts: Problem
    objective: Objective
    weight: float = 1.0
    rate_per_s: float | None = None
    least_per_s: float = SOMETHING  # 0: it may get no device
    priority: int = 0
    kept: float = 1.0

    def needed_per_s(self, goal: FleetGoal) -> float:
        """The least goodput that a division must give this application."""
        return max(self.least_per_s, self.rate_per_s or 0.0) if goal == "cost" else self.least_per_s

    def learned(self, sustained_per_s: float, estimated_per_s: float) -> "FleetApplication":
        """The application after the simulation of a plan for which `estimated_per_s` was expected.

        Of a plan that sustains nothing a small share is kept, so that more devices are worth more.
        """
        confirmed = max(sustained_per_s / estimated_per_s, LEAST_KEPT) if estimated_per_s else 1.0
        return replace(self, kept=self.kept * confirmed)

    def worth(self, goal: FleetGoal, goodput_per_s: float, dollars: float) -> float:
        """The part of this application in the value of a division."""
        if goal == "cost":
            return -dollars
        if goal == "fairness":
            return goodput_per_s / (self.weight * (self.rate_per_s or 1.0))
        asked_per_s = min(goodput_per_s, self.rate_per_s or inf)
        return self.weight * (asked_per_s + BEYOND * (goodput_per_s - asked_per_s))


def value_of(goal: FleetGoal, worths: Sequence[float]) -> tuple[float, ...]:
    """The value of a division, the larger the better. For fairness the smallest worth counts first, then the next.

    >>> value_of("goodput", [2.0, 1.0]), value_of("fairness", [2.0, 1.0])
    ((3.0,), (1.0, 2.0))
    """
    return tuple(sorted(worths)) if goal == "fairness" else (sum(worths),)


@dataclass(frozen=True)
class Worths:
    """Rows with the most goodput that a device of each kind can add, and the kinds that have goodput by themselves."""

    rows: Floats
    able: Bools

    @classmethod
    def of(cls, application: FleetApplication, devices: Sequence[Device], gap: float, known: Alone) -> "Worths":
        facts, limits = application.facts, application.objective.for_most_goodput
        plans = [by_itself(each, facts, limits, gap, EFFORT, known) for each in facts.devices]
        alone = np.array(list(map(bound_per_s, plans)))
        rows = np.array(Ceiling(facts, limits, alone).worths())
        columns = [each.kind for each in facts.devices]
        of_fleet = [columns.index(each.kind) if each.kind in columns else -1 for each in devices]
        here = np.array(of_fleet) >= 0
        return cls(rows[:, of_fleet] * here, (alone > 0)[of_fleet] & here)


@dataclass
class PartPlans:
    """The best plans of one application on parts of the fleet, by the planner. Each part is planned once.

    Devices cost money whether or not a plan uses them: the least cost of a goodput is that of the cheapest part that
    sustains it. `held`: the devices that the application has now; None: nothing runs yet. Other devices answer nothing
    for the share `lost_share` of the time, while replicas start on them.
    """

    application: FleetApplication
    devices: Sequence[Device]
    gap: float
    held: KindCounts | None = None
    lost_share: float = 0.0
    _known: dict[KindCounts, Plan | None] = field(default_factory=dict)
    _worths: list[Worths] = field(default_factory=list)
    _alone: Alone = field(default_factory=dict)

    def knowing(self, before: "PartPlans | None") -> "PartPlans":
        """These plans with the earlier ones, if the earlier plan on all devices would promise nearly the same now."""
        if before is None or before._limits != self._limits or not before._promises_alike(self.application.facts):
            return self
        application = replace(self.application, facts=before.application.facts)
        return replace(
            self, application=application, _known=before._known, _worths=before._worths, _alone=before._alone
        )

    @property
    def _limits(self) -> tuple[object, ...]:
        return self.application.objective, list(self.devices), self.gap

    def _promises_alike(self, facts: Problem) -> bool:
        """Whether these facts equal those of the plans, or hardly change the goodput of the plan on all devices."""
        if facts == self.application.facts:
            return True
        plan = self._known.get(tuple(each.count for each in self.application.facts.devices))
        if plan is None or facts.devices != self.application.facts.devices:
            return False
        return abs(evaluate(plan, facts).goodput_per_s - promised_per_s(plan)) <= ALIKE * promised_per_s(plan)

    @property
    def worths(self) -> Worths:
        if not self._worths:
            self._worths.append(Worths.of(self.application, self.devices, self.gap, self._alone))
        return replace(self._worths[0], rows=self.application.kept * self._worths[0].rows)

    def goodput_per_s(self, counts: KindCounts) -> float:
        facts, has = self.application.facts, self._part(counts)
        here = [has[each.kind] for each in facts.devices if has[each.kind].count]
        key = tuple(has[each.kind].count for each in facts.devices)
        if key not in self._known:
            limits = self.application.objective.for_most_goodput
            given = facts.with_devices(here)
            self._known[key] = side_by_side(given, limits, self.gap, known=self._alone) if here else None
        return promised_per_s(self._known[key]) * self.application.kept

    def worth(self, goal: FleetGoal, counts: KindCounts) -> float | None:
        """The worth of these devices for the application; None if they do not do what it needs."""
        goodput_per_s = self.goodput_per_s(counts)
        if goodput_per_s < self.application.needed_per_s(goal) * (1 - SAME):
            return None
        dollars = sum(each.price_per_hour * each.count for each in self._part(counts).values())
        return self.application.worth(goal, self.average_per_s(counts), dollars)

    def average_per_s(self, counts: KindCounts) -> float:
        """The mean goodput while the division lasts: until replicas have started, only held devices answer."""
        goodput_per_s = self.goodput_per_s(counts)
        if self.held is None:
            return goodput_per_s
        first_per_s = self.goodput_per_s(tuple(map(min, counts, self.held)))
        return goodput_per_s - self.lost_share * max(0.0, goodput_per_s - first_per_s)

    def check_any(self, counts: KindCounts) -> None:
        """Raise UserError if the application has no plan even on all these devices."""
        if not self.goodput_per_s(counts):
            why = reason(self.application.facts, self.application.objective.for_most_goodput)
            raise UserError(f"{self.application.name}: {why}")

    def _part(self, counts: KindCounts) -> dict[str, Device]:
        return {each.kind: replace(each, count=count) for each, count in zip(self.devices, counts, strict=True)}
