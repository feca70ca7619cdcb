"""One case, live and simulated: what came in time, and how long the answers took."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from experiments.fidelity.suite import LONE, PASS_S, SECONDS, SLO_S, Case
from experiments.load import Load, Record
from experiments.serve import measures
from experiments.simulator import World, simulate
from experiments.workloads import Floats, Ints
from optimizer.plan import Plan
from optimizer.problem import Problem

LAST_BLOCK = 7
TOLD = ("goodput_per_s", "p50_ms", "p99_ms")


@dataclass(frozen=True)
class Outcome:
    """Of one run; latencies of what was answered."""

    goodput_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Row:
    case: Case
    live: Outcome
    simulated: Outcome
    sent_late_ms: float  # what the load generator itself was behind, p99

    def error(self, name: str) -> float:
        """By how much the simulator is wrong, as a share of what the live graph did."""
        live, simulated = asdict(self.live)[name], asdict(self.simulated)[name]
        return float(abs(simulated - live) / live)


def front_s(url: str, asked: int = 40) -> float:
    """What a lone request takes beside its device: the one thing that the simulator cannot know of itself."""
    return measures.median_ms(url, measures.leaving_at(LAST_BLOCK), asked, per_s=5.0) / 1e3 - LONE * PASS_S


def live(url: str, times_s: Floats, sure_after: Ints) -> Record:
    bodies = [json.dumps({"inputs": {"exit_block": block}}).encode() for block in sure_after.tolist()]
    source = Load(url, bodies, headers=f"X-Deadline-Ms: {SLO_S * 1e3:g}\r\n")
    return asyncio.run(source.at(times_s))


def compare(case: Case, url: str, plan: Plan, facts: Problem, promised_per_s: float, front: float) -> Row:
    times_s, sure_after = case.inputs(promised_per_s)
    record = live(url, times_s, sure_after)
    report = simulate(World(plan, facts, SLO_S, front_s=front), [(times_s, sure_after)], SECONDS)
    late_ms = 1e3 * float(np.nanpercentile(record.sent_s - record.due_s, 99))
    simulated = Outcome(report.goodput_per_s, *(1e3 * report.tally.quantile_s(share) for share in (0.5, 0.99)))
    return Row(case, _outcome(record), simulated, late_ms)


def _outcome(record: Record) -> Outcome:
    latency_s = (record.ended_s - record.due_s)[record.status == 200]
    if not len(latency_s):
        raise RuntimeError(f"none of {len(record.status)} requests was answered")
    p50, p99 = 1e3 * np.percentile(latency_s, (50, 99))
    return Outcome(float((latency_s <= SLO_S).sum() / SECONDS), float(p50), float(p99))


def worst(rows: Sequence[Row]) -> dict[str, float]:
    return {f"{name.partition('_')[0]}_error_max": max(row.error(name) for row in rows) for name in TOLD}
