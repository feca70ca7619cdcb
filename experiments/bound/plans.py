"""Simulates whether a plan keeps its promise, and whether a baseline or a neighbouring plan sustains more."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf, prod, sqrt
from typing import NamedTuple

from experiments.bound.hindsight import Hindsight, hindsight
from experiments.bound.problems import playable
from experiments.shared.gains import PaperFleet
from experiments.shared.shortfalls import shortfalls
from isobatch.cluster.simulator.candidates import most_promising_first
from isobatch.cluster.simulator.plan_choice import (
    CANDIDATE_GAP,
    DEFAULT_EFFORT,
    HOPE,
    BestSoFar,
    best_simulated,
    why_not_simulated,
)
from isobatch.cluster.simulator.simulation import World
from isobatch.cluster.simulator.sustained import (
    IN_TIME_SHARE,
    SHORT_SLOS,
    confirmed_rate_per_s,
    rate_beyond,
    run_if_sustained,
)
from isobatch.deployments.dispatch.messages import Limits
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import baselines
from isobatch.optimizer.pipelines.batch_gain import oracle_per_s
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

SEEDS = 7, 8  # of inputs by which no plan was chosen
INPUTS, SLOS = 10_000, 40  # the shortest run, in seconds of virtual time
MOST_INPUTS = 40_000  # of a run that lasts `SLOS`, where many inputs come within one SLO
BEATEN = 0.02  # a baseline is better if it sustains this share more
GAP = 0.01  # of the planner, as in the product's controller
MOST_INSIDE = 10**6  # inputs, so that fronts do not limit plans
FIND = partial(side_by_side, gap=CANDIDATE_GAP)
BATCH = 16  # the largest, of the paper's figures
MOVED_EVERY, MOVING_S = 8, 20.0  # problem's plan has its neighbours played, and for how much processor time


class JudgedPlan(NamedTuple):
    """One problem's plan, with simulated rates; `error` is that of the promise, as a share of it."""

    promised_per_s: float
    sustained_per_s: float
    error: float
    beaten_by: str  # baselines that sustain more
    neighbour_gain: float | None  # the gain of the best neighbouring plan, for problems whose neighbours are simulated
    seconds: float  # of processor time that planning took
    hindsight: list[Hindsight]  # by load
    share_of_oracle: float
    limited_by: str  # the restriction that costs the largest part of the upper bound


def judge(seed: int) -> JudgedPlan | None:
    """None: the problem has no plan."""
    problem, began_s = playable(seed), time.process_time()
    plan = planned(*problem) if problem else None
    if problem is None or plan is None or plan.promise is None:
        return None
    seconds = time.process_time() - began_s
    facts, objective = problem
    assert objective.slo_s
    promised = plan.promise.goodput_per_s
    kept = sustained_per_s(_world(plan, facts, objective.slo_s), promised)
    beaten_by = next(better(facts, objective, kept * (1 + BEATEN)), "")
    gain = neighbour_gain(plan, facts, objective, kept) if seed % MOVED_EVERY == 0 else None
    lost = shortfalls(plan, facts, objective, kept)
    return JudgedPlan(
        promised, kept, kept / promised - 1, beaten_by, gain, seconds,
        hindsight(_world(plan, facts, objective.slo_s), promised, seed), 1 - sum(each.share for each in lost),
        max(lost, key=lambda each: each.share).why,
    )  # fmt: skip


def sustained_per_s(world: World, near_per_s: float) -> float:
    """The geometric mean of the rates over several samples of inputs, since losses come in bursts.

    Rates far above `near_per_s` are tried, too.
    """
    slos = max(SHORT_SLOS, min(SLOS, MOST_INPUTS / (world.slo_s * near_per_s)))
    most_per_s = HOPE * evaluate(world.plan, world.facts).goodput_per_s
    beyond_per_s = rate_beyond(world, near_per_s, most_per_s, INPUTS, SEEDS[0], slos, IN_TIME_SHARE)
    near_per_s = max(near_per_s, beyond_per_s)
    return sqrt(prod(confirmed_rate_per_s(world, near_per_s, INPUTS, seed, slos) for seed in SEEDS))


def planned(facts: Problem, objective: Objective) -> Plan | None:
    """The plan of `isobatch plan`."""
    plan = side_by_side(facts, objective, GAP)
    if plan is None or why_not_simulated(objective):
        return plan
    return best_simulated(plan, facts, objective, FIND).plan


def share_of_oracle(fleet: PaperFleet) -> float:
    """The rate that the plan for one of the paper's fleets sustains, as a share of the upper bound."""
    facts, objective = fleet.facts, Objective(slo_s=fleet.slo_s, max_batch=BATCH)
    plan = planned(facts, objective)
    assert plan is not None
    assert plan.promise is not None
    kept = sustained_per_s(_world(plan, facts, fleet.slo_s), plan.promise.goodput_per_s)
    return kept / oracle_per_s(facts, fleet.slo_s, BATCH)


def neighbour_gain(plan: Plan, facts: Problem, objective: Objective, kept_per_s: float) -> float:
    """The gain of the best neighbouring plan. `kept_per_s`: what the plan sustains of the same inputs.

    The best of many plans was lucky with the inputs that chose it, so they do not count.
    """
    end_s = time.process_time() + MOVING_S
    effort = replace(DEFAULT_EFFORT, inputs=15_000, slos=SLOS, last_slos=SLOS, most=inf)
    care = replace(effort, out_of_time=lambda: time.process_time() >= end_s)
    assert objective.slo_s
    bare = replace(plan, promise=None)
    search = BestSoFar(facts, objective.slo_s, bare, care)
    while search.improve(most_promising_first(search.best, facts, objective)):
        pass
    best = search.choose(plan).plan
    if best.promise is None or replace(best, promise=None) == bare:
        return 0.0
    return sustained_per_s(_world(best, facts, objective.slo_s), best.promise.goodput_per_s) / kept_per_s - 1


def better(facts: Problem, objective: Objective, rate_per_s: float) -> Iterator[str]:
    """The baselines that sustain this rate, with simulated plans or with estimated ones."""
    for aim in (objective, Objective(slo_s=objective.slo_s, slack=0.0, max_batch=objective.max_batch)):
        for other in baselines(facts, aim):
            if other.plan and other.score and other.score.goodput_per_s * HOPE > rate_per_s > 0:
                world = _world(other.plan, facts, aim.slo_s or 0.0)
                counts = {max(INPUTS, int(slos * world.slo_s * rate_per_s)) for slos in (SHORT_SLOS, SLOS)}
                kept = all(run_if_sustained(world, rate_per_s, each, SEEDS[0]) for each in sorted(counts))
                if kept and sustained_per_s(world, rate_per_s) >= rate_per_s:
                    yield other.name


def _world(plan: Plan, facts: Problem, slo_s: float) -> World:
    """The whole fleet, with enough fronts for its inputs."""
    return World(plan, facts, slo_s, Limits(max_inside=MOST_INSIDE))
