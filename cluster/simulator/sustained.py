"""The goodput that a plan sustains: the highest rate at which nearly every input is answered within the SLO."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from cluster.load.workloads import Floats, Run, arrivals, exit_blocks
from cluster.simulator.report import Report
from cluster.simulator.simulation import Simulation, World
from deployments.dispatch.messages import Limits
from optimizer.model.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.exits import ExitProfile

IN_TIME_SHARE = 0.99  # of all inputs must be answered in time, or a rate is not sustained
STEPS = 7  # halvings of an interval
# An overload shows only once the queue that it builds up is as long as the SLO, so that a run of n SLOs lets a rate
# pass that is up to 1 / n too high. Short runs find where to look, long ones decide.
SLOS, SHORT_SLOS = 100, 10
ABOVE = 1.1  # no plan sustains more than so many times what its devices compute, as the planner counts it
# The first step away from a guess; how near a rate is found; and the lowest that is looked for: as shares of rates.
STEP, NEAR, LOWEST = 0.02, 0.01, 0.01
# Where the rate is looked for, times what is guessed, and how often a guess may be mended. How many times more or less
# lost inputs still count; and by how many times as much, in logarithms, the lost ones grow as those that come.
AROUND, TURNS, FAR, SLOPES = (0.94, 0.98, 1.02, 1.06), 8, 8.0, (8.0, 80.0)
LOOKS = 10  # in a run whether it is lost already


@dataclass(frozen=True)
class SustainedGoodput:
    """A sustained goodput and the run that showed it; without a run no rate was sustained, however low."""

    promised_per_s: float
    goodput_per_s: float
    report: Report | None


def sustained(
    plan: Plan, facts: Problem, slo_s: float, inputs: int = 15_000, seed: int = 0, limits: Limits | None = None,
    slos: float = SLOS, in_time: float = IN_TIME_SHARE,
) -> SustainedGoodput:  # fmt: skip
    """Look for the sustained rate, up to a tenth more than the devices compute, with Poisson arrivals.

    Runs last `slos` times the SLO and have at least so many inputs, of which chance keeps 1 % to within 0.1 %. What is
    answered of far too many in a short run is about what is sustained, so the search begins near there.
    """
    world = World(plan, facts, slo_s, limits or Limits())
    promised = evaluate(plan, facts).goodput_per_s
    most = ABOVE * promised
    overload = run(world, most, max(inputs, int(min(slos, SHORT_SLOS) * slo_s * most)), seed)
    answered_per_s = overload.good / (overload.tally.seconds + slo_s)

    def run_at(rate: float) -> Report | None:
        return kept_run(world, rate, max(inputs, int(slos * slo_s * rate)), seed, in_time)

    found = near(run_at, answered_per_s / in_time * (1 + 1 / slos), most)
    return SustainedGoodput(promised, found.goodput_per_s if found else 0.0, found)


def near(run_at: Callable[[float], Run | None], guess: float, most: float) -> Run | None:
    """What is found at the highest rate at which anything is: steps from the guess double, then intervals are halved.

    >>> [round(near(lambda rate: rate if rate < 70 else None, guess, most=110), 1) for guess in (100, 71, 50)]
    [69.8, 69.9, 69.8]
    >>> near(lambda rate: rate, 100, most=110)
    110
    """
    best, low, high, step = None, 0.0, inf, STEP
    rate = min(max(guess, LOWEST * most), most)
    while True:
        found = run_at(rate)
        if found is None:
            high = rate
        else:
            best, low = found, rate
        if low >= (1 - NEAR) * min(high, most) or high <= LOWEST * most:
            return best
        if low and high < inf:
            rate = (low + high) / 2
        else:
            rate = min(low * (1 + step), most) if low else high * (1 - step)
            step = min(2 * step, 0.5)


def settled(
    world: World, rate_per_s: float, inputs: int, seed: int, slos: float = SLOS, in_time: float = IN_TIME_SHARE
) -> float:
    """The rate at which just this share is in time, looked for near `rate_per_s`; 0 where none is found.

    What is lost comes in bursts, so that one run of few inputs tells little. Several, each with inputs of its own, tell
    as much as one run of all their inputs. Where nothing is lost up to some rate and much from there on, no curve fits
    them, and the rate is closed in on from both sides.
    """
    nearby, kept_per_s, lost_per_s = np.log(AROUND), 0.0, inf
    for _ in range(TURNS):
        lost = [
            1 - run(world, rate, max(inputs, int(slos * world.slo_s * rate)), len(AROUND) * seed + index).good_share
            for index, rate in enumerate(rate_per_s * np.array(AROUND))
        ]
        moved = _even(nearby, np.array(lost) / (1 - in_time))
        if nearby[0] <= moved <= nearby[-1]:
            return rate_per_s * float(np.exp(moved))
        if moved > 0:
            kept_per_s = rate_per_s
        else:
            lost_per_s = rate_per_s
        rate_per_s *= float(np.exp(moved))
        if not kept_per_s < rate_per_s < lost_per_s:
            rate_per_s = sqrt(kept_per_s * lost_per_s)
    return kept_per_s


def _even(nearby: Floats, lost: Floats) -> float:
    """Where as many are lost as may be, if the logarithm of how many grows in a straight line: Poisson's regression.

    `lost`: times what may be lost. They are summed before any logarithm is taken: runs in which hardly any is lost say
    as little by themselves as those with many.

    >>> round(_even(np.array([-0.1, 0.0, 0.1]), np.exp(20 * (np.array([-0.1, 0.0, 0.1]) - 0.03))), 2)
    0.03
    """
    lost = np.clip(lost, 1e-9, FAR)
    slope, high = SLOPES
    for _ in range(STEPS):
        grown = np.exp((slope + high) / 2 * nearby)
        flatter = nearby @ grown / grown.sum() > nearby @ lost / lost.sum()
        slope, high = (slope, (slope + high) / 2) if flatter else ((slope + high) / 2, high)
    total = max(float(lost.sum()), len(lost) / FAR)
    return float(np.log(np.exp(slope * nearby).sum() / total) / slope)


def run(world: World, rate_per_s: float, inputs: int, seed: int) -> Report:
    """Simulate so many inputs at a rate, with exits drawn from the survival of the facts."""
    return _simulation(world, rate_per_s, inputs, seed)[0].finish()


def kept_run(world: World, rate_per_s: float, inputs: int, seed: int, in_time: float = IN_TIME_SHARE) -> Report | None:
    """The run if this share was answered in time. It is broken off when too many are lost already."""
    simulation, arrived = _simulation(world, rate_per_s, inputs, seed)
    for look in range(1, LOOKS):
        simulation.run_until(simulation.tally.seconds * look / LOOKS)
        if simulation.tally.lost > (1 - in_time) * arrived:
            return None
    report = simulation.finish()
    return report if report.good_share >= in_time else None


def _simulation(world: World, rate_per_s: float, inputs: int, seed: int) -> tuple[Simulation, int]:
    seconds = inputs / rate_per_s
    times_s = arrivals("poisson", rate_per_s, seconds, seed)
    depths = exit_blocks(ExitProfile(world.facts.survival), len(times_s), np.random.default_rng(seed))
    return Simulation(world, [(times_s, depths)], seconds, seed), len(times_s)
