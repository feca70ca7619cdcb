"""Measures one system at one point of a figure's axis: it simulates the plan of the planner or of a baseline.

A result depends on this file, its imports and the settings, so that sentences may change without a new measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np

from experiments.planner.settings import Network, Survivors
from experiments.shared.machine import data
from isobatch.cluster.load.traces import trace
from isobatch.cluster.load.workloads import exit_blocks
from isobatch.cluster.simulator.candidates import LIMITS
from isobatch.cluster.simulator.plan_choice import CANDIDATE_GAP, best_simulated
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.cluster.simulator.sustained import run, run_if_sustained, sustained_per_s
from isobatch.deployments.dispatch.messages import Limits
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines import baselines
from isobatch.optimizer.pipelines.batch_gain import oracle_per_s
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan, Split
from isobatch.optimizer.problem import Problem

OURS, EARLY, FULL = "isobatch", "early exit", "no exits"
SERIAL, ALL_RAMPS = "one device at a time", "all ramps open"
NAMES = {EARLY: baselines.EARLY_EXIT, FULL: baselines.NO_EXITS, SERIAL: baselines.SERIAL}
INPUTS, GAP = 6_000, 0.01
SLOS = 30  # length of a run: it does not show an overload of less than 3 %, which delays inputs by less than the SLO
STEADY_SHARE = 0.8  # the load at which latencies are compared, as a share of the weakest system's sustained rate
BURSTY_SHARE, BURSTY_S = 0.4, 100.0  # the trace's mean rate, as a share of the rate that no exits sustain; seconds
TWEETS = "arrivals/twitter/twitter_2021-08_per_second.tbz2"
NOBODY_LEAVES: Survivors = ((0.0, 1.0), (1.0, 1.0))
MORE, TURNS = 1.05, 20  # the planner gets this multiple of the rate if its plan does not sustain the rate in simulation


@dataclass(frozen=True)
class E3Setting:
    """One point of an axis: network, devices, batch size, SLO and systems."""

    network: Network
    devices: str
    batch: int
    slo_s: float = 0.1
    fixed: bool = True  # every launch has exactly the batch, not at most
    systems: tuple[str, ...] = (OURS, EARLY, FULL)
    dtype: str = "float16"
    expected: Network | None = None  # the exits that plans expect; None: the network's own
    asked_per_s: float = 0.0  # the rate that the cheapest plan must sustain
    quantile: float = 0.0  # of latencies

    def facts(self, backend: str) -> Problem:
        return self.network.facts(self.devices, self.dtype, backend)


@dataclass(frozen=True)
class BarValue:
    """A value; of a goodput also its share of the upper bound."""

    value: float
    share: float | None = None


def goodput(setting: E3Setting, backend: str, system: str) -> BarValue:
    """The highest rate at which 99 % of Poisson arrivals are answered within the SLO."""
    result = _sustained(_that_matters(setting, system), backend, system)
    return BarValue(result, result / oracle_per_s(setting.facts(backend), setting.slo_s, setting.batch))


def dollars(setting: E3Setting, backend: str, system: str) -> BarValue:
    """Dollars per hour of the cheapest plan that sustains the rate; 0 if no plan does."""
    facts, asked_per_s = setting.facts(backend), setting.asked_per_s
    for _ in range(TURNS):
        plan = planned(setting, facts, backend, system, asked_per_s)
        if plan is None:
            break
        inputs = max(INPUTS, int(SLOS * setting.slo_s * setting.asked_per_s))
        if run_if_sustained(World(plan, facts, setting.slo_s, Limits()), setting.asked_per_s, inputs, seed=0):
            return BarValue(evaluate(plan, facts).cost_per_hour)
        asked_per_s *= MORE
    return BarValue(0.0)


def latency(setting: E3Setting, backend: str, system: str) -> BarValue:
    """Milliseconds, at one load that all systems sustain."""
    return BarValue(1e3 * _steady(replace(setting, quantile=0.0), backend, system).tally.quantile_s(setting.quantile))


def under_tweets(setting: E3Setting, backend: str, system: str) -> BarValue:
    """Inputs in time per second, with the arrival times of tweets."""
    facts = setting.facts(backend)
    plan = planned(setting, facts, backend, system)
    if plan is None:
        return BarValue(0.0)
    world = World(plan, facts, setting.slo_s, Limits())
    rate_per_s = BURSTY_SHARE * goodput(setting, backend, FULL).value
    times_s = trace(data(TWEETS), rate_per_s, BURSTY_S)
    depths = exit_blocks(setting.network.exits, len(times_s), np.random.default_rng(0))
    return BarValue(simulate(world, [(times_s, depths)], BURSTY_S).goodput_per_s)


MEASURES: dict[str, Callable[[E3Setting, str, str], BarValue]] = {
    "inputs per second": goodput,
    "dollars per hour": dollars,
    "ms": latency,
    "inputs in time per second": under_tweets,
}


@cache
def _steady(setting: E3Setting, backend: str, system: str) -> Report:
    facts = setting.facts(backend)
    rate_per_s = STEADY_SHARE * min(goodput(setting, backend, each).value for each in setting.systems)
    plan = planned(setting, facts, backend, system)
    assert plan, f"{system} has no plan"
    world = World(plan, facts, setting.slo_s, Limits())
    return run(world, rate_per_s, max(INPUTS, int(SLOS * setting.slo_s * rate_per_s)), seed=0)


@cache
def _sustained(setting: E3Setting, backend: str, system: str) -> float:
    facts = setting.facts(backend)
    plan = planned(setting, facts, backend, system)
    return sustained_per_s(plan, facts, setting.slo_s, INPUTS, slos=SLOS) if plan else 0.0


def _that_matters(setting: E3Setting, system: str) -> E3Setting:
    """The setting without fields that do not affect the system's goodput, since several figures share the rest."""
    network = replace(setting.network, name="")
    if system == FULL:
        network, setting = replace(network, survivors=NOBODY_LEAVES), replace(setting, expected=None)
    return replace(setting, network=network, systems=(), quantile=0.0)


