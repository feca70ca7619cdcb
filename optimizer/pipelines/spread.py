"""Kinds of devices side by side, each with the whole network, for any goal and any planner of a single kind.

Kinds are filled one after the other; the last one takes the remaining inputs, or the remaining money.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import fsum, inf

from isobatch.optimizer.effort import EFFORT, SAME, Effort
from isobatch.optimizer.model.evaluate import Score, evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device

# Plans a problem of one kind; None if there is no plan.
Planner = Callable[[Problem, Objective], Plan | None]
Whole = tuple[Problem, Plan, Score]  # one kind by itself, with all of its devices in use
LastKind = tuple[Device, Objective]  # the kind that takes the rest, which many orders have in common


def value(plan: Plan, facts: Problem, objective: Objective) -> float:
    """The value of a plan for the goal (the smaller, the better); infinite if the plan breaks a limit."""
    score = evaluate(plan, facts, objective)
    if score.broken:
        return inf
    return float(objective.aim.value(score.goodput_per_s, score.cost_per_hour, score.latency_s))


def best_of(plans: Sequence[Plan | None], facts: Problem, objective: Objective) -> Plan | None:
    """The plan with the least value; of equal ones the first."""
    best, least = None, inf
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
        wholes = [(each, plan, evaluate(plan, each)) for each, plan in most if plan]
        plans += _one_after_the_other(objective, planner, wholes, effort)
    return best_of(plans, facts, objective)


def _one_after_the_other(objective: Objective, planner: Planner, wholes: list[Whole], effort: Effort) -> Iterator[Plan]:
    dear_last = sorted(wholes, key=lambda whole: whole[2].cost_per_hour / whole[2].goodput_per_s)
    orders: Iterable[Sequence[Whole]] = [dear_last]
    adds_up = objective.aim.adds_up and objective.cost_per_hour is None
    if not adds_up and len(wholes) <= effort.kinds_in_all_orders:
        orders = permutations(wholes)
    known = dict[LastKind, Plan | None]()
    for order in orders:
        if plans := _used_up(order, objective, planner, known):
            yield joined(plans)
            if effort.out_of_time():
                break


def _used_up(
    order: Sequence[Whole], objective: Objective, planner: Planner, known: dict[LastKind, Plan | None]
) -> list[Plan]:
    """The kinds that are used in full, and the one that takes the rest of the inputs, or of the money."""
    used = list[Whole]()
    for whole in order:  # sums are exact, so that orders of the same kinds leave the same rest
        left = inf if objective.aim.adds_up else objective.goodput_per_s - fsum(each[2].goodput_per_s for each in used)
        dollars = None
        if objective.cost_per_hour is not None:
            dollars = objective.cost_per_hour - fsum(each[2].cost_per_hour for each in used)
        facts, _, score = whole
        if score.goodput_per_s < left and (dollars is None or score.cost_per_hour <= dollars):
            used.append(whole)
            continue
        rest = objective.for_most_goodput if left == inf else replace(objective, goal="cost", goodput_per_s=left)
        last = facts.devices[0], replace(rest, cost_per_hour=dollars)
        if last not in known:
            known[last] = planner(facts, last[1])
        return [each[1] for each in used] + ([plan] if (plan := known[last]) else [])
    return [each[1] for each in used]
