"""The goodput that a plan sustains: the highest rate at which nearly every input is answered within the SLO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cluster.load.workloads import arrivals, exit_blocks
from cluster.simulator.report import Report
from cluster.simulator.simulation import World, simulate
from deployments.dispatch.messages import Limits
from optimizer.model.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.exits import ExitProfile

IN_TIME_SHARE = 0.99  # of all inputs must be answered in time, or a rate is not sustained
Run = TypeVar("Run")
STEPS = 7  # halvings of the interval below the promise: known to within 1 %


@dataclass(frozen=True)
class Sustained:
    """A sustained goodput and the run that showed it; without a run no rate was sustained, however low."""

    promised_per_s: float
    goodput_per_s: float
    report: Report | None


def sustained(
    plan: Plan, facts: Problem, slo_s: float, inputs: int = 15_000, seed: int = 0, limits: Limits | None = None
) -> Sustained:
    """Bisect for the sustained rate, up to a tenth more than the plan promises, with Poisson arrivals."""
    world = World(plan, facts, slo_s, limits or Limits())
    promised = evaluate(plan, facts).goodput_per_s
    best = highest(
        lambda rate: run(world, rate, max(inputs, int(5 * slo_s * rate)), seed),
        lambda report: report.good_share >= IN_TIME_SHARE,
        0.0, 1.1 * promised, STEPS,
    )  # fmt: skip
    return Sustained(promised, best.goodput_per_s if best else 0.0, best)


def highest(
    run_at: Callable[[float], Run], kept: Callable[[Run], bool], low: float, high: float, steps: int
) -> Run | None:
    """The run at the highest rate between these that `kept` accepts, found in so many halvings, or None."""
    best: Run | None = None
    for _ in range(steps):
        rate = (low + high) / 2
        found = run_at(rate)
        if kept(found):
            low, best = rate, found
        else:
            high = rate
    return best


def run(world: World, rate_per_s: float, inputs: int, seed: int) -> Report:
    """Simulate so many inputs at a rate, with exits drawn from the survival of the facts."""
    seconds = inputs / rate_per_s
    times_s = arrivals("poisson", rate_per_s, seconds, seed)
    depths = exit_blocks(ExitProfile(world.facts.survival), len(times_s), np.random.default_rng(seed))
    return simulate(world, [(times_s, depths)], seconds, seed)
