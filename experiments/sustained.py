"""The goodput that a plan sustains: the highest rate at which nearly every input is answered within the SLO."""

from dataclasses import dataclass

import numpy as np

from deployments.dispatch.messages import Limits
from experiments.simulator import World, simulate
from experiments.tally import Report
from experiments.workloads import arrivals, exit_blocks
from optimizer.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.exits import ExitProfile

ENOUGH = 0.99  # of all inputs
STEPS = 7  # halvings of the interval below the promise: known to within 1 %


@dataclass(frozen=True)
class Sustained:
    """A rate that was sustained, and the run that showed it; none where not even a trickle was."""

    promised_per_s: float
    goodput_per_s: float
    report: Report | None


def sustained(
    plan: Plan, facts: Problem, slo_s: float, inputs: int = 15_000, seed: int = 0, limits: Limits | None = None
) -> Sustained:
    """Found by bisection up to a tenth more than the plan promises, with Poisson arrivals."""
    world = World(plan, facts, slo_s, limits or Limits())
    promised = evaluate(plan, facts).goodput_per_s
    low, high = 0.0, 1.1 * promised
    best = Sustained(promised, 0.0, None)
    for _ in range(STEPS):
        rate = (low + high) / 2
        report = run(world, rate, max(inputs, int(5 * slo_s * rate)), seed)
        if report.good_share >= ENOUGH:
            low, best = rate, Sustained(promised, report.goodput_per_s, report)
        else:
            high = rate
    return best


def run(world: World, rate_per_s: float, inputs: int, seed: int) -> Report:
    """So many inputs at a rate, hard as the facts say."""
    seconds = inputs / rate_per_s
    times_s = arrivals("poisson", rate_per_s, seconds, seed)
    depths = exit_blocks(ExitProfile(world.facts.survival), len(times_s), np.random.default_rng(seed))
    return simulate(world, [(times_s, depths)], seconds, seed)
