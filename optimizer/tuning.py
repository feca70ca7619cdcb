"""A plan, its ramps, and who leaves there.

Who leaves at a ramp depends on which others are open: not everybody who would leave at a closed one leaves at the next.
So a plan is sought for the survival as it looks from the ramps of the last one, until it opens these (`settled`).

Thresholds for a plan: the allowance that is spent at ramps which a plan closes goes to those that it opens.

Thresholds decide who survives, survival decides the plan, and the plan decides which ramps are open and what a block
costs. From the ramps that a plan opens, one is added or taken away at a time while the plan gets better. All that is
weighed on the table that may be asked again and again; the promise is tested once, for what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.exits import ExitProfile

if TYPE_CHECKING:  # it brings scipy, and every process that reads a plan imports this
    from profiles.evidence import Evidence
    from profiles.losses import Floats, Indices

Find = Callable[[Problem], Plan | None]  # the best plan for a problem
TURNS = 3
LEAST_GAIN = 1e-3

Result = TypeVar("Result")


def settled(
    exits: ExitProfile, find: Callable[[tuple[float, ...]], Result | None], plan_of: Callable[[Result], Plan]
) -> Result | None:
    """What `find` finds for the survival that its plan has with the ramps that it opens.

    From one plan to the next ramps may open and close. Where that does not come to rest, they only close from then on.
    """
    if not exits.sure:
        return find(exits.survival)
    ramps, seen = list(range(exits.num_blocks - 1)), set[tuple[int, ...]]()
    opens: Callable[[Collection[int]], tuple[float, ...]] = exits.seen_from
    while True:
        survival = opens(ramps)
        found = find(survival)
        if found is None or survival == opens(after := opened(plan_of(found))):
            return found
        if tuple(after) in seen or len(seen) == TURNS:
            opens = exits.behind
        seen.add(tuple(after))
        ramps = after


@dataclass(frozen=True)
class Tuned:
    """The candidate of every ramp, who leaves with them, the best plan then, and the best one before."""

    chosen: Indices
    exits: ExitProfile
    plan: Plan
    before: Plan


def tuned(facts: Problem, objective: Objective, evidence: Evidence, find: Find) -> Tuned | None:
    """Thresholds that make a better plan possible than those of `isobatch prepare`, within its promise.

    None: there are none. `find` gives the best plan for a problem.
    """
    before = _settled(facts, evidence, evidence.prepared, find)
    if before is None:
        return None
    best = _climbed(facts, objective, evidence, before, find)
    chosen = evidence.shown(opened(best), costs_of(best, facts))
    after = _settled(facts, evidence, chosen, find)
    if after is None or opened(after) != opened(best) or _value(after, objective) >= _value(before, objective):
        return None
    return Tuned(chosen, evidence.exits(chosen), after, before)


def _settled(facts: Problem, evidence: Evidence, chosen: Indices, find: Find) -> Plan | None:
    return settled(evidence.exits(chosen), lambda survival: find(facts.surviving(survival)), lambda plan: plan)


def _climbed(facts: Problem, objective: Objective, evidence: Evidence, best: Plan, find: Find) -> Plan:
    """The best plan that is hoped for, one ramp more or less at a time."""
    for _ in range(TURNS):
        ramps, costs = opened(best), costs_of(best, facts)
        others = [ramps, *(sorted(set(ramps) ^ {ramp}) for ramp in range(facts.num_blocks - 1))]
        found = [find(_surviving(facts, evidence, evidence.hoped(each, costs))) for each in others]
        better = min((each for each in found if each), key=lambda each: _value(each, objective), default=best)
        if _value(better, objective) >= _value(best, objective) * (1 - LEAST_GAIN):
            break
        best = better
    return best


def opened(plan: Plan) -> list[int]:
    """The ramps that any of the pipelines opens."""
    return sorted({ramp for pipeline in plan.pipelines for ramp in pipeline.ramps})


def costs_of(plan: Plan, facts: Problem) -> Floats:
    """What an input has cost when it stands behind each block: device seconds times their price, on average."""
    rates = [evaluate(pipeline, facts).goodput_per_s for pipeline in plan.pipelines]
    each = [_block_costs(pipeline, facts) for pipeline in plan.pipelines]
    costs: Floats = np.average(each, axis=0, weights=rates).cumsum()
    costs /= costs[-1]
    return costs


def _block_costs(pipeline: Plan, facts: Problem) -> Floats:
    costs = np.zeros(facts.num_blocks)
    for split in pipeline.splits:
        kind = pipeline.placement_of(split).kind
        times_s = facts.table(kind).block_times_s(split.batch_size) / split.batch_size
        costs[split.start : split.stop] = times_s[split.start : split.stop] * (facts.device(kind).price_per_hour or 1.0)
    return costs


def _surviving(facts: Problem, evidence: Evidence, chosen: Indices) -> Problem:
    return facts.surviving(evidence.survival(chosen))


def _value(plan: Plan, objective: Objective) -> float:
    """The smaller the better."""
    promise = plan.promise
    assert promise, "This is a bug: the planner promises something of each plan."
    return float(objective.aim.value(promise.goodput_per_s, promise.cost_per_hour, promise.latency_s))
