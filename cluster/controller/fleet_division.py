"""The goodput that applications of a running fleet request, and the division of devices that is worth a change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.decide import is_refusing
from isobatch.cluster.controller.snapshot import expected_demand
from isobatch.deployments.front.observed import StandbyReplica
from isobatch.optimizer import Objective, Problem
from isobatch.optimizer.fleets.application import (
    NEAR,
    SOMETHING,
    FleetApplication,
    FleetGoal,
    KindCounts,
    PartPlans,
    value_of,
)
from isobatch.optimizer.fleets.division import best_division, part_plans
from isobatch.optimizer.pipelines.sharing import promised_per_s
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.devices import Device
from isobatch.profiles.errors import UserError

RESERVE = 0.1  # the share of the expected rate that an application sustains beyond it
LEAST_REQUESTED = 0.01  # the share of the fleet's goodput that an application without inputs requests
QUICK_S = 2.0  # where replicas start within this time, devices follow the present rates instead of forecasts
AGAIN_S = 5.0  # where replicas start that quickly, a division is expected to last this long after their start
GOAL_VALUES = {"goodput": "weighted goodput", "cost": "dollars per hour", "fairness": "the smallest share"}
Budget = Mapping[str, int]  # devices by kind


@dataclass(frozen=True)
class Standing:
    """What an application's controller reports to the arbiter.

    `facts` are its network, with the expected survival and the corrected tables. `uses` are the devices of the plan
    that runs, or of the one that is rolled out, whichever are more. `kept`: the share of estimated goodput that plans
    reach under load.
    """

    facts: Problem
    objective: Objective
    expected_per_s: float
    kept: float
    budget: Budget
    uses: Budget
    refuses: bool  # whether inputs were refused in the last look
    paused: bool = False  # by a person, so that its plan stays
    start_s: float = 0.0  # that a replica takes to start
    arrivals_per_s: float = 0.0  # in the present window, like `goodput_per_s`
    goodput_per_s: float = 0.0
    standby: tuple[StandbyReplica, ...] | None = ()  # None: its replicas do not stand by
    parked: bool = False  # all its replicas have ended
    quiet_s: float = 0.0  # since an input was inside
    had_inputs: bool = True  # since its controller started
    virtual: bool = False  # its devices compute nothing, and need not belong to a node

    @property
    def starts_quickly(self) -> bool:
        return self.start_s <= QUICK_S

    @classmethod
    def of(cls, controller: Controller, rolled_out: Budget, now_s: float) -> "Standing":
        """`rolled_out`: the devices of the plan that is being rolled out."""
        known, window, present = controller.known, controller.window, controller.present
        running, observed = {} if controller.window.parked else controller.running.devices(), window.observed
        demand = expected_demand(known, controller.patience, window, observed, now_s)
        return cls(
            facts=known.cost_model().facts.for_plan(controller.running).given,
            objective=known.problem.objective,
            expected_per_s=window.recent_per_s if known.record.start_s <= QUICK_S else demand.for_rate(RESERVE, 1.0),
            kept=known.record.kept_share,
            budget=present.budget,
            uses={kind: max(running.get(kind, 0), rolled_out.get(kind, 0)) for kind in present.budget},
            refuses=window.latest is not None and is_refusing(window.latest),
            paused=controller.record.paused,
            start_s=known.record.start_s,
            arrivals_per_s=observed.arrivals_per_s,
            goodput_per_s=observed.goodput_per_s,
            standby=window.latest.standby if window.latest else (),
            parked=controller.window.parked,
            quiet_s=window.quiet_s,
            had_inputs=window.had_inputs,
        )


@dataclass(frozen=True)
class DivisionProblem:
    """The applications that can be planned for, in the order of the file, and the devices that they share."""

    config: ArbiterConfig
    devices: Sequence[Device]
    plans: Sequence[PartPlans]

    @classmethod
    def of(
        cls, config: ArbiterConfig, standings: Mapping[str, Standing], present: Budget, before: Mapping[str, PartPlans]
    ) -> "DivisionProblem":
        """`before`: the plans of the decision before, by application."""
        kinds = {device.kind: device for each in standings.values() for device in each.facts.devices}
        devices = [replace(kinds[kind], count=count) for kind, count in present.items() if count > 0 and kind in kinds]
        terms = [each for each in config.applications if each.name in standings]
        every, plans = tuple(each.count for each in devices), list[PartPlans]()
        for each in part_plans([_application(each, standings[each.name], devices) for each in terms], devices):
            name = each.application.name
            known = each.knowing(before.get(name))
            if most_per_s := known.goodput_per_s(every):
                requested_per_s = max(known.application.rate_per_s or 0.0, LEAST_REQUESTED * most_per_s)
                lasts_s = AGAIN_S if standings[name].starts_quickly else config.replan_every_s
                # Counted from the end of the start: a longer start would else make each new device worth nothing.
                lost_share = standings[name].start_s / (standings[name].start_s + lasts_s)
                plans.append(replace(_with(known, rate_per_s=requested_per_s), lost_share=lost_share))
        return cls(config, devices, plans)

    def better(self, held: Mapping[str, Budget]) -> tuple[dict[str, Budget], str] | None:
        """The budgets of a division that is worth its changes, and why; None: the present one stays."""
        own = self._parts({each.name: each.devices for each in self.config.applications})
        present = self._parts(held)
        known = [parts for parts in (present, own) if self._fits(parts)]
        for goal, relaxed in self._relaxations():
            plans = [
                replace(each, held=part) for each, part in zip(self._with_needs(own, relaxed), present, strict=True)
            ]
            try:
                after = best_division(plans, self.devices, goal, known=known).parts
            except UserError:
                continue
            # An application that lacks only its reserve has enough, so that devices do not always move.
            without_reserve = [_with(each, least_per_s=each.application.least_per_s / (1 + RESERVE)) for each in plans]
            value = _requested_value(without_reserve, goal, present) if present in known else None
            better_value = _requested_value(plans, goal, after)
            assert better_value is not None, "This is a bug: a division gives each application what it needs."
            if value is None:
                why = "not all have what they need"
            elif better_value - value <= self.config.least_gain * abs(value):
                return None
            else:
                why = f"{GOAL_VALUES[goal]} {abs(value):,.4g} becomes {abs(better_value):,.4g}"
            return self._budgets(after), f"{why}{_short(plans, self._with_needs(own, 0))}"
        return None

    def _relaxations(self) -> Iterator[tuple[FleetGoal, int]]:
        """Goals, each with the number of needs that are dropped, those of the lowest priority first."""
        if self.config.goal == "cost":
            yield "cost", 0
        goal = "goodput" if self.config.goal == "cost" else self.config.goal
        yield from ((goal, relaxed) for relaxed in range(4 * len(self.plans) + 1))

    def _with_needs(self, own: Sequence[KindCounts], relaxed: int) -> list[PartPlans]:
        """The plans with the need of each application. A dropped need leaves the next smaller one:

        1. its least goodput, and the goodput that it requests, as far as its own devices sustain this
        2. the same, with its least goodput as far as its own devices sustain it
        3. its least goodput, as far as its own devices sustain it
        4. any device, because a controller needs one
        5. nothing: it is parked
        """
        order = sorted(range(len(self.plans)), key=lambda index: (self.plans[index].application.priority, -index))
        plans = []
        for index, (each, part) in enumerate(zip(self.plans, own, strict=True)):
            application, place, sustained = each.application, order.index(index), each.goodput_per_s(part)
            least, lends = application.least_per_s, min(application.rate_per_s or 0.0, sustained)
            reached = min(least, sustained)
            needed = [max(least, lends), max(reached, lends), reached, SOMETHING, 0.0]
            given_up = sum(relaxed > place + tier * len(self.plans) for tier in range(4))
            plans.append(_with(each, least_per_s=needed[given_up]))
        return plans

    def _parts(self, budgets: Mapping[str, Budget]) -> tuple[KindCounts, ...]:
        mine = [budgets[each.application.name] for each in self.plans]
        return tuple(tuple(budget.get(device.kind, 0) for device in self.devices) for budget in mine)

    def _fits(self, parts: Sequence[KindCounts]) -> bool:
        return bool((np.sum(parts, axis=0) <= [each.count for each in self.devices]).all())

    def _budgets(self, parts: Sequence[KindCounts]) -> dict[str, Budget]:
        budgets = dict[str, Budget]()
        for each, part in zip(self.plans, parts, strict=True):
            usable = {device.kind for device in each.application.facts.devices}
            counts = zip(self.devices, part, strict=True)
            mine = {device.kind: count for device, count in counts if device.kind in usable}
            budgets[each.application.name] = self.config.nothing | mine
        return budgets


def _application(terms: MemberTerms, standing: Standing, devices: Sequence[Device]) -> FleetApplication:
    known = {each.kind for each in standing.facts.devices}
    facts = standing.facts.with_devices([each for each in devices if each.kind in known])
    return FleetApplication(
        terms.name, facts, standing.objective, terms.weight, standing.expected_per_s, terms.least_per_s, terms.priority,
        standing.kept,
    )  # fmt: skip


def _with(plans: PartPlans, **terms: Any) -> PartPlans:
    """The same plans for an application with other terms."""
    return replace(plans, application=replace(plans.application, **terms))


def _requested_value(plans: Sequence[PartPlans], goal: FleetGoal, parts: Sequence[KindCounts]) -> float | None:
    """The value of a division by the requested goodput; None: an application has less than it needs."""
    worths = list[float]()
    for each, part in zip(plans, parts, strict=True):
        worth, application = each.worth(goal, part), each.application
        if worth is None:
            return None
        if goal != "cost":
            worth = application.worth(goal, min(application.rate_per_s or 0.0, each.average_per_s(part)), 0.0)
        worths.append(worth)
    return value_of(goal, worths)[0]


def _short(plans: Sequence[PartPlans], in_full: Sequence[PartPlans]) -> str:
    """Which applications need less now than `in_full`, those of the lowest priority first."""
    needs = [(each.application, full.application.least_per_s) for each, full in zip(plans, in_full, strict=True)]
    less = sorted((each for each, need in needs if each.least_per_s < need), key=lambda each: each.priority)
    names = ", ".join(each.name for each in less)
    return f"; devices are missing: {names} may get less than agreed" if names else ""


def kind_for_one(facts: Problem, objective: Objective, present: Budget) -> str:
    """The kind whose single device sustains most for an application; empty: no single device is enough."""
    limits = objective.for_most_goodput
    here = [replace(each, count=1) for each in facts.devices if present.get(each.kind)]
    per_s = {each.kind: promised_per_s(side_by_side(facts.with_devices([each]), limits, NEAR)) for each in here}
    best = max(per_s, key=lambda kind: per_s[kind], default="")
    return best if per_s.get(best) else ""
