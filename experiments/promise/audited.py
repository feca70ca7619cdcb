"""Measures the cost of audits, and the time until a broken promise is kept again, in virtual time.

The dispatcher and the controller are the product's. Inputs are rows of an exit table. With the thresholds of `isobatch
prepare`, a small share of them, the *misfits*, leave with an answer that is not the full network's. Inputs drift when
misfits become more frequent.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.promise.greedy import greedy
from experiments.promise.plans import fleet_of
from experiments.promise.tried import drawn
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.promise_keeper import PromiseKeeper
from isobatch.cluster.controller.rehearsal import Replanned, replan
from isobatch.cluster.load.workloads import arrivals, exit_blocks
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Chunk, World, simulate
from isobatch.cluster.simulator.table_devices import TableDevices
from isobatch.deployments.dispatch.messages import Launch, Limits, Place
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer import Objective, Plan, optimize
from isobatch.optimizer.plan import opened
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.losses import Floats, Indices

SLO_S, MAX_BATCH = 0.1, 32
SHARE, COST = 0.02, 0.01  # the product's own settings of audits
PROMISED = 0.99
DRAWS = 9  # of the rows behind the thresholds
RATE_PER_S, SOUND_S, DRIFTED_S, DRIFTED = 1000.0, 60.0, 60.0, 0.05
LOOK_S, LOOKS = 5.0, 24  # the time between looks, and the looks of a window
WINDOW_S, DAY_S = LOOK_S * LOOKS, 8 * 3600.0


class RecordedDevices(TableDevices):
    """Devices on which an input is a row of an exit table, and leaves by the thresholds of its launch."""

    def __init__(self, *chosen_now: Any, table: ExitTable, evidence: Evidence, prepared: Indices) -> None:
        self._table, self._evidence, self._prepared = table, evidence, prepared
        self._chosen: dict[object, Indices] = {}
        super().__init__(*chosen_now)

    def _leaving(self, places: Sequence[Place], inside: Sequence[int], stop: int, launch: Launch) -> list[int]:
        if stop == self.facts.num_blocks:
            return list(inside)
        candidate, first = self._candidates(launch)[stop - 1], self._table.first[stop - 1]
        return [row for row in inside if first[places[row].row - 1] <= candidate]

    def _answers(self, places: Sequence[Place], rows: Sequence[int], stop: int) -> list[object]:
        row_labels = self._table.labels[stop - 1]
        return [int(row_labels[places[row].row - 1]) for row in rows]

    def _candidates(self, launch: Launch) -> Indices:
        thresholds = launch.ramps if isinstance(launch.ramps, Mapping) else {}
        key = tuple(thresholds.items())
        if key not in self._chosen:
            chosen_now = self._evidence.nearest({ramp: each for ramp, each in thresholds.items() if each is not None})
            own = [ramp for ramp in range(len(self._prepared)) if thresholds.get(ramp) is None]
            chosen_now[own] = self._prepared[own]
            self._chosen[key] = chosen_now
        return self._chosen[key]


def watched(what: str, recording: str) -> dict[str, float]:
    """The figures of "costs" of audits, of a "mended" promise, or of a "day" of drift under the controller."""
    match what:
        case "costs":
            return dict(audit_costs())
        case "mended":
            return dict(mended([Setting.drawn(recording, seed) for seed in range(DRAWS)]))
        case _:
            return dict(day(Setting.drawn(recording, 0)))


@dataclass(frozen=True)
class Fit:
    """A table's rows, and whether these candidates answer them as the full network."""

    table: ExitTable
    chosen: Indices
    _places: dict[bytes, Indices] = field(default_factory=dict, repr=False)

    def places(self, chosen: Indices) -> Indices:
        """Where the inputs leave with these candidates; kept, since every look needs it."""
        key = chosen.tobytes()
        if key not in self._places:
            self._places[key] = self.table.places(chosen)
        return self._places[key]

    def off(self, chosen: Indices) -> NDArray[np.bool_]:
        """Marks the inputs whose answer is not the full network's."""
        row_labels: NDArray[np.bool_] = self.table.answers(self.places(chosen)) != self.table.labels[-1]
        return row_labels

    @property
    def usual(self) -> float:
        """The share of misfits."""
        return float(self.off(self.chosen).mean())

    def drawn(self, shares: Floats, random: np.random.Generator) -> Indices:
        """A row for each input, which is a misfit with this probability."""
        off, count = self.off(self.chosen), len(shares)
        misfits, others = (random.choice(np.flatnonzero(of), count) for of in (off, ~off))
        return np.where(random.uniform(size=count) < shares, misfits, others)

    def disagreement(self, chosen: Indices, misfits: float) -> float:
        """The share of answers that are not the full network's, if this share of the inputs are misfits."""
        off, is_misfit = self.off(chosen), self.off(self.chosen)
        return float(misfits * off[is_misfit].mean() + (1 - misfits) * off[~is_misfit].mean())


