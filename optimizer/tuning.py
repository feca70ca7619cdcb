"""A plan that fits the ramps it opens, and thresholds that fit a plan.

Which inputs leave at a ramp depends on which other ramps are open: not every input that would leave at a closed ramp
leaves at the next. So a plan is searched for the survival that the ramps of the last plan cause, until a plan opens
just these ramps (`plan_for_its_ramps`).

Thresholds for a plan: the allowed loss that would be spent at ramps which the plan closes goes to the ramps which it
opens. Thresholds decide the survival, survival decides the plan, and the plan decides which ramps are open and
what a block costs. From the ramps that a plan opens, one is added or taken away at a time while the plan gets better.
All this is rated on the table that may be used any number of times; the promise is tested once, for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.spread import best_of
from isobatch.optimizer.plan import Plan, opened
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile

if TYPE_CHECKING:  # these import scipy, which a process that only reads a plan does not need
    from isobatch.profiles.evidence import Evidence
    from isobatch.profiles.losses import Floats, Indices

Find = Callable[[Problem], Plan | None]  # the best plan for a problem
LOST = 0.01  # closing ramps loses exits if this share more inputs go on
TURNS = 3  # rounds of searching before ramps only close, or before the thresholds of a plan are final
LEAST_GAIN = 1e-3  # the least gain of one more round, as a share of the goal's value


def plan_for_its_ramps(facts: Problem, objective: Objective, find: Find) -> tuple[Plan, Problem] | None:
    """A plan that opens the ramps which cause the survival that it was found for, and the problem with this survival.

    Where inputs that would leave at a closed ramp do not all leave at the next, the best plan that opens all ramps is
    compared with the best one that may close some.
    """
    if not facts.exits:
        return (plan, facts) if (plan := find(facts)) else None
    if not (closing := _closing_some(facts.exits, facts, find)):
        return None
    all_open = facts.for_ramps(range(facts.num_blocks - 1))
    if objective.ramp_budget is None and _loses_exits(closing, facts, all_open):
        must_open = replace(all_open, keeps_open=True)
        with suppress(UserError):  # there may be no plan that opens all ramps
            opening = find(must_open.given)
            if opening and best_of([closing, opening], facts, objective) == opening:
                return opening, must_open.for_plan(opening)
    return closing, facts.for_plan(closing)


def _loses_exits(plan: Plan, facts: Problem, all_open: Problem) -> bool:
    """Whether more inputs go on somewhere than if all ramps were open."""
    own = facts.for_plan(plan).survival
    return any(mine > (1 + LOST) * least for mine, least in zip(own, all_open.survival, strict=True))


def _closing_some(exits: ExitProfile, facts: Problem, find: Find) -> Plan | None:
    """From one plan to the next ramps may open and close. If that does not end, ramps only close from then on."""
    ramps, tried = list(range(exits.num_blocks - 1)), set[tuple[int, ...]]()
    survival_of: Callable[[Collection[int]], tuple[float, ...]] = exits.planning_survival
    while True:
        survival = survival_of(ramps)
        plan = find(facts.surviving(survival))
        if plan is None or survival == survival_of(after := opened(plan)):
            return plan
        if tuple(after) in tried or len(tried) == TURNS:
            survival_of = exits.survival_with
        tried.add(tuple(after))
        ramps = after


@dataclass(frozen=True)
class Tuned:
    """The chosen candidate of every ramp, the exits that it causes, the best plan for them, and the plan before."""

    chosen: Indices
    exits: ExitProfile
    plan: Plan
    before: Plan


def tuned(facts: Problem, objective: Objective, evidence: Evidence, find: Find) -> Tuned | None:
    """Thresholds with which a better plan is possible than with those of `isobatch prepare`, within the promise.

    None if there are none. `find` gives the best plan for a problem.
    """
    before = _consistent_plan(facts, objective, evidence, evidence.prepared, find)
    if before is None:
        return None
    best = _climbed(facts, objective, evidence, before, find)
    chosen = evidence.proven_candidates(opened(best), costs_of(best, facts))
    after = _consistent_plan(facts, objective, evidence, chosen, find)
    if after is None or opened(after) != opened(best) or _value(after, objective) >= _value(before, objective):
        return None
    return Tuned(chosen, evidence.exits(chosen), after, before)


def _consistent_plan(
    facts: Problem, objective: Objective, evidence: Evidence, chosen: Indices, find: Find
) -> Plan | None:
    exits = evidence.exits(chosen)
    known = replace(facts, survival=exits.survival, exits=exits)
    planned = plan_for_its_ramps(known, objective, find)
    return planned[0] if planned else None


def _climbed(facts: Problem, objective: Objective, evidence: Evidence, best: Plan, find: Find) -> Plan:
    """The plan with the best estimated thresholds, by adding or removing one ramp at a time."""
    for _ in range(TURNS):
        ramps, costs = opened(best), costs_of(best, facts)
        choices = [ramps, *(sorted(set(ramps) ^ {ramp}) for ramp in range(facts.num_blocks - 1))]
        survivals = [evidence.survival(evidence.likely_candidates(each, costs)) for each in choices]
        plans = [find(facts.surviving(survival)) for survival in survivals]
        better = min((plan for plan in plans if plan), key=lambda plan: _value(plan, objective), default=best)
        if _value(better, objective) >= _value(best, objective) * (1 - LEAST_GAIN):
            break
        best = better
    return best


def costs_of(plan: Plan, facts: Problem) -> Floats:
    """The mean cost of an input up to the end of each block: device seconds times their price, as a share of all."""
    rates = [evaluate(pipeline, facts).goodput_per_s for pipeline in plan.pipelines]
    block_costs = [_block_costs(pipeline, facts) for pipeline in plan.pipelines]
    costs: Floats = np.average(block_costs, axis=0, weights=rates).cumsum()
    costs /= costs[-1]
    return costs


def _block_costs(pipeline: Plan, facts: Problem) -> Floats:
    costs = np.zeros(facts.num_blocks)
    for split in pipeline.splits:
        kind = pipeline.placement_of(split).kind
        times_s = facts.table(kind).block_times_s(split.batch_size) / split.batch_size
        costs[split.start : split.stop] = times_s[split.start : split.stop] * (facts.device(kind).price_per_hour or 1.0)
    return costs


def _value(plan: Plan, objective: Objective) -> float:
    """The value of the goal: the smaller, the better."""
    promise = plan.promise
    assert promise, "This is a bug: the planner promises something of each plan."
    return float(objective.aim.value(promise.goodput_per_s, promise.cost_per_hour, promise.latency_s))
