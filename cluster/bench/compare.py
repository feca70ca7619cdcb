"""Compares the full network, plain early exit and constant batches: each with its best plan, under equal load.

The result is reported as a table and as JSON.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from isobatch.cluster.bench.real_device import GROUP, DeviceTrial, Source, scored, tried
from isobatch.cluster.load.workloads import arrivals, highest
from isobatch.deployments.dispatch.route import Route, route_of
from isobatch.optimizer import Objective, evaluate, optimize, problem
from isobatch.optimizer.pipelines.baselines import baselines
from isobatch.optimizer.pipelines.batch_gain import BatchGain, batch_gains, oracle_per_s
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import MOST_BATCH, LatencyTable
from isobatch.profiles.measure import Stopwatch
from isobatch.profiles.model import SplitModel
from isobatch.profiles.sweep import whole_s

STOCK = "no exits"
NAIVE = "early exit"
CONSTANT = "constant batch"
GIVEN = "the given plan"  # of a bench that has one
SYSTEMS = (STOCK, NAIVE, CONSTANT)
MOST = 1.3  # times the promise of a plan: the highest rate that is tried
STEPS = 6  # halvings of the searched interval
BETTER = 1.03  # times the rate of the best plan so far: a plan that does not sustain it is tried no further
LOOSER = (1.0, 1.6, 2.5)  # plans are made for these multiples of the SLO
ROOMY_BYTES = 1 << 50  # a memory that limits no plan
UNLIMITED_GBIT_PER_S = 1e30  # a link that delays no launch
SPAN = 4  # a trial should last at least this many times the SLO
BestPlan = tuple[Plan | None, DeviceTrial]  # the best of a system's plans (None: no plan keeps the SLO), and its trial


@dataclass(frozen=True)
class ComparedSystem:
    """The figures of one system under one SLO. A system without a plan that keeps the SLO has a goodput of 0."""

    system: str
    slo_ms: float
    promised_per_s: float
    goodput_per_s: float
    bound_per_s: float  # an upper bound for any system, by the same table
    p50_ms: float | None
    p99_ms: float | None
    accuracy: float | None  # of all inputs, the same for every system, apart from the timing
    mean_depth: float | None  # the share of the blocks that an input runs
    plan: str  # blocks @ batch, split by split

    @property
    def share_of_bound(self) -> float:
        return self.goodput_per_s / self.bound_per_s if self.bound_per_s else 0.0

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "share_of_bound": self.share_of_bound}


def alone(profile: Profile, kind: str) -> Problem:
    """The planning problem for one device of this kind, whose memory and price do not matter."""
    devices = [Device(kind, 1, ROOMY_BYTES, price_per_hour=1.0)]
    return problem(profile, devices, [Link(kind, kind, UNLIMITED_GBIT_PER_S, 0.0)], exits=profile.exits_of(None))


def plans(profile: Profile, kind: str, slo_s: float, max_batch: int) -> dict[str, list[Plan]]:
    """Candidate plans of each system: the planner's latencies may be wrong, so several are made, and trials decide."""
    plans: dict[str, list[Plan]] = {system: [] for system in SYSTEMS}
    facts = alone(profile, kind)
    for looser in LOOSER:
        objective = Objective(slo_s=looser * slo_s, max_batch=max_batch)
        stock, naive, *_ = (each.plan for each in baselines(facts, objective))
        best: Plan | None = None
        with suppress(UserError):  # no plan keeps this SLO
            best = optimize(profile, facts.devices, list(facts.links.values()), objective)
        for system, plan in ((STOCK, stock), (NAIVE, naive), (CONSTANT, best)):
            if plan is not None and plan.placements not in [known.placements for known in plans[system]]:
                plans[system].append(plan)
    return plans


