"""Measures early answers (Apparate): the median, the tail and the agreement over those of the full network.

A network of texts runs in one piece, one input at a time, with the times of BERT-base on a K80 by its datasheet (two
layers a block). The product's dispatcher runs in virtual time at a tenth of the device's rate, where inputs hardly
wait. The product opens ramps within its budget and chooses thresholds for them. The baseline is Apparate's tuner at the
same ramps, which looks at 16 answers. On faster devices no ramp is within the budget, since each is a launch of 0.2 ms
by the datasheet.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from experiments.planner.networks import bert_base
from experiments.promise.audited import SHARE, RecordedDevices
from experiments.promise.greedy import WINDOW, tuned
from experiments.promise.tried import drawn
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Simulation, World
from isobatch.deployments.dispatch.messages import Limits
from isobatch.optimizer import Objective, Plan, Problem, problem
from isobatch.optimizer.early_answers import early_plan
from isobatch.optimizer.plan import opened
from isobatch.optimizer.tuning import costs_of
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable, outcome
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

SLO_S, BUDGET, INPUTS = 2.0, 0.02, 20_000
LOAD = 0.1  # of the device's rate
KIND, LAYERS = "k80", 2  # of BERT-base in a block
TUNINGS = 100


def early(name: str, recording: str) -> dict[str, float]:
    evidence, others = drawn(name, recording, "agreement")
    return {f"{figure}_{name}": value for figure, value in answered_early(evidence, others.known)}


def answered_early(evidence: Evidence, others: ExitTable) -> Iterator[tuple[str, float]]:
    """Median and p99 over those without exits, and the share of answers that are the full network's."""
    kinds = fleet(f"{KIND}=1")
    facts = problem(Profile("bert-base", (_timed(),)), kinds, links_between(kinds))
    objective = Objective(slo_s=SLO_S, max_batch=1, ramp_budget=BUDGET)
    without, plan = early_plan(facts, objective), _tuned(facts, objective, evidence)
    assert without.promise
    rate = LOAD * without.promise.goodput_per_s
    full, sooner = (_run(each, facts, evidence, others, rate).tally for each in (without, plan))
    yield "early_p50_ratio", sooner.quantile_s(0.5) / full.quantile_s(0.5)
    yield "early_p99_ratio", sooner.quantile_s(0.99) / full.quantile_s(0.99)
    audited = sooner.observed(0.0, {}).audits.agreement()
    assert audited, "This is a bug: nobody left early."
    yield "early_agreement", audited.share
    lost = list(_lost_by_apparate(others.only(opened(plan), costs_of(plan, facts))))
    yield "early_agreement_apparate", 1 - float(np.mean(lost))


def _timed() -> LatencyTable:
    layers = datasheet_table(bert_base(), KIND)
    blocks = np.array(layers.block_s).reshape(len(layers.batch_sizes), -1, LAYERS).sum(axis=2)
    last = slice(LAYERS - 1, None, LAYERS)
    return replace(
        layers,
        block_s=tuple(map(tuple, blocks.tolist())),
        ramp_s=tuple(row[last] for row in layers.ramp_s),
        hidden_bytes=layers.hidden_bytes[last],
        memory_bytes=tuple(np.reshape(layers.memory_bytes, (-1, LAYERS)).sum(axis=1).tolist()),
        block_p95_s=(),
        activation_bytes=(),
    )


def _tuned(facts: Problem, objective: Objective, evidence: Evidence) -> Plan:
    """The first plan, with the thresholds that the controller then chooses for it."""
    plan = early_plan(facts.surviving(evidence.survival(evidence.prepared)), objective)
    chosen = evidence.proven_candidates(ramps := opened(plan), costs_of(plan, facts))
    return replace(plan, thresholds=evidence.thresholds(chosen, ramps))


def _run(plan: Plan, facts: Problem, evidence: Evidence, others: ExitTable, rate: float) -> Report:
    times_s = arrivals("poisson", rate, INPUTS / rate, 0)
    rows = np.random.default_rng(0).integers(others.num_inputs, size=len(times_s))
    devices = partial(RecordedDevices, table=others, evidence=evidence, prepared=evidence.prepared)
    world = World(plan, facts, SLO_S, Limits(audit_share=SHARE, answers_early=True))
    return Simulation(world, [(times_s, rows)], INPUTS / rate, 0, devices).finish()


def _lost_by_apparate(table: ExitTable) -> Iterator[float]:
    random = np.random.default_rng(0)
    for _ in range(TUNINGS):
        seen = table.of(random.integers(table.num_inputs, size=WINDOW))
        yield outcome(table, tuned(seen), "agreement").lost.mean
