"""The times of networks, and the plan of each combination on the user's devices, simulated under one load for all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.cluster.load.workloads import arrivals, exit_blocks
from isobatch.cluster.profiling.block_times import lengths_of, sample_inputs, timed_whole
from isobatch.cluster.profiling.datasheets import tables as derived
from isobatch.cluster.simulator.plan_choice import CANDIDATE_GAP, best_simulated, why_not_simulated
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.deployments.models import checkpoint, load
from isobatch.deployments.models.encode import Encoder
from isobatch.deployments.prepare.cascades import (
    CalibratedCombination,
    Candidate,
    Combination,
    CombinationFigures,
    ComparisonTerms,
    all_combinations,
    calibrated,
)
from isobatch.deployments.prepare.sample import Indices
from isobatch.optimizer import Objective, Plan, Problem, optimize, problem
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import milliseconds
from isobatch.profiles.devices import Device, kind_of, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable, cascade_table, edge_bytes
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.measure import device_name

SIMULATED = 20_000  # inputs of a run that measures latencies
GAP = 0.01  # the share by which a plan may be worse than the best possible one
FULL = 8  # inputs of the launch whose times compare blocks
A_MILLION_PER_HOUR = 1e6 / 3600  # inputs per second


@dataclass(frozen=True)
class Timed:
    """One candidate's table on every kind, and the lengths of texts in its tokens (None: it reads images)."""

    tables: tuple[LatencyTable, ...]
    lengths: Lengths | None
    side: int  # of its images, in pixels
    encoder: Encoder

    @property
    def costs(self) -> list[float]:
        """Seconds of each block for one input, on the first kind."""
        table = self.tables[0]
        size = min(FULL, table.largest)
        costs: list[float] = (table.block_times_s(size) / size).tolist()
        return costs

    def tokens(self, values: Sequence[Any]) -> NDArray[np.int64] | None:
        """The tokens of each of these inputs; None for images."""
        return self.encoder(values).lengths if self.lengths else None


def timed_candidate(
    each: Candidate, values: Sequence[Any], kinds: Sequence[str], device: str, budget_s: float, largest: int
) -> tuple[Timed, tuple[str, ...]]:
    """A candidate's tables, and notes on their measurement."""
    model = load(each.folder, device)
    lengths = lengths_of(model, values)
    (inputs,) = sample_inputs(model, each.folder, lengths)
    here, by_kind, notes = kind_of(device_name(str(model.device))), dict[str, LatencyTable](), list[str]()
    if here in kinds:
        dtype = str(model.dtype).removeprefix("torch.")
        measured = timed_whole(model, inputs, here, dtype, budget_s, largest)
        by_kind[here], notes = measured.table, [f"{each.name}: {measured}"]
    others, config = [kind for kind in kinds if kind != here], checkpoint.read_config(each.folder)
    side = checkpoint.image_size(each.folder)[0] if lengths is None else 0
    if others:
        known = Profile(each.name, tuple(derived(config, others, [inputs.length], side, model.ramp_blocks)))
        by_kind |= {kind: known.table(kind) for kind in others}
    return Timed(tuple(by_kind[kind] for kind in kinds), lengths, side, model.encoder), tuple(notes)


def order_notes(names: Sequence[str], costs_s: Sequence[float]) -> Iterator[str]:
    """A remark on each network that takes longer than the next one. `costs_s` are of one input.

    >>> list(order_notes(["tiny", "base"], [0.001, 0.020])), len(list(order_notes(["base", "tiny"], [0.020, 0.001])))
    ([], 1)
    """
    for (name, cost_s), (later, later_s) in pairwise(zip(names, costs_s, strict=True)):
        if cost_s > later_s:
            comes_later = f"{later}, which comes later, {milliseconds(later_s)}"
            slower = f"{name} takes {milliseconds(cost_s)} for an input, and {comes_later}"
            yield f"{slower}: name the largest network last, because the loss is compared with that one"


def table_of(levels: Sequence[Timed], place: int, num_labels: int) -> LatencyTable:
    """The table of candidates in sequence, on the kind at this place; sizes count the tokens of the first candidate."""
    first = levels[0].tables[place]
    if len(levels) == 1:
        return first
    carried_bytes = edge_bytes(levels[1].lengths.mean if levels[1].lengths else None, levels[1].side, num_labels)
    tables = [replace(level.tables[place], length=first.length) for level in levels]
    return cascade_table(tables, carried_bytes)


