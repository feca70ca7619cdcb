"""Kinds of devices side by side, each with the whole network, whoever plans for a kind: shares for any goal.

What one kind sustains is taken as it is; kinds are used up one after the other, and the last one takes what is left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from optimizer.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.plan import Plan
from optimizer.problem import Problem

# The best plan for a problem of one kind, if there is any.
Planner = Callable[[Problem, Objective], Plan | None]
ALL_ORDERS = 4  # of more kinds than this, only one order is tried: the best inputs per dollar first


@dataclass(frozen=True)
class Lane:
    """One kind by itself, all of its devices at work."""

    facts: Problem
    plan: Plan
    goodput_per_s: float
    cost_per_hour: float


def value(plan: Plan, facts: Problem, objective: Objective) -> float:
    """In the units of the goal, small is good; infinite for a plan that breaks something."""
    score = evaluate(plan, facts, objective)
    if score.broken:
        return float("inf")
    return {
        "goodput": 1 / score.goodput_per_s,
        "cost": score.cost_per_hour,
        "goodput-per-dollar": score.cost_per_hour / score.goodput_per_s,
        "latency": score.latency_s,
    }[objective.goal]


def best_of(plans: Sequence[Plan | None], facts: Problem, objective: Objective) -> Plan | None:
    """The one of the least value; the first of equals."""
    found, least = None, float("inf")
    for plan in plans:
        if plan and (here := value(plan, facts, objective)) < least * (1 - 1e-9):
            found, least = plan, here
    return found


def joined(plans: Sequence[Plan]) -> Plan:
    """The fleet's plan of some pipelines: the first, the others beside it."""
    first, *others = plans
    return replace(first, promise=None, beside=tuple(replace(each, promise=None) for each in others))


def spread(facts: Problem, objective: Objective, planner: Planner) -> Plan | None:
    """The best plan of pipelines that run the whole network on a kind each."""
    alone = [facts.with_devices((device,)) for device in facts.devices]
    plans = [planner(each, objective) for each in alone]
    if len(alone) > 1 and (objective.goal == "goodput" or objective.goodput_per_s > 0):
        plans += _shared(facts, objective, planner, list(_lanes(alone, objective, planner)))
    return best_of(plans, facts, objective)


def _lanes(alone: Sequence[Problem], objective: Objective, planner: Planner) -> Iterator[Lane]:
    for facts in alone:
        if plan := planner(facts, _fastest(objective)):
            score = evaluate(plan, facts)
            yield Lane(facts, plan, score.goodput_per_s, score.cost_per_hour)


def _fastest(objective: Objective, arrivals_per_s: float | None = None) -> Objective:
    return replace(objective, goal="goodput", goodput_per_s=0.0, cost_per_hour=None, arrivals_per_s=arrivals_per_s)


def _shared(facts: Problem, objective: Objective, planner: Planner, lanes: list[Lane]) -> Iterator[Plan]:
    dear_last = sorted(lanes, key=lambda lane: lane.cost_per_hour / lane.goodput_per_s)
    orders = permutations(lanes) if len(lanes) <= ALL_ORDERS else iter([tuple(dear_last)])
    whole = objective.goal == "goodput" and objective.cost_per_hour is None
    for order in [tuple(dear_last)] if whole else orders:
        used, last = _used_up(order, objective, planner)
        if used or last:
            plans = [*(lane.plan for lane in used), *last]
            yield joined(plans)
            yield from _at_its_rate(facts, objective, planner, used, last)


def _used_up(order: Sequence[Lane], objective: Objective, planner: Planner) -> tuple[list[Lane], list[Plan]]:
    """The kinds that are used up, and the one that takes the rest of the inputs, or of the money."""
    used: list[Lane] = []
    left = objective.goodput_per_s if objective.goal != "goodput" else float("inf")
    dollars = objective.cost_per_hour if objective.cost_per_hour is not None else float("inf")
    for lane in order:
        if lane.goodput_per_s < left and lane.cost_per_hour <= dollars:
            used.append(lane)
            left, dollars = left - lane.goodput_per_s, dollars - lane.cost_per_hour
            continue
        rest = (
            _fastest(objective)
            if left == float("inf")
            else replace(
                objective, goal="cost", goodput_per_s=left, arrivals_per_s=min(left, objective.arrivals_per_s or left)
            )
        )
        plan = planner(lane.facts, replace(rest, cost_per_hour=None if dollars == float("inf") else dollars))
        return used, [plan] if plan else []
    return used, []


def _at_its_rate(
    facts: Problem, objective: Objective, planner: Planner, used: list[Lane], last: list[Plan]
) -> Iterator[Plan]:
    """The same, planned anew for the share of the inputs that comes to each, when fewer come than all sustain."""
    paces = [lane.goodput_per_s for lane in used]
    total = sum(paces) + sum(evaluate(plan, facts).goodput_per_s for plan in last)
    rate = objective.rate_at(total)
    if rate < total and used:
        plans = [
            planner(lane.facts, _fastest(objective, rate * pace / total))
            for lane, pace in zip(used, paces, strict=True)
        ]
        yield joined([*(plan for plan in plans if plan), *last])
