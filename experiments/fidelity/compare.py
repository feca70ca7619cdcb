"""Compares goodput and latencies of one case, live and simulated."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from experiments.fidelity.calibration import Calibration
from experiments.fidelity.suite import SIMULATED, Case
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import Floats, Ints
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.deployments.dispatch.messages import EARLY_S, Limits
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

COMPARED = ("goodput_per_s", "p50_ms", "p99_ms")


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run, with the latencies of its answers."""

    goodput_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class ComparedCase:
    """A case live, and simulated several times with the variation of lone requests; the median counts."""

    case: Case
    live: RunFigures
    simulated: tuple[RunFigures, ...]
    sent_late_ms: float  # the load generator's own delay, p99

    def median(self, name: str) -> float:
        return float(median(getattr(each, name) for each in self.simulated))

    def error(self, name: str) -> float:
        """The simulator's error, as a share of the live figure."""
        live: float = getattr(self.live, name)
        return (self.median(name) - live) / live

    def spread(self, name: str) -> float:
        """The standard deviation between runs of the same case, as a share."""
        return float(np.std([getattr(each, name) for each in self.simulated], ddof=1)) / self.median(name)


@dataclass(frozen=True)
class LiveCase:
    """A case and its figures in the live graph."""

    case: Case
    times_s: Floats
    sure_after: Ints
    record: LoadRecord


def live(case: Case, url: str, promised_per_s: float) -> LiveCase:
    times_s, sure_after = case.inputs(promised_per_s)
    bodies = [json.dumps({"inputs": {"exit_block": block}}).encode() for block in sure_after.tolist()]
    source = LoadGenerator(url, bodies, headers=f"X-Deadline-Ms: {case.slo_s * 1e3:g}\r\n")
    return LiveCase(case, times_s, sure_after, asyncio.run(source.at(times_s)))


def compare(tried: LiveCase, plan: Plan, facts: Problem, calibrated: Calibration) -> ComparedCase:
    """Simulate the live case with the same arrivals and exits."""
    case, record = tried.case, tried.record
    world = World(plan, facts, case.slo_s, Limits(early_s=EARLY_S), calibrated.jitter, calibrated.host)
    inputs = [(tried.times_s, tried.sure_after)]
    reports = [simulate(world, inputs, case.seconds, seed) for seed in range(SIMULATED)]
    late_ms = 1e3 * float(np.nanpercentile(record.sent_s - record.due_s, 99))
    return ComparedCase(case, _live(record, case), tuple(map(_simulated, reports)), late_ms)


def _live(record: LoadRecord, case: Case) -> RunFigures:
    latency_s = (record.ended_s - record.due_s)[record.status == 200]
    if not len(latency_s):
        raise RuntimeError(f"none of {len(record.status)} requests was answered")
    p50, p99 = 1e3 * np.percentile(latency_s, (50, 99))
    return RunFigures(float((latency_s <= case.slo_s).sum() / case.seconds), float(p50), float(p99))


def _simulated(report: Report) -> RunFigures:
    return RunFigures(report.goodput_per_s, *(1e3 * report.tally.quantile_s(share) for share in (0.5, 0.99)))


def errors(rows: Sequence[ComparedCase]) -> dict[str, float]:
    """The largest error of all cases."""
    return {f"{name.partition('_')[0]}_error_max": max(abs(row.error(name)) for row in rows) for name in COMPARED}
