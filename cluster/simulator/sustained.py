"""The goodput that a plan sustains: the highest rate at which nearly every input is answered within the SLO."""

from collections.abc import Callable
from functools import partial
from math import inf, log, sqrt
from typing import NamedTuple

import numpy as np

from isobatch.cluster.load.workloads import LEAST_CV, Floats, Run, arrivals, exits_at
from isobatch.cluster.simulator.cores import Each
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Simulation, World
from isobatch.optimizer.effort import never
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.exits import ExitProfile

IN_TIME_SHARE = 0.99  # the share of inputs that must be answered in time for a rate to be sustained
STEPS = 7  # halvings of an interval
# An overload shows only once its queue is as long as the SLO, so that a run of n SLOs passes a rate that is up to 1 / n
# too high. Short runs find the region, long runs decide.
SLOS = 100  # duration of a long run
SHORT_SLOS = 10  # duration of a short run
ABOVE = 1.1  # no plan sustains more than this many times the planner's estimate of its goodput
STEP = 0.02  # the first step away from a guess, as a share of the rate
NEAR = 0.01  # the accuracy of the rate, as a share of it
LOWEST = 0.01  # the lowest rate that is tried, as a share of the highest
NEARBY_RATES = (0.94, 0.98, 1.02, 1.06)  # rates that are run together, as multiples of the guess
TURNS = 8  # how often a guess is corrected
FAR = 8.0  # times the allowed loss: losses are clipped to this multiple, and to its inverse
SLOPES = (8.0, 80.0)  # bounds of the exponent by which losses grow with the rate
BEYOND = 1.15  # the step between rates beyond a sustained one that are tried too
LOOKS = 50  # how often a run checks whether too many inputs are lost
GOLDEN = 0.618033988749895  # the step of a sequence whose points spread evenly from 0 to 1


def always(inputs: float) -> bool:
    """The default for `fits`: whether this many inputs can be simulated in the time that is left."""
    return True


def sustained_per_s(
    plan: Plan, facts: Problem, slo_s: float, inputs: int = 15_000, seed: int = 0, slos: float = SLOS
) -> float:
    """The sustained rate of a plan, up to a tenth above the planner's estimate, with Poisson arrivals.

    Runs last `slos` times the SLO and have at least `inputs` inputs: with 15,000, chance moves a loss of 1 % by 0.1 %.
    """
    return sustained_in(World(plan, facts, slo_s), evaluate(plan, facts).goodput_per_s, inputs, seed, slos)


def sustained_in(
    world: World, promised_per_s: float, inputs: int, seed: int = 0, slos: float = SLOS, in_time: float = IN_TIME_SHARE,
    out_of_time: Callable[[], bool] = never,
) -> float:  # fmt: skip
    """The sustained rate of the fleet, of which this world may be a cell; 0: no rate is sustained, however low.

    `promised_per_s`: the planner's estimate. The search begins near the goodput of a short overloaded run.
    """
    most = ABOVE * promised_per_s
    answered_per_s = overloaded_in(world, most, inputs_of(world, most, inputs, min(slos, SHORT_SLOS)), seed)

    def run_at(rate: float) -> Report | None:
        return run_if_sustained(world, rate, inputs_of(world, rate, inputs, slos), seed, in_time)

    best = highest_run(run_at, answered_per_s / in_time * (1 + 1 / slos), most, out_of_time)
    return best.goodput_per_s / world.share if best else 0.0


def overloaded_in(world: World, rate_per_s: float, inputs: int, seed: int = 0) -> float:
    """The goodput of the fleet at a rate that is too high."""
    overload = run(world, rate_per_s, inputs, seed)
    return float(overload.good / (overload.tally.seconds + world.slo_s) / world.share)


def rate_beyond(
    world: World, rate_per_s: float, most_per_s: float, inputs: int, seed: int, slos: float, in_time: float
) -> float:
    """The highest sustained rate up to `most_per_s` above a rate that fails; 0: there is none.

    The share in time may be nearly level, and then chance decides which rate is the first to fail. Runs that overload
    the plan are broken off soon.
    """
    for power in range(int(log(max(1.0, most_per_s / rate_per_s), BEYOND)) if rate_per_s else 0, 0, -1):
        rate = rate_per_s * BEYOND**power
        if run_if_sustained(world, rate, inputs_of(world, rate, inputs, slos), seed, in_time):
            return rate
    return 0.0


def inputs_of(world: World, rate_per_s: float, least: int, slos: float) -> int:
    """The inputs of a run that lasts this many SLOs at this rate of the fleet, and no fewer than `least`."""
    return max(least, int(slos * world.slo_s * rate_per_s * world.share))


def highest_run(
    run_at: Callable[[float], Run | None], guess: float, most: float, out_of_time: Callable[[], bool] = never
) -> Run | None:
    """The result of `run_at` at the highest rate with one: steps from the guess double, then intervals are halved.

    When the time is over, the highest one so far.

    >>> [round(highest_run(lambda rate: rate if rate < 70 else None, guess, most=110), 1) for guess in (100, 71, 50)]
    [69.8, 69.9, 69.8]
    >>> highest_run(lambda rate: rate, 100, most=110)
    110
    """
    best, low, high, step = None, 0.0, inf, STEP
    rate = min(max(guess, LOWEST * most), most)
    while True:
        result = run_at(rate)
        if result is None:
            high = rate
        else:
            best, low = result, rate
        if low >= (1 - NEAR) * min(high, most) or high <= LOWEST * most or (best and out_of_time()):
            return best
        if low and high < inf:
            rate = (low + high) / 2
        else:
            rate = min(low * (1 + step), most) if low else high * (1 - step)
            step = min(2 * step, 0.5)


