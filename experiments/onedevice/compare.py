"""The network in full, early exit as it is, and constant batches: each as its own best plan, under the same load."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain

from deployments.dispatch.planned import route_of
from experiments.baselines import oracle_per_s
from experiments.onedevice.rehearsal import GROUP, Record, Rehearsal, Source
from experiments.workloads import arrivals
from optimizer import Objective, evaluate, optimize, problem
from optimizer.baselines import baselines
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.devices import Device, Link
from profiles.errors import UserError
from profiles.files import Profile
from profiles.measure import Stopwatch
from profiles.model import SplitModel

STOCK, NAIVE, CONSTANT = "no exits", "early exit", "constant batch"
SYSTEMS = {STOCK: "#999999", NAIVE: "#d98c3f", CONSTANT: "#1b6ca8"}
MOST, STEPS = 1.3, 6  # the search begins at so much of a plan's promise; then halvings
BETTER = 1.03  # times the rate of another plan, or this one is not tried further
LOOSER = (1.0, 1.6, 2.5)  # times the SLO: what is planned for
ROOMY_BYTES, AT_ONCE = 1 << 50, 1e30  # what never binds on one device


@dataclass(frozen=True)
class Row:
    """One system under one SLO. What has no plan that keeps it serves nothing."""

    system: str
    slo_ms: float
    promised_per_s: float
    goodput_per_s: float
    bound_per_s: float  # no system serves more, by the same table
    p50_ms: float | None
    p99_ms: float | None
    accuracy: float | None
    mean_depth: float | None  # the share of the blocks that an input runs
    plan: str  # blocks @ batch, split by split

    @property
    def share_of_bound(self) -> float:
        return self.goodput_per_s / self.bound_per_s if self.bound_per_s else 0.0

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "share_of_bound": self.share_of_bound}


def alone(profile: Profile, kind: str) -> Problem:
    """The facts of planning for one device of this kind, whose memory and price are no concern."""
    devices = [Device(kind, 1, ROOMY_BYTES, price_per_hour=1.0)]
    return problem(profile, devices, [Link(kind, kind, AT_ONCE, 0.0)])


def plans(profile: Profile, kind: str, slo_s: float, max_batch: int) -> dict[str, list[Plan]]:
    """What each system might do, by the planner's estimate of its latency, which need not be right: tried, one wins."""
    found: dict[str, list[Plan]] = {system: [] for system in SYSTEMS}
    for looser in LOOSER:
        for system, plan in _plans(profile, kind, looser * slo_s, max_batch).items():
            if plan is not None and plan.placements not in [known.placements for known in found[system]]:
                found[system].append(plan)
    return found


def _plans(profile: Profile, kind: str, slo_s: float, max_batch: int) -> dict[str, Plan | None]:
    facts, objective = alone(profile, kind), Objective(slo_s=slo_s, max_batch=max_batch)
    stock, naive, *_ = baselines(facts, objective)
    try:
        best: Plan | None = optimize(profile, facts.devices, list(facts.links.values()), objective)
    except UserError:  # no plan keeps this SLO
        best = None
    return {STOCK: stock.plan, NAIVE: naive.plan, CONSTANT: best}


@dataclass(frozen=True)
class Run:
    """The best of a system's plans (None: none keeps the SLO), and how it went."""

    plan: Plan | None
    record: Record


@dataclass(frozen=True)
class Bench:
    """A network on one device, what is known of it, and inputs for it."""

    model: SplitModel
    profile: Profile
    kind: str
    source: Source
    stopwatch: Stopwatch
    max_batch: int = 64
    least: int = 200  # inputs to judge a rate by, however slow the device
    make_ready: Callable[[Plan], None] = lambda plan: None

    def compare(
        self, slos_ms: Sequence[float], seconds: float, rounds: int, progress: Callable[[str], None] = lambda what: None
    ) -> Iterator[Row]:
        """Systems take turns, round by round, so that noise hits all of them; medians count."""
        facts = alone(self.profile, self.kind)
        for slo_ms in slos_ms:
            slo_s = slo_ms / 1e3
            found = plans(self.profile, self.kind, slo_s, self.max_batch)
            for plan in chain(*found.values()):
                self.make_ready(plan)
            runs: dict[str, list[Run]] = {system: [] for system in found}
            for number in range(rounds):
                for system, ways in found.items():
                    progress(f"SLO {slo_ms:g} ms, {system}, round {number + 1} of {rounds}")
                    runs[system].append(self._best(ways, facts, slo_s, seconds, seed=number))
            bound = oracle_per_s(facts, slo_s, self.max_batch)
            for system, each in runs.items():
                yield self._row(system, slo_ms, each, facts, bound)

    def _best(self, ways: Sequence[Plan], facts: Problem, slo_s: float, seconds: float, seed: int) -> Run:
        best = Run(None, Record(seconds, slo_s))
        for plan in ways:
            rehearsal = partial(
                Rehearsal, route_of(plan, facts, [GROUP]), self.model, self.stopwatch, self.source, slo_s
            )

            def at(rate: float, rehearsal: Callable[[], Rehearsal] = rehearsal) -> Record:
                return rehearsal().run(arrivals("poisson", rate, max(seconds, self.least / rate), seed))

            record = sustained(at, best.record.goodput_per_s, MOST * evaluate(plan, facts).goodput_per_s)
            best = Run(plan, record) if record else best
        return best

    def _row(self, system: str, slo_ms: float, runs: Sequence[Run], facts: Problem, bound: float) -> Row:
        median_run = sorted(runs, key=lambda run: run.record.goodput_per_s)[len(runs) // 2]
        plan, record = median_run.plan, median_run.record
        if plan is None:
            return Row(system, slo_ms, 0.0, 0.0, bound, None, None, None, None, "nothing keeps this SLO")
        return Row(
            system,
            slo_ms,
            evaluate(plan, facts).goodput_per_s,
            record.goodput_per_s,
            bound,
            record.latency_ms(0.5),
            record.latency_ms(0.99),
            record.accuracy,
            sum(block + 1 for block in record.blocks) / len(record.blocks) / facts.num_blocks,
            ", ".join(f"{split.start}..{split.stop - 1} @ {split.batch_size}" for split in plan.splits),
        )


def sustained(at: Callable[[float], Record], low: float, high: float) -> Record | None:
    """The run at the highest rate above `low` at which nearly all that come are answered in time; by bisection."""
    best: Record | None = None
    if low:  # known to be possible by other means: worth a search only if a little more is possible here
        high, first = max(high, BETTER * low), at(BETTER * low)
        if not first.kept:
            return None
        low, best = BETTER * low, first
    for _ in range(STEPS):
        rate = (low + high) / 2
        record = at(rate)
        if record.kept:
            low, best = rate, record
        else:
            high = rate
    return best
