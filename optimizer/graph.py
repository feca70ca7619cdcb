"""The search of one graph: prices, then a narrow sweep for a good plan, then a full one that proves it the best."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from optimizer.bounds import ROUNDS, Path, Rates, fixed
from optimizer.goals import Outcome, Worth
from optimizer.labels import Columns, Labels, Search
from optimizer.objective import Objective
from optimizer.options import Builder, Options
from optimizer.plan import Placement, Plan, Split
from optimizer.prices import Pricing
from optimizer.problem import Problem, named
from optimizer.rounds import Chain, Floats, Rounds

BEAM = 48  # labels per block of the narrow sweep
WIDE = 300  # of wider ones, as long as they help
MOST = 2_000  # of the full one: a problem that needs more is answered, with a gap
GROUPS = 16  # placements on one kind too small for the whole network
CUTS = 6  # the tightest are used
WIDER = (1.02, 1.2, 2.0, 4.0)  # how far above the bound to look for a first plan
NEVER_S = 1e9
ENOUGH = 1.003  # hope and plan this close: time for the proof
SPARED = 0.8  # prices are found anew when so few of the options are left
CLOSE = 1e-9


@dataclass(frozen=True)
class Found:
    value: float
    plan: Plan


class Graph:
    """All plans of one problem for one objective."""

    def __init__(self, facts: Problem, objective: Objective) -> None:
        self.facts, self.objective = facts, objective
        self.timed = objective.slo_s is not None or objective.goal == "latency"
        self.builder = builder = Builder(facts, objective.max_batch, objective.budget_s, self.timed)
        self.columns = _columns(builder)
        self.worth = Worth(facts, objective, tuple(int(kind) for kind in self.columns.kind))
        self.options: Sequence[Options] = builder.options()
        still = Pricing(self.options, self.worth, Rates(0.0, 0.0))
        least = still.lightest().bound
        self.at = self._rates(least if np.isfinite(least) else 0.0)
        pricing = Pricing(self.options, self.worth, self.at)
        self.fastest, self.cuts, self.known = pricing.fastest(), [pricing.relaxed()], np.inf
        self.dust = 1e-12 * pricing.scale  # values this close are one

    @property
    def bound(self) -> float:
        """No plan has a smaller value."""
        hopeless = self.fastest.bound > self.objective.budget_s * (1 + CLOSE)
        return np.inf if hopeless else self.cuts[-1].bound

    def price(self, enough: float, rounds: int = ROUNDS) -> None:
        """Tight bounds, as far as they may help, and the value of the best plan that was met on the way."""
        pricing = Pricing(self.options, self.worth, self.at, rounds=rounds, enough=enough)
        self.cuts = pricing.cuts()[-CUTS:]
        self.known = min(map(self._value_of, pricing.paths), default=np.inf)

    def best(self, value: float, gap: float, prove: bool = True) -> tuple[Found | None, float]:
        """A plan better than `value` if there is one, and a bound on the plans of this graph.

        Without `prove`, narrow sweeps have to do: the plan may not be the best, and the bound is that of the prices.
        """
        if self.bound >= value:
            return None, self.bound
        self.price(value, ROUNDS if prove else ROUNDS // 3)
        if self.bound >= value:
            return None, self.bound
        found = self._first(value, (BEAM, WIDE) if prove else (BEAM,))
        if found is None and np.isfinite(self.known):
            value = min(value, self.known * (1 + 2 * CLOSE) + self.dust)  # such a plan was met
        if found:
            value = found.value
            if prove and value > self.bound * (1 + gap) + self.dust:
                better, bound = self._proof(value, gap, WIDE)
                found = better or found
                if bound >= min(found.value, value / (1 + gap) * (1 - 2 * CLOSE)):
                    return found, bound
            found = self._closer(found, gap)
            value = found.value
        if value <= self.bound * (1 + gap) + self.dust or not prove:
            return found, self.bound
        while better := self._sweep(value / ENOUGH, WIDE)[0]:
            found = self._closer(better, gap)
            value = found.value
        better, bound = self._proof(value, gap, MOST)
        return better or found, max(bound, self.bound)

    def local(self, value: float) -> Found | None:
        """A plan better than `value` that runs the whole network in rounds on every device of one kind."""
        found = None
        for kind in range(len(self.facts.devices)):
            rounds = Rounds(self.builder, kind)

            def worth(loads: Floats, arrivals: float, first: Floats, kind: int = kind) -> Floats:
                return self.worth.alone(kind, loads, arrivals * loads, first - 1, first)

            value, chain = rounds.best(worth, value)
            found = self._in_rounds(kind, chain, value) if chain else found
        return found

    def _in_rounds(self, kind: int, chain: Chain, value: float) -> Found:
        loads, first = np.zeros(len(self.worth.kind_of)), chain.splits[0][1]
        column = self.worth.kind_of.index(kind)
        loads[column] = chain.load_s
        outcome = self.worth.outcome(loads, chain.work_s, first - 1, first)
        assert outcome, "This is a bug: rounds that were found feasible are not."
        starts = (0, *(stop for stop, _ in chain.splits))
        splits = [
            named(self.facts, start, stop, batch, inner=False)
            for start, (stop, batch) in zip(starts, chain.splits, strict=False)
        ]
        placement = Placement(self.facts.devices[kind].kind, outcome.replicas[column], tuple(splits), local=True)
        return Found(value, Plan((placement,)))

    def _first(self, value: float, widths: tuple[int, ...]) -> Found | None:
        """A good plan, by sweeps that keep few labels: the lower the limit, the fewer are needed."""
        limits = [self.known] if np.isfinite(self.known) else [max(self.bound, 0.0) * wider for wider in WIDER]
        for limit, width in product([*(each for each in limits if each < value), value], widths):
            found, _ = self._sweep(limit * (1 + CLOSE) + self.dust, width)
            if found:
                return found
        return None

    def _closer(self, found: Found, gap: float) -> Found:
        """A better plan, by narrow sweeps between what is hoped for and what is known: a lower limit spares labels."""
        hope = self.bound
        while found.value > max(hope * ENOUGH, self.bound * (1 + gap) + self.dust):
            self._tighten(found.value)
            hope = max(hope, self.bound)
            middle = float(np.sqrt(hope * found.value)) if hope > 0 else found.value / 2
            better, _ = self._sweep(middle, BEAM)
            found, hope = (better, hope) if better else (found, middle)
        return found

    def _tighten(self, value: float) -> None:
        """Leave out what no plan of that value can use, and price the rest anew."""
        least = self._least_pace(value) * (1 - CLOSE)
        kept = fixed(self.options, self.cuts[-1], value * (1 + CLOSE) + self.dust)
        counts = self.worth.counts
        fewer = [each.only(np.ceil(each.load_s.min(0) * least) <= counts[each.kind]) for each in kept]
        if sum(map(len, fewer)) < SPARED * sum(map(len, self.options)):
            self.options = fewer
            if self.objective.goal == "goodput":
                self.at = self._rates(max(self.at.pace_s, self.bound))
            pricing = Pricing(fewer, self.worth, self.at, rounds=ROUNDS // 2)
            cuts, self.fastest = pricing.cuts()[-CUTS:], pricing.fastest()
            self.cuts = cuts if cuts[-1].bound > self.bound else self.cuts

    def _proof(self, value: float, gap: float, width: int) -> tuple[Found | None, float]:
        """All plans that are better, if so few partial plans do: the best of them, and a bound."""
        return self._sweep(value / (1 + gap) * (1 - CLOSE), width, proof=True)

    def _sweep(self, limit: float, width: int, proof: bool = False) -> tuple[Found | None, float]:
        """The best plan below `limit` among those that the labels lead to, and a bound on those they do not."""
        sweep = Search(
            fixed(self.options, self.cuts[-1], limit), self.columns, self.worth.counts, (*self.cuts, self.fastest),
            (*[limit] * len(self.cuts), self.objective.budget_s * (1 + CLOSE)), self._paces(limit),
            self._least_pace(limit), width, proof,
        )  # fmt: skip
        found = self._pick(sweep, sweep.run(), limit)
        return found, min(sweep.dropped, found.value if found else limit)

    def _pick(self, sweep: Search, labels: Labels, limit: float) -> Found | None:
        """The best finished label."""
        best: Outcome | None = None
        chosen = -1
        bounds = sweep.bounds(labels)
        for row in np.argsort(bounds, kind="stable"):
            if best and bounds[row] >= best.value:
                break
            outcome = self._outcome(labels, row, limit if best is None else best.value)
            if outcome:
                best, chosen = outcome, int(row)
        return Found(best.value, self._plan(sweep, labels, chosen, best)) if best else None

    def _outcome(self, labels: Labels, row: int, best: float) -> Outcome | None:
        times = (float(labels.work[row]), float(labels.fill[row]), float(labels.wait[row]))
        return self.worth.outcome(labels.loads[row], *times, best)

    def _value_of(self, path: Path) -> float:
        """Of a cheapest path, which knows kinds but no columns."""
        if np.isfinite(self.columns.capacity).any():
            return np.inf
        outcome = self.worth.outcome(path.loads, path.work, path.fill, path.wait)
        return outcome.value if outcome else np.inf

    def _plan(self, sweep: Search, labels: Labels, row: int, outcome: Outcome) -> Plan:
        """Back from the last label to the first block."""
        splits: dict[int, list[Split]] = {}
        while labels.origin[row] >= 0:
            origin, option = int(labels.origin[row]), int(labels.option[row])
            splits.setdefault(int(labels.column[row]), []).insert(0, self._split(sweep.options[origin], option))
            labels, row = sweep.by_block[origin], int(labels.parent[row])
        placements = [
            Placement(self.facts.devices[self.columns.kind[column]].kind, outcome.replicas[column], tuple(here))
            for column, here in splits.items()
        ]
        return Plan(tuple(sorted(placements, key=lambda placement: placement.splits[0].start)))

    def _split(self, options: Options, row: int) -> Split:
        return named(
            self.facts, options.start, int(options.stop[row]), int(options.batch[row]), bool(options.inner[row])
        )

    def _rates(self, seconds: float) -> Rates:
        """At a pace of so many seconds per input."""
        return Rates(max(seconds, 1 / self.worth.wanted), seconds)

    def _least_pace(self, limit: float) -> float:
        floor = self.objective.goodput_per_s
        return max(floor, 1 / limit) if self.objective.goal == "goodput" else floor

    def _paces(self, limit: float) -> list[Rates]:
        """Latency is linear in the seconds per input between these: no larger at all of them, no larger anywhere."""
        if not self.timed:
            return []
        goal, floor = self.objective.goal, self.objective.goodput_per_s
        slowest = [limit] if goal in ("goodput", "latency") else []
        slowest += [1 / floor] if floor else []
        # At least one input waits in every batch, so that a slower pace than this breaks any budget.
        high = max(min(*slowest, self.objective.budget_s, NEVER_S), self.at.pace_s)
        bend = float(np.clip(1 / self.worth.wanted, self.at.pace_s, high))
        return [self._rates(seconds) for seconds in sorted({self.at.pace_s, bend, high})]


def _columns(builder: Builder) -> Columns:
    """One placement for a kind that holds the whole network, several for others."""
    kinds, capacity = [], []
    for kind, device in enumerate(builder.facts.devices):
        roomy = bool(builder.room.roomy[kind])
        count = 1 if roomy else min(device.count, builder.facts.num_blocks, GROUPS)
        kinds += [kind] * count
        capacity += [np.inf if roomy else float(device.memory_bytes)] * count
    return Columns(np.array(kinds), np.array(capacity))