def audit_costs() -> Iterator[tuple[str, float]]:
    """Goodput and p99 with audits over those without, on four V100 by their datasheet."""
    served = fleet_of("sst2")
    kinds, exits = fleet(served.devices), ExitProfile((1.0, 0.8, 0.55, 0.4, 0.3, 0.25))
    links, objective = links_between(kinds), Objective(slo_s=SLO_S, max_batch=MAX_BATCH)
    plan = optimize(replace(served.profile, exits=exits), kinds, links, objective)
    facts = served.facts().surviving(exits.survival)
    assert plan.promise

    def run(load: float, share: float) -> Report:
        limits = Limits(audit_share=share, audit_cost=COST)
        rate, seconds = load * plan.promise.goodput_per_s, 15.0  # type: ignore[union-attr]
        times_s = arrivals("poisson", rate, seconds, 0)
        blocks = exit_blocks(exits, len(times_s), np.random.default_rng(1))
        return simulate(World(plan, facts, SLO_S, limits), [(times_s, blocks)], seconds)

    normal, usual = run(0.7, SHARE), run(0.7, 0.0)
    crowded, crowd = run(1.1, SHARE), run(1.1, 0.0)
    yield "audit_goodput_ratio", min(normal.good / usual.good, crowded.good / crowd.good)
    yield "audit_p99_ratio", normal.tally.quantile_s(0.99) / usual.tally.quantile_s(0.99)


@dataclass(frozen=True)
class Setting:
    """The demo's fleet, its plan for the thresholds of `isobatch prepare`, and inputs that these have not seen."""

    evidence: Evidence
    others: ExitTable
    problem: ClassifierPlanningProblem
    plan: Plan

    @classmethod
    def drawn(cls, recording: str, seed: int) -> "Setting":
        evidence, others = drawn("demo", recording, "agreement", seed)
        served, survival = fleet_of("demo"), evidence.survival(evidence.prepared)
        profile, kinds = replace(served.profile, exits=ExitProfile(survival)), tuple(fleet(served.devices))
        problem = ClassifierPlanningProblem(
            profile, kinds, Objective(slo_s=SLO_S, max_batch=MAX_BATCH), one_machine=True
        )
        return cls(evidence, others.known, problem, problem.best(survival, Corrections(), {}))

    @property
    def prepared(self) -> dict[int, float]:
        """The thresholds of the checkpoint."""
        return dict(self.evidence.thresholds(self.evidence.prepared, range(self.others.num_ramps)))

    def chosen(self, plan: Plan) -> Indices:
        """The candidates at the open ramps of a plan; other ramps are closed."""
        chosen_now = self.prepared | dict(plan.thresholds)
        return self.evidence.nearest({ramp: chosen_now[ramp] for ramp in opened(plan)})

    @cached_property
    def fit(self) -> Fit:
        return Fit(self.others, self.chosen(self.plan))

    def run(self, rate_per_s: float, seconds: float, misfits: Callable[[Floats], Floats]) -> Replanned:
        """A run under a controller that keeps the promise; `misfits`: their share by time."""
        keeper = PromiseKeeper(PROMISED, self.evidence, self.prepared, least_gain=9.0)
        random, fit = np.random.default_rng(0), self.fit

        def inputs() -> Iterator[Chunk]:
            times_s = arrivals("poisson", rate_per_s, seconds, 0)
            for some in np.array_split(times_s, max(1, len(times_s) >> 16)):
                yield some, fit.drawn(misfits(some), random)

        facts = self.problem.facts(self.evidence.survival(self.evidence.prepared), Corrections())
        world = World(self.plan, facts, SLO_S, Limits(audit_share=SHARE, audit_cost=COST))
        devices = partial(RecordedDevices, table=self.others, evidence=self.evidence, prepared=self.evidence.prepared)
        patience = Patience(look_every_s=LOOK_S)
        return replan(world, self.problem, inputs(), seconds, patience=patience, keeper=keeper, devices=devices)


def mended(settings: Sequence[Setting]) -> Iterator[tuple[str, float]]:
    """The time from a drift until the promise is kept again: the median, and the share of draws in which it is."""
    times_s = list(map(_mended_s, settings))
    yield "drift_tightened_s", median(times_s)
    yield "drift_mended_share", float(np.isfinite(times_s).mean())


