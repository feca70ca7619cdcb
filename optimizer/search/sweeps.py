"""The order of sweeps: find multipliers, find a good plan by narrow sweeps, then prove it the best by a full sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from isobatch.optimizer.effort import EFFORT, LAST_BITS, SAME, Effort, Floats
from isobatch.optimizer.goals.relaxation import Cut, Path, Relaxation
from isobatch.optimizer.model.valuation import Staffing, Valuation
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem, split_with_ramps
from isobatch.optimizer.search.bounds import cut, fixed
from isobatch.optimizer.search.labels import LabelSet, LabelSweep, PlacementColumns
from isobatch.optimizer.search.local_placements import Chain, LocalSearch
from isobatch.optimizer.search.options import Builder, Options

NEVER_S = 1e9  # seconds: longer than any latency that matters


@dataclass(frozen=True)
class ValuedPlan:
    value: float
    plan: Plan


class Search:
    """The search among all plans of one problem for one objective."""

    def __init__(self, facts: Problem, objective: Objective, effort: Effort = EFFORT) -> None:
        self.facts, self.objective, self.goal, self.effort = facts, objective, objective.aim, effort
        self.timed = objective.slo_s is not None or self.goal.needs_latency
        self.builder = builder = Builder(facts, objective.batches, objective.budget_s, self.timed, cuts=objective.cuts)
        self.columns = _columns(builder, effort.placements_per_kind)
        self.valuation = Valuation(facts, objective, tuple(int(kind) for kind in self.columns.kind))
        self.options: Sequence[Options] = builder.options()
        self.at_s = 0.0
        least = self.relaxed().evenly().bound
        self.at_s = least if np.isfinite(least) else 0.0
        relaxation = self.relaxed()
        self.fastest, self.cuts, self.best_met = relaxation.fastest(), [self.goal.first_bound(relaxation)], np.inf
        self.dust = LAST_BITS * relaxation.scale  # values that differ by less are equal

    def relaxed(self, steps: int = EFFORT.ascent_steps, enough: float = np.inf) -> Relaxation:
        """The goal's form of the problem with the remaining options."""
        options, valuation, objective, at_s = self.options, self.valuation, self.objective, self.at_s
        late_s = cache(lambda: [each.latency_s(at_s) for each in options])

        def cheapest(mu: Floats, nu: float, offset: float) -> tuple[Cut, Path]:
            return cut(options, mu, nu, offset, at_s, late_s() if nu else ())

        return Relaxation(
            valuation.counts, valuation.prices, valuation.most_capacity, objective.goodput_per_s, objective.budget_s,
            cheapest, self.goal.first_bound, at_s, steps, enough, self.effort,
        )  # fmt: skip

    @property
    def bound(self) -> float:
        """A lower bound on the value of every plan."""
        hopeless = self.fastest.bound > self.objective.budget_s * (1 + SAME)
        least = float(self.valuation.prices.min()) if self.goal.at_given_goodput else 0.0  # of one device
        return np.inf if hopeless else max(self.cuts[-1].bound, least)

    def tighten(self, enough: float, steps: int) -> None:
        """Improve the multipliers while this may help, and note the value of the best plan on the way."""
        relaxation = self.relaxed(steps, enough)
        self.cuts = self.goal.cuts(relaxation)[-self.effort.cuts :]
        self.best_met = min(map(self._value_of, relaxation.paths), default=np.inf)

    def best(self, value: float, gap: float, prove: bool = True) -> tuple[ValuedPlan | None, float]:
        """A plan better than `value` if there is one, and a bound on all plans.

        Without `prove` only narrow sweeps run: the plan may not be the best, and the bound is that of the cuts.
        """
        if self.bound >= value:
            return None, self.bound
        nothing_known = not np.isfinite(value)
        self.tighten(value, self.effort.ascent_steps if prove else self.effort.ascent_steps // 3)
        if self.bound >= value:
            return None, self.bound
        best = self._first(value, (self.effort.narrow, self.effort.wide) if prove else (self.effort.narrow,))
        if best is None and np.isfinite(self.best_met):
            value = min(value, self.best_met * (1 + 2 * SAME) + self.dust)  # the multipliers' search met such a plan
        if best:
            value = best.value
            if prove and value > self.bound * (1 + gap) + self.dust:
                better, bound = self._proof(value, gap, self.effort.wide)
                best = better or best
                if bound >= min(best.value, value / (1 + gap) * (1 - 2 * SAME)):
                    return best, bound
            best = self._closer(best, gap)
            value = best.value
        if value <= self.bound * (1 + gap) + self.dust or not prove:
            return best, self.bound
        effort = self.effort.patient if nothing_known and best is None else self.effort
        while better := self._sweep(value / self.effort.near, self.effort.wide, effort=effort)[0]:
            best = self._closer(better, gap)
            value = best.value
        better, bound = self._proof(value, gap, self.effort.full, effort)
        return better or best, max(bound, self.bound)

    def local(self, value: float) -> ValuedPlan | None:
        """A plan better than `value` that runs the whole network as a local placement on all devices of one kind."""
        best = None
        for kind in range(len(self.facts.devices)):

            def values(loads: Floats, arrivals: float, first: Floats, kind: int = kind) -> Floats:
                return self.valuation.of_one_placement(kind, loads, arrivals * loads, 2 * first - 1)

            value, chain = LocalSearch(self.builder, kind).best(values, value)
            best = self._local_plan(kind, chain, value) if chain else best
        return best

    def _local_plan(self, kind: int, chain: Chain, value: float) -> ValuedPlan:
        loads, first = np.zeros(len(self.valuation.kind_of)), chain.splits[0][1]
        column = self.valuation.kind_of.index(kind)
        loads[column] = chain.load_s
        staffing = self.valuation.staffed(loads, chain.work_s, 2 * first - 1)
        assert staffing, "This is a bug: a local placement that is feasible has no replicas."
        starts = (0, *(stop for stop, _ in chain.splits))
        splits = [
            split_with_ramps(self.facts, start, stop, batch, inner=False)
            for start, (stop, batch) in zip(starts, chain.splits, strict=False)
        ]
        placement = Placement(self.facts.devices[kind].kind, staffing.replicas[column], tuple(splits), local=True)
        return ValuedPlan(value, Plan((placement,)))

    def _first(self, value: float, widths: tuple[int, ...]) -> ValuedPlan | None:
        """A good plan by sweeps with few labels: the lower the limit, the fewer labels are needed."""
        limits = [max(self.bound, 0.0) * wider for wider in self.effort.first_limits]
        limits = [self.best_met] if np.isfinite(self.best_met) else limits
        for limit, width in product([*(each for each in limits if each < value), value], widths):
            best, _ = self._sweep(limit * (1 + SAME) + self.dust, width, effort=self.effort.patient)
            if best:
                return best
        return None

    def _closer(self, best: ValuedPlan, gap: float) -> ValuedPlan:
        """Look for a better plan by narrow sweeps with limits below the known value, which need fewer labels."""
        hope = self.bound
        while best.value > max(hope * self.effort.near, self.bound * (1 + gap) + self.dust):
            if self.effort.out_of_time():
                break
            self._narrow_down(best.value)
            hope = max(hope, self.bound)
            middle = float(np.sqrt(hope * best.value)) if hope > 0 else best.value / 2
            better, _ = self._sweep(middle, self.effort.narrow)
            best, hope = (better, hope) if better else (best, middle)
        return best

    def _narrow_down(self, value: float) -> None:
        """Drop the options that no plan of that value can use, and find multipliers for the rest."""
        least = self._least_goodput_per_s(value) * (1 - SAME)
        usable = fixed(self.options, self.cuts[-1], value * (1 + SAME) + self.dust)
        counts = self.valuation.counts
        fewer = [each.only(np.ceil(each.load_s.min(0) * least) <= counts[each.kind]) for each in usable]
        if sum(map(len, fewer)) < self.effort.fewer * sum(map(len, self.options)):
            self.options = fewer
            fastest_s = self.goal.least_seconds_per_input(self.bound)
            self.at_s = max(self.at_s, fastest_s)
            relaxation = self.relaxed(self.effort.ascent_steps // 2)
            cuts, self.fastest = self.goal.cuts(relaxation)[-self.effort.cuts :], relaxation.fastest()
            self.cuts = cuts if cuts[-1].bound > self.bound else self.cuts

    def _proof(
        self, value: float, gap: float, width: int, effort: Effort | None = None
    ) -> tuple[ValuedPlan | None, float]:
        """Search all better plans if `width` partial plans are enough: the best of them, and a bound."""
        return self._sweep(value / (1 + gap) * (1 - SAME), width, proof=True, effort=effort)

    def _sweep(
        self, limit: float, width: int, proof: bool = False, effort: Effort | None = None
    ) -> tuple[ValuedPlan | None, float]:
        """The best plan below `limit` among those that the labels lead to, and a bound on all others."""
        sweep = LabelSweep(
            fixed(self.options, self.cuts[-1], limit), self.columns, self.valuation.counts, (*self.cuts, self.fastest),
            (*[limit] * len(self.cuts), self.objective.budget_s * (1 + SAME)), self._spacings_s(limit),
            self._least_goodput_per_s(limit), self.valuation.prices,
            min(self.valuation.allowed, self.goal.most_dollars(limit)), width, proof, effort or self.effort,
        )  # fmt: skip
        best = self._pick(sweep, sweep.run(), limit)
        return best, min(sweep.dropped, best.value if best else limit)

    def _pick(self, sweep: LabelSweep, labels: LabelSet, limit: float) -> ValuedPlan | None:
        best: Staffing | None = None
        chosen = -1
        bounds = sweep.bounds(labels)
        for row in np.argsort(bounds, kind="stable"):
            if best and bounds[row] >= best.value:
                break
            below = limit if best is None else best.value
            times = float(labels.work[row]), float(labels.arrivals[row])
            if staffing := self.valuation.staffed(labels.loads[row], *times, below):
                best, chosen = staffing, int(row)
        return ValuedPlan(best.value, self._plan(sweep, labels, chosen, best)) if best else None

    def _value_of(self, path: Path) -> float:
        """The value of a cheapest path, which has loads by kind but no columns."""
        if np.isfinite(self.columns.capacity).any():
            return np.inf
        staffing = self.valuation.staffed(path.loads, path.work, path.arrivals)
        return staffing.value if staffing else np.inf

    def _plan(self, sweep: LabelSweep, labels: LabelSet, row: int, staffing: Staffing) -> Plan:
        """The plan of a finished label, traced back to the first block."""
        splits: dict[int, list[Split]] = {}
        while labels.origin[row] >= 0:
            origin, option = int(labels.origin[row]), int(labels.option[row])
            its = sweep.options[origin]
            stop, batch, inner = int(its.stop[option]), int(its.batch[option]), bool(its.inner[option])
            split = split_with_ramps(self.facts, its.start, stop, batch, inner)
            splits.setdefault(int(labels.column[row]), []).insert(0, split)
            labels, row = sweep.by_block[origin], int(labels.parent[row])
        placements = [
            Placement(self.facts.devices[self.columns.kind[column]].kind, staffing.replicas[column], tuple(its_splits))
            for column, its_splits in splits.items()
        ]
        return Plan(tuple(sorted(placements, key=lambda placement: placement.splits[0].start)))

    def _least_goodput_per_s(self, limit: float) -> float:
        """The least goodput of any plan that keeps the objective at a value up to `limit`."""
        return max(self.objective.goodput_per_s, self.goal.least_goodput_per_s(limit))

    def _spacings_s(self, limit: float) -> list[float]:
        """The least and the most seconds per input: latency is linear in between, so comparing at both is enough."""
        if not self.timed:
            return []
        floor = self.objective.goodput_per_s
        slowest = [self.goal.most_seconds_per_input(limit), *([1 / floor] if floor else [])]
        # Every batch waits for at least one input, so seconds per input may not exceed the budget.
        high = max(min(*slowest, self.objective.budget_s, NEVER_S), self.at_s)
        return sorted({self.at_s, high})


def _columns(builder: Builder, most: int) -> PlacementColumns:
    """One placement for a kind that holds the whole network, several for others."""
    kinds, capacity = [], []
    for kind, device in enumerate(builder.facts.devices):
        holds_any_cut = bool(builder.memory.holds_any_cut[kind])
        count = 1 if holds_any_cut else min(device.count, builder.facts.num_blocks, most)
        kinds += [kind] * count
        capacity += [np.inf if holds_any_cut else float(device.memory_bytes)] * count
    return PlacementColumns(np.array(kinds), np.array(capacity))