def planned(setting: E3Setting, facts: Problem, backend: str, system: str, asked_per_s: float = 0.0) -> Plan | None:
    """The plan of a system for the exits that it expects."""
    if setting.expected:
        facts = setting.expected.facts(setting.devices, setting.dtype, backend)
    objective = Objective(
        goal="cost" if asked_per_s else "goodput",
        slo_s=setting.slo_s,
        goodput_per_s=asked_per_s,
        max_batch=setting.batch,
        fixed_batch=setting.batch if setting.fixed else None,
    )
    if system in NAMES:
        return _baseline(NAMES[system], facts, objective)
    plan = side_by_side(facts, objective, GAP)
    if plan and system == ALL_RAMPS:
        return _opened(plan, facts)
    return plan if plan is None or setting.fixed else _simulated(plan, facts, objective)


def _baseline(name: str, facts: Problem, objective: Objective) -> Plan | None:
    """A baseline's plan. If its batch is free, the best in simulation, of several limits of the estimated latency."""
    if objective.fixed_batch:
        return baselines.baseline(name, facts, objective).plan
    within = (objective, *map(objective.within, LIMITS))
    plans = {plan for each in within if (plan := baselines.baseline(name, facts, each).plan)}
    slo_s = objective.slo_s or inf
    return max(plans, key=lambda plan: sustained_per_s(plan, facts, slo_s, INPUTS, slos=SLOS), default=None)


def _simulated(plan: Plan, facts: Problem, objective: Objective) -> Plan:
    """The plan that `isobatch plan` chooses, by simulation."""

    def find(facts: Problem, objective: Objective) -> Plan | None:
        return side_by_side(facts, objective, CANDIDATE_GAP)

    return best_simulated(plan, facts, objective, find).plan


def _opened(plan: Plan, facts: Problem) -> Plan:
    """The same plan with every ramp open at which inputs leave."""
    useful = {block for block in range(facts.num_blocks - 1) if facts.survival[block + 1] < facts.survival[block]}

    def opened(split: Split) -> Split:
        return replace(split, ramps=tuple(sorted(useful & set(range(split.start, split.stop)))))

    def all_of(one: Plan) -> Plan:
        placements = (replace(each, splits=tuple(map(opened, each.splits))) for each in one.placements)
        return replace(one, placements=tuple(placements), beside=tuple(map(all_of, one.beside)))

    return all_of(plan)