@dataclass(frozen=True)
class Bench:
    """A network on one device, with its profile and inputs for it."""

    model: SplitModel
    profile: Profile
    kind: str
    source: Source
    stopwatch: Stopwatch
    max_batch: int = MOST_BATCH
    least: int = 200  # the fewest inputs by which a rate is judged, even on a slow device
    make_ready: Callable[[Plan], None] = lambda plan: None
    given: Plan | None = None  # a plan to compare with the others

    def compare(
        self, slos_ms: Sequence[float], seconds: float, rounds: int, progress: Callable[[str], None] = lambda what: None
    ) -> Iterator[ComparedSystem]:
        """Systems take turns, round by round, so that noise hits all of them; medians count."""
        facts = alone(self.profile, self.kind)
        score = cache(partial(scored, self.model, self.source))
        for slo_ms in slos_ms:
            slo_s = slo_ms / 1e3
            candidates = plans(self.profile, self.kind, slo_s, self.max_batch)
            candidates |= {GIVEN: [self.given]} if self.given else {}
            for plan in chain(*candidates.values()):
                self.make_ready(plan)
            runs: dict[str, list[BestPlan]] = {system: [] for system in candidates}
            for number in range(rounds):
                for system, ways in candidates.items():
                    progress(f"SLO {slo_ms:g} ms, {system}, round {number + 1} of {rounds}")
                    runs[system].append(self._best(ways, facts, slo_s, seconds, seed=number))
            bound = oracle_per_s(facts, slo_s, self.max_batch)
            for system, each in runs.items():
                yield self._row(system, slo_ms, each, facts, bound, score)

    def gains(self, slos_ms: Sequence[float]) -> dict[float, BatchGain]:
        """The gain of batches on this device by SLO, by the latency table."""
        facts = alone(self.profile, self.kind)
        objectives = {slo_ms: Objective(slo_s=slo_ms / 1e3, max_batch=self.max_batch) for slo_ms in slos_ms}
        return {slo_ms: gain for slo_ms, each in objectives.items() for gain in batch_gains(facts, each)}

    def _best(self, ways: Sequence[Plan], facts: Problem, slo_s: float, seconds: float, seed: int) -> BestPlan:
        best: Plan | None = None
        trial = DeviceTrial(seconds, slo_s)
        for plan in ways:
            route = route_of(plan, facts.for_plan(plan), [GROUP])

            def at(rate: float, route: Route = route) -> DeviceTrial:
                due_s = arrivals("poisson", rate, max(seconds, self.least / rate), seed)
                return tried(route, self.model, self.stopwatch, self.source, slo_s, due_s)

            if better := sustained(at, trial.goodput_per_s, MOST * evaluate(plan, facts).goodput_per_s):
                best, trial = plan, better
        return best, trial

    def _row(
        self, system: str, slo_ms: float, runs: Sequence[BestPlan], facts: Problem, bound: float,
        score: Callable[[tuple[int, ...]], tuple[float | None, float]],
    ) -> ComparedSystem:  # fmt: skip
        plan, trial = sorted(runs, key=lambda run: run[1].goodput_per_s)[len(runs) // 2]
        if plan is None:
            return ComparedSystem(system, slo_ms, 0.0, 0.0, bound, None, None, None, None, "nothing keeps this SLO")
        promised_per_s, times = evaluate(plan, facts).goodput_per_s, (trial.latency_ms(0.5), trial.latency_ms(0.99))
        splits = ", ".join(f"{split.blocks_text} @ {split.batch_size}" for split in plan.splits)
        figures = (promised_per_s, trial.goodput_per_s, bound, *times)
        return ComparedSystem(system, slo_ms, *figures, *score(plan.ramps), splits)


def sustained(at: Callable[[float], DeviceTrial], low: float, high: float) -> DeviceTrial | None:
    """The trial at the highest sustained rate above `low`, which another plan of the same system has sustained."""
    best: DeviceTrial | None = None
    if low:  # search only if this plan sustains at least a little more
        high, first = max(high, BETTER * low), at(BETTER * low)
        if not first.keeps_slo:
            return None
        low, best = BETTER * low, first
    return highest(at, lambda trial: trial.keeps_slo, low, high, STEPS) or best


def table(rows: Sequence[ComparedSystem], title: str) -> Table:
    """A table that fits into 80 columns; the plans are left to `plan_lines`."""
    result = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    result.add_column("SLO ms", justify="right")
    result.add_column("system", no_wrap=True)
    for heading in ("per s", "x", "bound", "p50 ms", "p99 ms", "accuracy", "depth"):
        result.add_column(heading, justify="right", no_wrap=True)
    stock = {row.slo_ms: row for row in rows if row.system == STOCK}
    for row in rows:
        if row.system == STOCK and result.rows:
            result.add_section()
        result.add_row(f"{row.slo_ms:g}", row.system, *_cells(row, stock[row.slo_ms]))
    return result


def plan_lines(rows: Sequence[ComparedSystem]) -> Iterator[str]:
    """A line for every plan that was run: blocks @ batch, split by split."""
    slos_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.goodput_per_s:
            slos_of.setdefault((row.system, row.plan), []).append(f"{row.slo_ms:g}")
    for (system, plan), slos in slos_of.items():
        yield f"{system}, {', '.join(slos)} ms: blocks @ batch {plan}"


def gain_lines(gains: Mapping[float, BatchGain]) -> Iterator[str]:
    """The gain of batches by the latency table: a line for all SLOs with the same gain."""
    slos_of: dict[str, list[str]] = {}
    for slo_ms, gain in gains.items():
        slos_of.setdefault(str(gain), []).append(f"{slo_ms:g}")
    for gain_text, slos in slos_of.items():
        yield f"{', '.join(slos)} ms, {gain_text}"


def _cells(row: ComparedSystem, stock: ComparedSystem) -> list[str]:
    return [
        f"{row.goodput_per_s:,.0f}" if row.goodput_per_s >= 100 else f"{row.goodput_per_s:.1f}",
        f"{row.goodput_per_s / stock.goodput_per_s:.2f}" if stock.goodput_per_s else "-",
        f"{row.share_of_bound:.0%}",
        _number(row.p50_ms),
        _number(row.p99_ms),
        "-" if row.accuracy is None else f"{row.accuracy:.1%}",
        "-" if row.mean_depth is None else f"{row.mean_depth:.0%}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def unkept(rows: Sequence[ComparedSystem], measured: LatencyTable) -> Iterator[str]:
    """A line for each SLO that no system keeps."""
    alone_ms = 1e3 * whole_s(measured)[0]
    for slo_ms in dict.fromkeys(row.slo_ms for row in rows):
        if not any(row.goodput_per_s for row in rows if row.slo_ms == slo_ms):
            yield f"nothing keeps an SLO of {slo_ms:g} ms: one input alone takes {alone_ms:.3g} ms in full"


def too_short(slos_ms: Sequence[float], seconds: float) -> Iterator[str]:
    """A line for each SLO whose trials are so short that the inputs still inside at their end distort the rate.

    >>> list(too_short([25.0, 1000.0], seconds=1.0))
    ['1 s of load is short for an SLO of 1000 ms, and rates are low for it: use --seconds 4']
    """
    for slo_ms in slos_ms:
        if seconds < (enough := SPAN * slo_ms / 1e3):
            short = f"{seconds:g} s of load is short for an SLO of {slo_ms:g} ms, and rates are low for it"
            yield f"{short}: use --seconds {enough:g}"


def write(
    rows: Sequence[ComparedSystem], model: str, measured: LatencyTable, path: Path, gains: Mapping[float, BatchGain]
) -> None:
    content = {
        "model": model,
        "measured": measured.source,
        "kind": measured.kind,
        "length": measured.length,
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [row.as_dict() for row in rows],
        "batch_gains": [{"slo_ms": slo_ms, **asdict(gain)} for slo_ms, gain in gains.items()],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