@dataclass(frozen=True)
class Contender:
    """One combination with some thresholds. `plan` is None where no plan keeps the deadline."""

    made: CalibratedCombination
    chosen: Indices
    figures: CombinationFigures
    hopeful: bool  # by the rows that thresholds were made from, it loses no more than is allowed
    profile: Profile
    plan: Plan | None

    @property
    def name(self) -> str:
        return f"{self.profile.model}, exits" if self.made.exits else self.profile.model

    @property
    def goodput_per_s(self) -> float:
        return self.plan.promise.goodput_per_s if self.plan and self.plan.promise else 0.0

    @property
    def dollars_per_million(self) -> float:
        """At full load."""
        if not (self.plan and self.plan.promise and self.goodput_per_s):
            return float("inf")
        return self.plan.promise.cost_per_hour * A_MILLION_PER_HOUR / self.goodput_per_s

    @property
    def shares(self) -> list[float]:
        survival = self.made.survival(self.chosen)
        entering = [survival[start] for start in self.made.starts[:-1]]
        return [here - behind for here, behind in zip(entering, [*entering[1:], 0.0], strict=True)]


@dataclass(frozen=True)
class Tryout:
    """The candidates and conditions of all combinations. `timed` and `tokens` (of the tested rows) are by candidate."""

    candidates: Sequence[Candidate]
    timed: Sequence[Timed]
    tokens: Sequence[Indices | None]
    terms: ComparisonTerms
    devices: tuple[Device, ...]
    slo_s: float

    def combinations(self, most: int) -> list[Combination]:
        return list(all_combinations(self.candidates, most))

    def row(self, combination: Combination) -> Contender:
        """A combination with the thresholds of the rows that thresholds are made from."""
        made = calibrated(self.candidates, combination, [each.costs for each in self.timed], self.terms)
        return self._row(made, combination, made.hoped())

    def tested(self, rows: Sequence[Contender], combinations: Sequence[Combination]) -> Contender:
        """The best hopeful row if it passes the test; else the last network alone."""
        first, last = best(rows), next(row for row in rows if row.made.alone)
        if first is last:
            return last
        passed = self._row(first.made, combinations[rows.index(first)], first.made.shown())
        if passed.figures.promise and passed.goodput_per_s > last.goodput_per_s:
            return passed
        if last.plan is None:
            raise UserError(
                f"{first.name} failed the test of its promise, and {last.name} alone does not keep "
                "--slo-ms on these devices: give more rows, allow more, or give more devices"
            )
        return last

    def latency(self, row: Contender, rate_per_s: float) -> tuple[float, float] | None:
        """The mean and the 99th percentile, in seconds; None where no plan keeps the deadline."""
        if row.plan is None:
            return None
        facts, seconds = self._facts(row.profile), SIMULATED / rate_per_s
        times_s = arrivals("poisson", rate_per_s, seconds, seed=0)
        blocks = exit_blocks(ExitProfile(facts.survival), len(times_s), np.random.default_rng(1))
        report = simulate(World(row.plan, facts, self.slo_s), [(times_s, blocks)], seconds)
        return report.tally.mean_s, report.tally.quantile_s(0.99)

    def with_simulated_plan(self, row: Contender) -> Contender:
        """The row with the plan that sustains most in the simulator, as `isobatch plan` would choose it."""
        facts, objective = self._facts(row.profile), Objective(slo_s=self.slo_s)
        if row.plan is None or why_not_simulated(objective):
            return row
        better = best_simulated(row.plan, facts, objective, partial(side_by_side, gap=CANDIDATE_GAP)).plan
        return replace(row, plan=replace(facts.annotated(better), slo_s=self.slo_s))

    def _facts(self, profile: Profile) -> Problem:
        return problem(profile, self.devices, links_between(self.devices), length=profile.length)

    def _row(self, made: CalibratedCombination, combination: Combination, chosen: Indices) -> Contender:
        profile = self._profile(made, combination, chosen)
        return Contender(made, chosen, made.figures(chosen), made.hopeful(chosen), profile, self._plan(profile))

    def _profile(self, made: CalibratedCombination, combination: Combination, chosen: Indices) -> Profile:
        levels = [self.timed[number] for number in combination.members]
        tokens, num_labels = self.tokens[combination.members[0]], made.members[0].head.shape[1]
        return Profile(
            " > ".join(member.name for member in made.members),
            tuple(table_of(levels, place, num_labels) for place in range(len(self.devices))),
            ExitProfile(made.survival(chosen)),
            lengths=levels[0].lengths,
            token_exits=None if tokens is None else ExitProfile(made.survival(chosen, tokens)),
            edges=made.edges,
        )

    def _plan(self, profile: Profile) -> Plan | None:
        try:
            plan = optimize(profile, self.devices, links_between(self.devices), Objective(slo_s=self.slo_s), gap=GAP)
            return replace(plan, slo_s=self.slo_s)
        except UserError:
            return None


def best(rows: Sequence[Contender]) -> Contender:
    """The row of the highest goodput among those that are expected to keep the promise."""
    hopeful = [row for row in rows if row.hopeful and row.plan]
    if not hopeful:
        raise UserError(
            "no network and no cascade keeps --slo-ms and --max-accuracy-loss: raise one, or give more devices"
        )
    return max(hopeful, key=lambda row: row.goodput_per_s)