def _mended_s(setting: Setting) -> float:
    """Seconds from a drift to 5 % disagreement until it is at most 1 % again; infinite if it is not."""
    fit = setting.fit

    def misfits(times_s: Floats) -> Floats:
        return np.where(times_s < SOUND_S, fit.usual, DRIFTED)

    ran = setting.run(RATE_PER_S, SOUND_S + DRIFTED_S, misfits)
    after = (
        at_s - SOUND_S
        for at_s, plan in ran.plans
        if at_s > SOUND_S and fit.disagreement(setting.chosen(plan), DRIFTED) <= 1 - PROMISED
    )
    return next(after, math.inf)


def day(setting: Setting) -> Iterator[tuple[str, float]]:
    """The share of windows with at most 1 % disagreement, on a day with a temporary drift.

    It has no dispatcher: the counts of each look are drawn at random, and all audits end.
    """
    fit = setting.fit
    ends_s: Floats = np.arange(1.0, round(DAY_S / LOOK_S) + 1) * LOOK_S
    # Misfits are as frequent as usual, except for a peak of 5 % in the middle fifth of the day.
    peak = np.clip(1 - np.abs(ends_s / DAY_S - 0.5) / 0.1, 0.0, 1.0)
    shares = np.asarray(fit.usual + (DRIFTED - fit.usual) * peak, np.float64)
    looks = list(_kept(setting, ends_s, shares))
    middle = shares[LOOKS // 2 :: LOOKS]
    lost, depth = greedy(fit, middle)
    yield "windows_kept_share", _kept_share([off for off, _ in looks])
    yield "windows_kept_share_fixed", _kept_share([fit.disagreement(fit.chosen, share) for share in shares])
    yield "windows_kept_share_apparate", float(np.mean([each <= 1 - PROMISED for each in lost]))
    yield "day_depth", float(np.mean([each for _, each in looks]))
    yield "day_depth_fixed", float(np.mean([_depth(fit, fit.chosen, share) for share in shares]))
    yield "day_depth_apparate", depth


def _kept_share(disagreements: Sequence[float]) -> float:
    windows = np.array(disagreements).reshape(-1, LOOKS).mean(axis=1)
    return float(np.mean(windows <= 1 - PROMISED))


def _kept(setting: Setting, ends_s: Floats, shares: Floats) -> Iterator[tuple[float, float]]:
    """For each look, the disagreement and the depth."""
    fit, plan, random = setting.fit, setting.plan, np.random.default_rng(0)
    keeper = PromiseKeeper(PROMISED, setting.evidence, setting.prepared, least_gain=9.0)
    facts = setting.problem.facts(setting.evidence.survival(setting.evidence.prepared), Corrections())
    changed_s, tightened, count = 0.0, 0, round(RATE_PER_S * LOOK_S)
    for number, (now_s, share) in enumerate(zip(ends_s, shares, strict=True), 1):
        chosen = setting.chosen(plan)
        off, depth = fit.disagreement(chosen, float(share)), _depth(fit, chosen, float(share))
        seen = _seen(fit, chosen, fit.drawn(np.full(count, share), random), float(now_s), random)
        change = keeper.look(seen, plan, facts)
        if change is None and number % LOOKS == 0:
            change = keeper.window(seen, plan, facts, (now_s - changed_s) / WINDOW_S, tightened)
        if change:
            plan, changed_s = replace(plan, thresholds=change.thresholds), float(now_s)
            tightened += change.what == "tightened"
            keeper.restart()
        yield off, depth


def _seen(fit: Fit, chosen: Indices, rows: Indices, now_s: float, random: np.random.Generator) -> Observed:
    places, off = fit.places(chosen)[rows], fit.off(chosen)[rows]
    ended = (random.uniform(size=len(rows)) < SHARE) & (places < fit.table.num_ramps)
    exits, audited, missed = (
        tuple(np.bincount(some, minlength=fit.table.num_ramps + 1).tolist())
        for some in (places, places[ended], places[ended & off])
    )
    return Observed(now_s - LOOK_S, LOOK_S, len(rows), len(rows), exits, audited=audited, missed=missed)


def _depth(fit: Fit, chosen: Indices, misfits: float) -> float:
    """The mean share of the blocks that inputs run."""
    costs, is_misfit = fit.table.costs[fit.places(chosen)], fit.off(fit.chosen)
    return float(misfits * costs[is_misfit].mean() + (1 - misfits) * costs[~is_misfit].mean())
