"""Measures p99 with exits over that without, which should not grow (PAME).

Plans have the SLO of `isobatch plan --no-later`: the latency without exits, at full load. The product's dispatcher runs
them in virtual time with thresholds of `isobatch prepare`, at four shares of the rate without exits. Plans for goodput
without an SLO are the control.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from experiments.promise.audited import RecordedDevices
from experiments.promise.plans import fleet_of
from experiments.promise.tried import drawn
from experiments.shared.gains import baseline_plan, keeping_tail
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.simulator.simulation import Simulation, World
from isobatch.cluster.simulator.tails import LOADS
from isobatch.deployments.dispatch.messages import Limits
from isobatch.optimizer import Objective, Plan, Problem, evaluate
from isobatch.optimizer.pipelines.baselines import NO_EXITS, no_later
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.tuning import plan_for_its_ramps

MAX_BATCH, INPUTS, SLO_S = 32, 12_000, 2.0


def tail(name: str, recording: str) -> dict[str, float]:
    """p99 and goodput with exits, over those without."""
    evidence, others = drawn(name, recording, "agreement")
    facts, exits, most = fleet_of(name).facts(), evidence.exits(evidence.prepared), Objective(max_batch=MAX_BATCH)

    def planned(objective: Objective) -> tuple[Plan, Problem]:
        known = replace(facts, survival=exits.survival, exits=exits)
        planned = plan_for_its_ramps(known, objective, lambda given: side_by_side(given, objective))
        assert planned, "This is a bug: the network without exits is a plan."
        return planned

    stock = baseline_plan(NO_EXITS, facts, most), facts.without_exits
    devices = partial(RecordedDevices, table=others.known, evidence=evidence, prepared=evidence.prepared)

    def p99_s(plan: Plan, here: Problem, load: float) -> float:
        rate = load * _goodput_per_s(*stock)
        times_s = arrivals("poisson", rate, INPUTS / rate, 0)
        rows = np.random.default_rng(0).integers(others.known.num_inputs, size=len(times_s))
        world = World(plan, here, SLO_S, Limits())
        return Simulation(world, [(times_s, rows)], INPUTS / rate, 0, devices).finish().tally.quantile_s(0.99)

    limit, free = no_later(facts, most), planned(most)
    estimated, here = planned(limit)
    limited = keeping_tail(estimated, here, limit)[1], here
    result = {"tail_goodput_ratio": _goodput_per_s(*limited) / _goodput_per_s(*stock)}
    for load in LOADS:
        without_s, kept_s, free_s = (p99_s(*each, load) for each in (stock, limited, free))
        result[f"tail_p99_ratio_at_{load}"] = kept_s / without_s
        result[f"tail_p99_ratio_free_at_{load}"] = free_s / without_s
    return {f"{figure}_{name}": value for figure, value in result.items()}


def _goodput_per_s(plan: Plan, facts: Problem) -> float:
    return evaluate(plan, facts).goodput_per_s
