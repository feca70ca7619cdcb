"""Explains why there is no plan: the limit that binds, and the nearest value for which there is one."""

from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.model.limits import broken_facts, memory_bytes
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Split
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError


class NoPlanError(UserError):
    """There is no plan. To find out why takes as long as the search for one, and happens when the message is read."""

    def __init__(self, facts: Problem, objective: Objective) -> None:
        super().__init__(facts, objective)
        self.facts, self.objective = facts, objective

    def __str__(self) -> str:
        return reason(self.facts, self.objective)


def reason(facts: Problem, objective: Objective) -> str:
    """One line for the user. Limits are lifted one after the other until a plan exists."""
    return (
        _too_large(facts)
        or _too_slow(facts, objective)
        or _too_much(facts, objective)
        or _too_dear(facts, objective)
        or "each limit can be kept by itself, but not all at once: loosen the SLO, the budget or the goodput"
    )


def _too_large(facts: Problem) -> str | None:
    for block in range(facts.num_blocks):
        needs = {d: memory_bytes(Split(block, block + 1, 1), facts, d.kind) for d in facts.devices}
        if all(bytes_ > device.memory_bytes for device, bytes_ in needs.items()):
            device = max(needs, key=lambda each: each.memory_bytes - needs[each])
            needed, has = needs[device] / 1e9, device.memory_bytes / 1e9
            shortage = f"block {block} needs {needed:.3g} GB on {device.kind}, which has {has:.3g} GB"
            return f"{shortage}: add a larger device kind"
    return None


def _too_slow(facts: Problem, objective: Objective) -> str | None:
    fastest = side_by_side(facts, replace(objective.for_most_goodput, goal="latency", slo_s=None))
    if fastest is None:
        parts = "the network fits on these devices only in parts, and no links lead from one part to the next"
        return _too_heavy(facts) or f"{parts}: add devices"
    needed_s = evaluate(fastest, facts, objective).latency_s / (1 - objective.slack)
    if objective.slo_s is None or needed_s <= objective.slo_s:
        return None
    how = "by estimate, slack included" if objective.slack else "by estimate"
    least_ms = _rounded(needed_s * 1e3, 4, ROUND_CEILING)
    return f"{objective.slo_s * 1e3:.4g} ms SLO: the fastest plan needs {least_ms} ms {how}"


def _too_heavy(facts: Problem) -> str | None:
    """Parts of the network fit, but not together with the inputs between them."""
    light = [replace(table, hidden_bytes=(0,) * facts.num_blocks) for table in facts.tables]
    plan = side_by_side(replace(facts, tables=tuple(light)), Objective(goal="latency"))
    lines = [line for each in plan.pipelines for line in broken_facts(each, facts)] if plan else []
    return f"{lines[0]}: add a larger device kind" if lines else None


def _too_much(facts: Problem, objective: Objective) -> str | None:
    most = side_by_side(facts, objective.for_most_goodput)
    if most is None:
        return None
    sustained = evaluate(most, facts, objective).goodput_per_s
    if sustained >= objective.goodput_per_s:
        return None
    rate = _rounded(sustained, 6, ROUND_FLOOR)
    within = "" if objective.slo_s is None else f" within {objective.slo_s * 1e3:.4g} ms"
    return f"{objective.goodput_per_s:.6g} per second: these devices sustain at most {rate}{within}"


def _too_dear(facts: Problem, objective: Objective) -> str | None:
    if objective.cost_per_hour is None:
        return None
    wanted = objective.goodput_per_s or 1e-6  # any goodput above 0
    cheapest = side_by_side(facts, replace(objective, goal="cost", goodput_per_s=wanted, cost_per_hour=None))
    if cheapest is None:
        return None
    dollars = evaluate(cheapest, facts, objective).cost_per_hour
    return f"${objective.cost_per_hour:.4g} per hour: the cheapest plan costs ${_rounded(dollars, 4, ROUND_CEILING)}"


def _rounded(value: float, digits: int, way: str) -> str:
    """The value as text, rounded so that a plan with it exists: limits up, rates down.

    >>> [_rounded(value, 4, ROUND_CEILING) for value in (16.5201, 16.52, 3 * 0.7, 1e7)]
    ['16.53', '16.52', '2.1', '1e+07']
    """
    return f"{float(Context(digits, way).create_decimal(f'{value:.9g}')):.{digits}g}"