def confirmed_rate_per_s(
    world: World, rate_per_s: float, inputs: int, seed: int, slos: float = SLOS, in_time: float = IN_TIME_SHARE,
    each: Each = map, fits: Callable[[float], bool] = always,
) -> float:  # fmt: skip
    """The rate at which exactly this share is in time, searched near `rate_per_s`; 0 where there is none.

    If no time is left to simulate more inputs, the highest simulated rate, once it is sustained.

    Inputs are lost in bursts, so one run of few inputs is inaccurate. Several runs with inputs of their own are as
    accurate as one run of all. If losses jump at some rate, no curve fits them, and the interval is halved.
    """
    _ = world.route  # computed once, not in each process
    nearby, first_seed = np.log(NEARBY_RATES), len(NEARBY_RATES) * seed
    sustained_per_s, failed_per_s = 0.0, inf
    for _ in range(TURNS):
        runs = [
            (rate, inputs_of(world, rate, inputs, slos), first_seed + index)
            for index, rate in enumerate(rate_per_s * np.array(NEARBY_RATES))
        ]
        lost = np.array([*each(partial(_lost, world), runs)])
        moved = _allowed_at(nearby, lost / (1 - in_time))
        if nearby[0] <= moved <= nearby[-1]:
            return rate_per_s * float(np.exp(moved))
        if moved > 0:
            sustained_per_s = rate_per_s
            if not fits(sum(inputs for _, inputs, _ in runs)):
                return rate_per_s * NEARBY_RATES[-1]
        else:
            failed_per_s = rate_per_s
        rate_per_s *= float(np.exp(moved))
        if not sustained_per_s < rate_per_s < failed_per_s:
            rate_per_s = sqrt(sustained_per_s * failed_per_s)
    return sustained_per_s


def _lost(world: World, rate_inputs_and_seed: tuple[float, int, int]) -> float:
    return 1 - run(world, *rate_inputs_and_seed).good_share


def _allowed_at(nearby: Floats, lost: Floats) -> float:
    """The logarithm of the rate at which the loss is the allowed one, by a Poisson regression of losses on rates.

    `lost`: the losses of the runs as multiples of the allowed loss. They are summed before a logarithm is taken, since
    the loss of a single run may be nearly 0.

    >>> round(_allowed_at(np.array([-0.1, 0.0, 0.1]), np.exp(20 * (np.array([-0.1, 0.0, 0.1]) - 0.03))), 2)
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
    """Simulate inputs at a rate of the fleet, with exits drawn from the survival of the facts."""
    return _simulation(world, rate_per_s, inputs, seed)[0].finish()


def run_if_sustained(
    world: World, rate_per_s: float, inputs: int, seed: int, in_time: float = IN_TIME_SHARE
) -> Report | None:
    """The run if this share was answered in time. It is broken off when too many inputs are lost already."""
    simulation, arrived = _simulation(world, rate_per_s, inputs, seed)
    for look in range(1, LOOKS):
        simulation.run_until(simulation.tally.seconds * look / LOOKS)
        if simulation.tally.lost > (1 - in_time) * arrived:
            return None
    report = simulation.finish()
    return report if report.good_share >= in_time else None


class RateTrial(NamedTuple):
    """Runs of a plan at one rate. `counts`: the inputs of each run, the shortest run first."""

    world: World
    rate_per_s: float
    counts: tuple[int, ...]
    in_time: float


def sustains(trial: RateTrial) -> tuple[bool, int]:
    """Whether the rate is sustained in all runs, and the inputs that were simulated until that was known."""
    simulated = 0
    for inputs in trial.counts:
        simulated += inputs
        if run_if_sustained(trial.world, trial.rate_per_s, inputs, 0, trial.in_time) is None:
            return False, simulated
    return True, simulated


def _simulation(world: World, rate_per_s: float, inputs: int, seed: int) -> tuple[Simulation, int]:
    rate_per_s *= world.share
    seconds = inputs / rate_per_s
    if world.share < 1:  # every n-th arrival of the fleet, so that the rate varies no more than the fleet's
        times_s = arrivals("gamma", rate_per_s, seconds, seed, cv=max(LEAST_CV, sqrt(world.share)))
    else:
        times_s = arrivals("poisson", rate_per_s, seconds, seed)
    count, random = len(times_s), np.random.default_rng(seed)
    if world.share < 1:  # draws beyond its share spread evenly, so that their sum varies as the fleet's
        even = (random.random() + GOLDEN * np.arange(count)) % 1.0
        draws = np.where(random.random(count) < world.share, random.random(count), even)
    else:
        draws = random.random(count)
    depths = exits_at(ExitProfile(world.facts.survival), draws)
    return Simulation(world, [(times_s, depths)], seconds, seed), count
