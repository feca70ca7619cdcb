"""A plan that fits the ramps it opens, and thresholds that fit a plan.

Which inputs leave at a ramp depends on which other ramps are open: not every input that would leave at a closed ramp
leaves at the next. So a plan is searched for the survival that the ramps of the last plan cause, until a plan opens
just these ramps (`plan_for_its_ramps`).

Thresholds for a plan: the allowed loss that would be spent at ramps which the plan closes goes to the ramps which it
opens. Thresholds decide the survival, survival decides the plan, and the plan decides which ramps are open and
what a block costs. The search starts from the ramps that a plan opens. Each step adds a ramp, removes one, or keeps a
single one, while the plan gets better. Each set of ramps is rated by the best plan that opens just these ramps. The
search uses the table that may be read any number of times; the promise is tested once, for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isobatch.optimizer.effort import never
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
# The best of this plan and similar ones in simulations, with its goodput; the plan itself if none is simulated.
Rehearse = Callable[[Plan, Problem], Plan]
LOST = 0.01  # closing ramps loses exits if this share more inputs continue
TURNS = 3  # rounds of searching before ramps only close, or before the thresholds of a plan are final
REHEARSED = 3  # sets of ramps, the best by estimate, that are simulated
LEAST_GAIN = 1e-3  # the least gain of one more round, as a share of the goal's value


def plan_for_its_ramps(facts: Problem, objective: Objective, find: Find) -> tuple[Plan, Problem] | None:
    """A plan whose open ramps cause the same survival that the plan was made for, and the problem with this survival.

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
    """Whether more inputs continue somewhere than if all ramps were open."""
    shares = zip(facts.for_plan(plan).survival, all_open.survival, strict=True)
    return any(share > (1 + LOST) * least for share, least in shares)


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
    """The chosen candidate of every ramp, the exits that follow, the best plan for these exits, and the old plan."""

    chosen: Indices
    exits: ExitProfile
    plan: Plan
    before: Plan


def tuned(
    facts: Problem, objective: Objective, evidence: Evidence, find: Find, rehearse: Rehearse | None = None,
    out_of_time: Callable[[], bool] = never,
) -> Tuned | None:  # fmt: skip
    """Thresholds with which a better plan is possible than with those of `isobatch prepare`, within the promise.

    None if there are none. `find` gives the best plan for a problem by estimate. With `rehearse` a few sets of ramps
    are simulated, and the goodput of their plans decides. Once it is `out_of_time`, no further set of ramps is tried.
    """
    exits = evidence.exits(evidence.prepared)
    known = replace(facts, survival=exits.survival, exits=exits)
    planned = plan_for_its_ramps(known, objective, find)
    if planned is None or not (rated := _rated(facts, objective, evidence, planned[0], find, out_of_time)):
        return None
    before, best = planned[0], rated[0][0]
    if rehearse:
        before = rehearse(before, known)
        sets = enumerate(rated[:REHEARSED])
        rehearsed = [rehearse(*each) for place, each in sets if not place or not out_of_time()]
        best = min(rehearsed, key=lambda plan: promised_value(plan, objective))
    chosen = evidence.proven_candidates(ramps := opened(best), costs_of(best, facts))
    problem = _opening(ramps, facts, evidence, chosen)
    after = find(problem)
    if after and rehearse:
        after = rehearse(after, problem)
    if after is None or promised_value(after, objective) >= promised_value(before, objective):
        return None
    return Tuned(chosen, evidence.exits(chosen), after, before)


def _rated(
    facts: Problem, objective: Objective, evidence: Evidence, best: Plan, find: Find, out_of_time: Callable[[], bool]
) -> list[tuple[Plan, Problem]]:
    """Plans with likely thresholds for the sets of ramps that they open, the best first, each with its problem.

    In each turn one ramp is added or removed, or stays alone: if ramps are expensive, one alone is often best, and a
    search by single steps would have to open two. The ramps of the best plan so far come first.
    """
    rated, every = dict[tuple[int, ...], tuple[Plan, Problem]](), range(facts.num_blocks - 1)
    for _ in range(TURNS):
        ramps = tuple(opened(best))
        others = {tuple(sorted({*ramps} ^ {ramp})) for ramp in every} | {(ramp,) for ramp in every}
        for each in (ramps, *sorted(others - {ramps})):
            if rated and out_of_time():
                break
            chosen = evidence.likely_candidates(each, costs_of(best, facts, each))
            problem = _opening(each, facts, evidence, chosen)
            if plan := find(problem):
                same = tuple(opened(plan))  # as another set of ramps, or with thresholds for another plan
                if same not in rated or promised_value(plan, objective) < promised_value(rated[same][0], objective):
                    rated[same] = plan, problem
        better = min(
            (plan for plan, _ in rated.values()), key=lambda plan: promised_value(plan, objective), default=best
        )
        if promised_value(better, objective) >= promised_value(best, objective) * (1 - LEAST_GAIN):
            break
        best = better
    return sorted(rated.values(), key=lambda each: promised_value(each[0], objective))


def _opening(ramps: Collection[int], facts: Problem, evidence: Evidence, chosen: Indices) -> Problem:
    """The problem whose plans open just those of these ramps at which inputs leave with the chosen candidates.

    A plan that closed one of them and opened another instead would be rated as if inputs left there, too.
    """
    return replace(facts.surviving(evidence.exits(chosen).survival_with(ramps)), keeps_open=True)


def costs_of(plan: Plan, facts: Problem, ramps: Collection[int] | None = None) -> Floats:
    """The mean cost of an input up to the end of each block: device seconds times their price, as a share of all.

    `ramps`: those that are open; None: those that the plan opens. An input also pays for each ramp that it passes.
    """
    rates = [evaluate(pipeline, facts).goodput_per_s for pipeline in plan.pipelines]
    open_ramps = np.isin(np.arange(facts.num_blocks), [*(opened(plan) if ramps is None else ramps)])
    block_costs = [_block_costs(pipeline, facts, open_ramps) for pipeline in plan.pipelines]
    costs: Floats = np.average(block_costs, axis=0, weights=rates).cumsum()
    costs /= costs[-1]
    return costs


def _block_costs(pipeline: Plan, facts: Problem, open_ramps: NDArray[np.bool_]) -> Floats:
    costs = np.zeros(facts.num_blocks)
    for split in pipeline.splits:
        kind, size, here = pipeline.placement_of(split).kind, split.batch_size, slice(split.start, split.stop)
        table = facts.table(kind)
        times_s = (table.block_times_s(size) + table.ramp_times_s(size) * open_ramps) / size
        costs[here] = times_s[here] * (facts.device(kind).price_per_hour or 1.0)
    return costs


def promised_value(plan: Plan | None, objective: Objective) -> float:
    """The value of the goal: the smaller, the better; infinite without a plan, and where nothing is sustained in
    simulations."""
    promise = plan.promise if plan else None
    if not promise or not promise.goodput_per_s:
        return inf
    return float(objective.aim.value(promise.goodput_per_s, promise.cost_per_hour, promise.latency_s))
