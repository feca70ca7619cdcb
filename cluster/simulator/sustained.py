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
# An overload shows only once the queue that it builds up is as long as the SLO, so that a run of n SLOs lets a rate
# pass that is up to 1 / n too high. Short runs find where to look, long ones decide.
SLOS, SHORT_SLOS = 100, 10
LAST_STEPS = 4  # halvings of what short runs leave open: known to within 0.7 %


@dataclass(frozen=True)
class Sustained:
    """A sustained goodput and the run that showed it; without a run no rate was sustained, however low."""

    promised_per_s: float
    goodput_per_s: float
    report: Report | None


def sustained(
    plan: Plan, facts: Problem, slo_s: float, inputs: int = 15_000, seed: int = 0, limits: Limits | None = None,
    slos: float = SLOS,
) -> Sustained:  # fmt: skip
    """Bisect for the sustained rate, up to a tenth more than the plan promises, with Poisson arrivals.

    Runs last `slos` times the SLO and have at least so many inputs, of which chance keeps 1 % to within 0.1 %.
    """
    world = World(plan, facts, slo_s, limits or Limits())
    promised = evaluate(plan, facts).goodput_per_s

    def best(low: float, high: float, steps: int, slos: float) -> Report | None:
        def run_at(rate: float) -> Report:
            return run(world, rate, max(inputs, int(slos * slo_s * rate)), seed)

        return highest(run_at, lambda report: report.good_share >= IN_TIME_SHARE, low, high, steps)

    short = min(slos, SHORT_SLOS)
    found = best(0.0, 1.1 * promised, STEPS, short)
    if found and slos > short:
        rate = found.arrived / found.tally.seconds
        low = rate * (1 - 1 / short)
        found = best(low, rate, LAST_STEPS, slos) or best(0.0, low, STEPS, slos)
    return Sustained(promised, found.goodput_per_s if found else 0.0, found)


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
