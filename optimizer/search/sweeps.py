"""The order of sweeps: find multipliers, find a good plan by narrow sweeps, then prove it best by a full one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from optimizer.effort import EFFORT, LAST_BITS, SAME, Effort
from optimizer.model.valuation import Staffing, Valuation
from optimizer.objective import Objective
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem, split_with_ramps
from optimizer.search.bounds import Path, fixed
from optimizer.search.labels import LabelSet, LabelSweep, PlacementColumns
from optimizer.search.local import Chain, Floats, LocalSearch
from optimizer.search.multipliers import Relaxation
from optimizer.search.options import Builder, Options

NEVER_S = 1e9  # longer than any plan is asked to take


@dataclass(frozen=True)
class Found:
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
        least = Relaxation(self.options, self.valuation, 0.0, effort=effort).evenly().bound
        self.at_s = least if np.isfinite(least) else 0.0
        relaxation = Relaxation(self.options, self.valuation, self.at_s, effort=effort)
        self.fastest, self.cuts, self.known = relaxation.fastest(), [relaxation.first_bound()], np.inf
        self.dust = LAST_BITS * relaxation.scale  # values this close are equal

    @property
    def bound(self) -> float:
        """A lower bound on the value of every plan."""
        hopeless = self.fastest.bound > self.objective.budget_s * (1 + SAME)
        return np.inf if hopeless else self.cuts[-1].bound

    def tighten(self, enough: float, steps: int) -> None:
        """Find multipliers with tight bounds, as far as they may help, and keep the best plan met on the way."""
        relaxation = Relaxation(self.options, self.valuation, self.at_s, steps=steps, enough=enough, effort=self.effort)
        self.cuts = relaxation.cuts()[-self.effort.cuts :]
        self.known = min(map(self._value_of, relaxation.paths), default=np.inf)

    def best(self, value: float, gap: float, prove: bool = True) -> tuple[Found | None, float]:
        """A plan better than `value` if there is one, and a bound on all plans.

        Without `prove` only narrow sweeps run: the plan may not be the best, and the bound is that of the cuts.
        """
        if self.bound >= value:
            return None, self.bound
        nothing_known = not np.isfinite(value)
        self.tighten(value, self.effort.ascent_steps if prove else self.effort.ascent_steps // 3)
        if self.bound >= value:
            return None, self.bound
        found = self._first(value, (self.effort.narrow, self.effort.wide) if prove else (self.effort.narrow,))
        if found is None and np.isfinite(self.known):
            value = min(value, self.known * (1 + 2 * SAME) + self.dust)  # the multipliers' search met such a plan
        if found:
            value = found.value
            if prove and value > self.bound * (1 + gap) + self.dust:
                better, bound = self._proof(value, gap, self.effort.wide)
                found = better or found
                if bound >= min(found.value, value / (1 + gap) * (1 - 2 * SAME)):
                    return found, bound
            found = self._closer(found, gap)
            value = found.value
        if value <= self.bound * (1 + gap) + self.dust or not prove:
            return found, self.bound
        effort = self.effort.patient if nothing_known and found is None else self.effort
        while better := self._sweep(value / self.effort.near, self.effort.wide, effort=effort)[0]:
            found = self._closer(better, gap)
            value = found.value
        better, bound = self._proof(value, gap, self.effort.full, effort)
        return better or found, max(bound, self.bound)

    def local(self, value: float) -> Found | None:
        """A plan better than `value` that runs the whole network in a local placement on every device of one kind."""
        found = None
        for kind in range(len(self.facts.devices)):

            def values(loads: Floats, arrivals: float, first: Floats, kind: int = kind) -> Floats:
                return self.valuation.of_one_placement(kind, loads, arrivals * loads, 2 * first - 1)

            value, chain = LocalSearch(self.builder, kind).best(values, value)
            found = self._local_plan(kind, chain, value) if chain else found
        return found

    def _local_plan(self, kind: int, chain: Chain, value: float) -> Found:
        loads, first = np.zeros(len(self.valuation.kind_of)), chain.splits[0][1]
        column = self.valuation.kind_of.index(kind)
        loads[column] = chain.load_s
        staffing = self.valuation.staffed(loads, chain.work_s, 2 * first - 1)
        assert staffing, "This is a bug: a local placement that was found feasible is not."
        starts = (0, *(stop for stop, _ in chain.splits))
        splits = [
            split_with_ramps(self.facts, start, stop, batch, inner=False)
            for start, (stop, batch) in zip(starts, chain.splits, strict=False)
        ]
        placement = Placement(self.facts.devices[kind].kind, staffing.replicas[column], tuple(splits), local=True)
        return Found(value, Plan((placement,)))

    def _first(self, value: float, widths: tuple[int, ...]) -> Found | None:
        """A good plan, by sweeps that keep few labels: the lower the limit, the fewer are needed."""
        limits = (
            [self.known]
            if np.isfinite(self.known)
            else [max(self.bound, 0.0) * wider for wider in self.effort.first_limits]
        )
        for limit, width in product([*(each for each in limits if each < value), value], widths):
            found, _ = self._sweep(limit * (1 + SAME) + self.dust, width, effort=self.effort.patient)
            if found:
                return found
        return None

    def _closer(self, found: Found, gap: float) -> Found:
        """Look for a better plan by narrow sweeps with limits below the known value, as those need fewer labels."""
        hope = self.bound
        while found.value > max(hope * self.effort.near, self.bound * (1 + gap) + self.dust):
            if self.effort.out_of_time():
                break
            self._narrow_down(found.value)
            hope = max(hope, self.bound)
            middle = float(np.sqrt(hope * found.value)) if hope > 0 else found.value / 2
            better, _ = self._sweep(middle, self.effort.narrow)
            found, hope = (better, hope) if better else (found, middle)
        return found

    def _narrow_down(self, value: float) -> None:
        """Leave out what no plan of that value can use, and find multipliers for the rest."""
        least = self._least_goodput_per_s(value) * (1 - SAME)
        kept = fixed(self.options, self.cuts[-1], value * (1 + SAME) + self.dust)
        counts = self.valuation.counts
        fewer = [each.only(np.ceil(each.load_s.min(0) * least) <= counts[each.kind]) for each in kept]
        if sum(map(len, fewer)) < self.effort.fewer * sum(map(len, self.options)):
            self.options = fewer
            fastest_s = self.goal.least_seconds_per_input(self.bound)
            self.at_s = max(self.at_s, fastest_s)
            relaxation = Relaxation(
                fewer, self.valuation, self.at_s, steps=self.effort.ascent_steps // 2, effort=self.effort
            )
            cuts, self.fastest = relaxation.cuts()[-self.effort.cuts :], relaxation.fastest()
            self.cuts = cuts if cuts[-1].bound > self.bound else self.cuts

    def _proof(self, value: float, gap: float, width: int, effort: Effort | None = None) -> tuple[Found | None, float]:
        """Search all better plans if `width` partial plans suffice: the best of them, and a bound."""
        return self._sweep(value / (1 + gap) * (1 - SAME), width, proof=True, effort=effort)

    def _sweep(
        self, limit: float, width: int, proof: bool = False, effort: Effort | None = None
    ) -> tuple[Found | None, float]:
        """The best plan below `limit` among those that the labels lead to, and a bound on those they do not."""
        sweep = LabelSweep(
            fixed(self.options, self.cuts[-1], limit), self.columns, self.valuation.counts, (*self.cuts, self.fastest),
            (*[limit] * len(self.cuts), self.objective.budget_s * (1 + SAME)), self._spacings_s(limit),
            self._least_goodput_per_s(limit), width, proof, effort or self.effort,
        )  # fmt: skip
        found = self._pick(sweep, sweep.run(), limit)
        return found, min(sweep.dropped, found.value if found else limit)

    def _pick(self, sweep: LabelSweep, labels: LabelSet, limit: float) -> Found | None:
        """The best finished label."""
        best: Staffing | None = None
        chosen = -1
        bounds = sweep.bounds(labels)
        for row in np.argsort(bounds, kind="stable"):
            if best and bounds[row] >= best.value:
                break
            staffing = self._staffed(labels, row, limit if best is None else best.value)
            if staffing:
                best, chosen = staffing, int(row)
        return Found(best.value, self._plan(sweep, labels, chosen, best)) if best else None

    def _staffed(self, labels: LabelSet, row: int, best: float) -> Staffing | None:
        times = (float(labels.work[row]), float(labels.arrivals[row]))
        return self.valuation.staffed(labels.loads[row], *times, best)

    def _value_of(self, path: Path) -> float:
        """The value of a cheapest path, which has loads by kind but no columns."""
        if np.isfinite(self.columns.capacity).any():
            return np.inf
        staffing = self.valuation.staffed(path.loads, path.work, path.arrivals)
        return staffing.value if staffing else np.inf

    def _plan(self, sweep: LabelSweep, labels: LabelSet, row: int, staffing: Staffing) -> Plan:
        """The plan of a finished label, read back from it to the first block."""
        splits: dict[int, list[Split]] = {}
        while labels.origin[row] >= 0:
            origin, option = int(labels.origin[row]), int(labels.option[row])
            splits.setdefault(int(labels.column[row]), []).insert(0, self._split(sweep.options[origin], option))
            labels, row = sweep.by_block[origin], int(labels.parent[row])
        placements = [
            Placement(self.facts.devices[self.columns.kind[column]].kind, staffing.replicas[column], tuple(here))
            for column, here in splits.items()
        ]
        return Plan(tuple(sorted(placements, key=lambda placement: placement.splits[0].start)))

    def _split(self, options: Options, row: int) -> Split:
        return split_with_ramps(
            self.facts, options.start, int(options.stop[row]), int(options.batch[row]), bool(options.inner[row])
        )

    def _least_goodput_per_s(self, limit: float) -> float:
        """The least goodput of any plan that keeps the objective at a value up to `limit`."""
        return max(self.objective.goodput_per_s, self.goal.least_goodput_per_s(limit))

    def _spacings_s(self, limit: float) -> list[float]:
        """The least and the most: latency is linear between, so what is no larger at both is no larger anywhere."""
        if not self.timed:
            return []
        floor = self.objective.goodput_per_s
        slowest = [self.goal.most_seconds_per_input(limit), *([1 / floor] if floor else [])]
        # Every batch waits for at least one input, so seconds per input above the budget break it.
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
