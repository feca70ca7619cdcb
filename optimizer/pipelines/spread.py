"""Kinds of devices side by side, each with the whole network, for any goal and any planner of a single kind.

Kinds are filled one after the other; the last one takes the remaining inputs, or the remaining money.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from isobatch.optimizer.effort import EFFORT, SAME, Effort
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

# Plans a problem of one kind; None if there is no plan.
Planner = Callable[[Problem, Objective], Plan | None]


@dataclass(frozen=True)
class Pipeline:
    """One kind by itself, with all of its devices in use."""

    facts: Problem
    plan: Plan
    goodput_per_s: float
    cost_per_hour: float


def value(plan: Plan, facts: Problem, objective: Objective) -> float:
    """The value of a plan for the goal (the smaller, the better); infinite if the plan breaks a limit."""
    score = evaluate(plan, facts, objective)
    if score.broken:
        return float("inf")
    return float(objective.aim.value(score.goodput_per_s, score.cost_per_hour, score.latency_s))


def best_of(plans: Sequence[Plan | None], facts: Problem, objective: Objective) -> Plan | None:
    """The plan with the least value; of equal ones the first."""
    best, least = None, float("inf")
    for plan in plans:
        if plan and (plan_value := value(plan, facts, objective)) < least * (1 - SAME):
            best, least = plan, plan_value
    return best


def joined(plans: Sequence[Plan]) -> Plan:
    """One plan of several pipelines: the first, with the others beside it. It promises nothing yet."""
    first, *others = plans
    return replace(first, promise=None, beside=tuple(replace(each, promise=None) for each in others))


def spread(facts: Problem, objective: Objective, planner: Planner, effort: Effort = EFFORT) -> Plan | None:
    """The best plan in which every pipeline runs the whole network on one kind."""
    alone = [facts.with_devices((device,)) for device in facts.devices]
    plans = [planner(each, objective) for each in alone]
    if len(alone) > 1 and (objective.aim.adds_up or objective.goodput_per_s > 0):
        most = [(each, planner(each, objective.for_most_goodput)) for each in alone]
        scored = [(each, plan, evaluate(plan, each)) for each, plan in most if plan]
        pipelines = [Pipeline(each, plan, score.goodput_per_s, score.cost_per_hour) for each, plan, score in scored]
        plans += _one_after_the_other(objective, planner, pipelines, effort)
    return best_of(plans, facts, objective)


def _one_after_the_other(
    objective: Objective, planner: Planner, pipelines: list[Pipeline], effort: Effort
) -> Iterator[Plan]:
    dear_last = sorted(pipelines, key=lambda each: each.cost_per_hour / each.goodput_per_s)
    orders = permutations(pipelines) if len(pipelines) <= effort.kinds_in_all_orders else iter([tuple(dear_last)])
    whole = objective.aim.adds_up and objective.cost_per_hour is None
    for order in [tuple(dear_last)] if whole else orders:
        used, last = _used_up(order, objective, planner)
        if used or last:
            plans = [*(each.plan for each in used), *last]
            yield joined(plans)
            if effort.out_of_time():
                break


def _used_up(order: Sequence[Pipeline], objective: Objective, planner: Planner) -> tuple[list[Pipeline], list[Plan]]:
    """The kinds that are used in full, and the plan of the one that takes the rest of the inputs, or of the money."""
    used: list[Pipeline] = []
    left = objective.goodput_per_s if not objective.aim.adds_up else float("inf")
    dollars = objective.cost_per_hour if objective.cost_per_hour is not None else float("inf")
    for each in order:
        if each.goodput_per_s < left and each.cost_per_hour <= dollars:
            used.append(each)
            left, dollars = left - each.goodput_per_s, dollars - each.cost_per_hour
            continue
        rest = (
            objective.for_most_goodput if left == float("inf") else replace(objective, goal="cost", goodput_per_s=left)
        )
        plan = planner(each.facts, replace(rest, cost_per_hour=None if dollars == float("inf") else dollars))
        return used, [plan] if plan else []
    return used, []
