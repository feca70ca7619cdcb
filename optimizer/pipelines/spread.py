"""Kinds of devices side by side, each with the whole network, for any goal and any planner of a single kind.

Kinds are filled one after the other; the last one takes the remaining inputs, or the remaining money.

A kind of device that has several names is planned as one kind, and its devices are named afterwards. A plan names
kinds: a pipeline on devices of several names is written as several pipelines beside each other, which differ only in
names and replicas. They are scored and served as one lane (Problem.lanes).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from isobatch.optimizer.effort import EFFORT, SAME, Effort
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Placement, Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device

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


Names = dict[str, list[str]]  # the names of each kind, by the first one


def merged_by_kind(facts: Problem) -> Problem:
    """The same problem with each kind under its first name."""
    devices = {device.kind: device for device in facts.devices}
    together = [
        replace(devices[first], count=sum(devices[name].count for name in names))
        for first, names in _names(facts).items()
    ]
    return facts if len(together) == len(devices) else facts.with_devices(together)


def split_by_name(plan: Plan, facts: Problem) -> Plan | None:
    """A plan of the merged problem with devices of all names; None where a placement has fewer devices than names."""
    names, left = _names(facts), {device.kind: device.count for device in facts.devices}
    pipelines: list[Plan] = []
    for pipeline in plan.pipelines:
        parts = [list(_of_names(placement, names[placement.kind], left)) for placement in pipeline.placements]
        most = max(map(len, parts))
        if any(each.replicas < most for each in pipeline.placements):
            return None
        rows = zip(*(_in_parts(each, most) for each in parts), strict=True)
        pipelines += [replace(pipeline, placements=placements) for placements in rows]
    return replace(joined(pipelines), promise=plan.promise)


def _names(facts: Problem) -> Names:
    """The names of each kind. Devices of one kind agree in everything but their name and count."""
    names: dict[tuple[str, Device], list[str]] = defaultdict(list)
    for each in facts.devices:
        names[facts.first_names[each.kind], replace(each, kind="", count=0)].append(each.kind)
    return {kinds[0]: kinds for kinds in names.values()}


def _of_names(placement: Placement, names: list[str], left: dict[str, int]) -> Iterator[Placement]:
    """The placement under the name that leaves the fewest devices over, or else under several names."""
    enough = [kind for kind in names if left[kind] >= placement.replicas]
    missing = placement.replicas
    for kind in sorted(enough, key=lambda each: left[each])[:1] or sorted(names, key=lambda each: -left[each]):
        taken = min(left[kind], missing)
        if taken:
            yield replace(placement, kind=kind, replicas=taken)
        left[kind] -= taken
        missing -= taken


def _in_parts(placements: list[Placement], count: int) -> list[Placement]:
    """The same devices in `count` placements, one for every pipeline."""
    while len(placements) < count:
        largest = max(placements, key=lambda each: each.replicas)
        rest = replace(largest, replicas=largest.replicas - 1)
        placements = [*(each for each in placements if each is not largest), rest, replace(largest, replicas=1)]
    return placements
