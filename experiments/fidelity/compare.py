"""One case, live and simulated: what came in time, and how long the answers took."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from deployments.dispatch.messages import EARLY_S, Limits
from experiments.devices import Troubles
from experiments.fidelity.calibration import Calibration
from experiments.fidelity.suite import SIMULATED, Case
from experiments.load import Load, Record
from experiments.simulator import World, simulate
from experiments.tally import Report
from experiments.workloads import Floats, Ints
from optimizer.plan import Plan
from optimizer.problem import Problem

TOLD = ("goodput_per_s", "p50_ms", "p99_ms")


@dataclass(frozen=True)
class Outcome:
    """Of one run; latencies of what was answered."""

    goodput_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Row:
    """Simulated many times, with variations as small as those that lone requests show: the median counts."""

    case: Case
    live: Outcome
    simulated: tuple[Outcome, ...]
    sent_late_ms: float  # what the load generator itself was behind, p99

    def median(self, name: str) -> float:
        return float(median(getattr(each, name) for each in self.simulated))

    def error(self, name: str) -> float:
        """By how much the simulator is wrong, as a share of what the live graph did."""
        live: float = getattr(self.live, name)
        return (self.median(name) - live) / live

    def spread(self, name: str) -> float:
        """How far one run is from another of the same case: the standard deviation, as a share."""
        return float(np.std([getattr(each, name) for each in self.simulated], ddof=1)) / self.median(name)


@dataclass(frozen=True)
class Tried:
    """A case as it went live."""

    case: Case
    times_s: Floats
    sure_after: Ints
    record: Record


def live(case: Case, url: str, promised_per_s: float) -> Tried:
    times_s, sure_after = case.inputs(promised_per_s)
    bodies = [json.dumps({"inputs": {"exit_block": block}}).encode() for block in sure_after.tolist()]
    source = Load(url, bodies, headers=f"X-Deadline-Ms: {case.slo_s * 1e3:g}\r\n")
    return Tried(case, times_s, sure_after, asyncio.run(source.at(times_s)))


def compare(tried: Tried, plan: Plan, facts: Problem, calibrated: Calibration) -> Row:
    """With the same arrivals and exits."""
    case, record = tried.case, tried.record
    limits, troubles = Limits(early_s=EARLY_S), Troubles(jitter=calibrated.jitter)
    world = World(plan, facts, case.slo_s, limits, troubles, calibrated.host)
    inputs = [(tried.times_s, tried.sure_after)]
    reports = [simulate(world, inputs, case.seconds, seed) for seed in range(SIMULATED)]
    late_ms = 1e3 * float(np.nanpercentile(record.sent_s - record.due_s, 99))
    return Row(case, _live(record, case), tuple(map(_simulated, reports)), late_ms)


def _live(record: Record, case: Case) -> Outcome:
    latency_s = (record.ended_s - record.due_s)[record.status == 200]
    if not len(latency_s):
        raise RuntimeError(f"none of {len(record.status)} requests was answered")
    p50, p99 = 1e3 * np.percentile(latency_s, (50, 99))
    return Outcome(float((latency_s <= case.slo_s).sum() / case.seconds), float(p50), float(p99))


def _simulated(report: Report) -> Outcome:
    return Outcome(report.goodput_per_s, *(1e3 * report.tally.quantile_s(share) for share in (0.5, 0.99)))


def errors(rows: Sequence[Row]) -> dict[str, float]:
    """The largest and the usual one of all cases, and how far runs of the same case are apart where they are most."""
    found = {}
    for name in TOLD:
        short, all_ = name.partition("_")[0], [abs(row.error(name)) for row in rows]
        found[f"{short}_error_max"], found[f"{short}_error_median"] = max(all_), median(all_)
        found[f"{short}_spread_max"] = max(row.spread(name) for row in rows)
    return found
