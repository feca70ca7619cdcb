"""Chooses among plans by playing them: what the simulator sustains of a plan is what it promises.

The planner believes in sums of medians, in even spacing, and that every input must be able to go to the end. The
simulator plays bursts, queues, who leaves where and the product's own dispatcher. So the planner is asked for the best
plan within several limits of the latency that it believes in, above the SLO too, and what sustains most is taken; then
whatever is one move away from that and sustains more (optimizer/moves.py). How much is played is counted in inputs, not
in seconds: the same question has the same answer on any machine. `--polish` plays longer, for some seconds (`PATIENT`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, sqrt

from cluster.simulator.simulation import World
from cluster.simulator.sustained import IN_TIME_SHARE, SHORT_SLOS, SLOS, kept_run, run, settled, sustained
from optimizer.effort import MOST_GAP, never
from optimizer.model.evaluate import evaluate
from optimizer.moves import neighbours
from optimizer.objective import Objective
from optimizer.pipelines.baselines import baselines
from optimizer.pipelines.spread import joined
from optimizer.plan import Plan, Promise, SimulatedTimes
from optimizer.problem import Problem
from profiles.errors import UserError

Find = Callable[[Problem, Objective], Plan | None]
LIMITS = (1.0, 1.6, 0.65, 1.25, 2.2, 0.5, 0.85)  # of the latency that is believed in, as shares of the SLO
STEP = 0.01  # a plan is better if it sustains this share more
HOPE = 1.1  # a plan sustains at most so many times what its devices compute, as the planner counts it
ENOUGH = 20  # runs by which it is worth to begin
OTHER_SEED = 1  # the best of many is best by chance as well: other inputs decide in the end
LAST_SEED = 2  # of inputs by which nothing is chosen: they make the promise together with those
TOLD_SEED = 3  # of the inputs whose latencies are told at the promised rate
PASSED = 4  # plans that were the best for a while, and are played with other inputs too
SURELY = 0.05  # a plan that sustains less by this share is not


@dataclass(frozen=True)
class SimulationEffort:
    """How carefully plans are played. Runs have so many inputs at least, and last so many SLOs."""

    in_time: float = IN_TIME_SHARE  # of all inputs must be answered in time
    inputs: int = 5_000
    slos: float = 30
    last_inputs: int = 15_000  # of the runs by which the promise is made
    last_slos: float = 60
    most: float = 400_000  # inputs of all runs by which plans are chosen
    out_of_time: Callable[[], bool] = never

    @property
    def least_slos(self) -> float:
        """Shorter runs than this tell too little."""
        return min(self.slos, SHORT_SLOS)

    def affords(self, at_once: float) -> bool:
        """Whether there is enough to compare a plan with a few others, if so many inputs come within an SLO."""
        return ENOUGH * self.least_slos * at_once <= self.most

    def shortened(self, at_once: float) -> "SimulationEffort":
        """With runs that are short enough to compare a plan with a few others."""
        slos = max(self.least_slos, min(self.slos, self.most / (ENOUGH * at_once)))
        return replace(self, slos=slos, last_slos=self.last_slos * slos / self.slos)


CARE = SimulationEffort()
PATIENT = SimulationEffort(inputs=15_000, slos=SLOS, last_slos=SLOS, most=inf)  # the time is what ends it


@dataclass(frozen=True)
class SimulatedChoice:
    """The better plan, what the simulator sustains of both, and how many others were played.

    What the first one sustains is told by shorter runs where it is much worse.
    """

    plan: Plan
    before_per_s: float
    after_per_s: float
    tried: int

    @property
    def gain(self) -> float:
        return self.after_per_s / self.before_per_s - 1 if self.before_per_s else 0.0


@dataclass
class BestSoFar:
    """The best plan so far, and the rate that it sustains."""

    facts: Problem
    slo_s: float
    best: Plan
    care: SimulationEffort = CARE
    first_per_s: float = 0.0
    rate_per_s: float = 0.0
    tried: int = 0
    played: float = 0.0  # inputs
    _seen: set[Plan] = field(default_factory=set)
    _passed: list[Plan] = field(default_factory=list)  # that were the best for a while, the last one last

    def __post_init__(self) -> None:
        care = self.care
        found = sustained(self.best, self.facts, self.slo_s, care.inputs, slos=care.slos, in_time=care.in_time)
        self.first_per_s = self.rate_per_s = found.goodput_per_s
        self._seen.add(self.best)

    @property
    def over(self) -> bool:
        return self.played >= self.care.most or self.care.out_of_time()

    def through(self, plans: Iterator[Plan]) -> bool:
        """Play these until one is better, which then is the best so far."""
        for plan in plans:
            if self.over:
                return False
            if plan not in self._seen and evaluate(plan, self.facts).goodput_per_s * HOPE > self.rate_per_s:
                self._seen.add(plan)
                self.tried += 1
                if self._is_better(plan):
                    return True
        return False

    def _is_better(self, plan: Plan) -> bool:
        step, rate_per_s = STEP, self.rate_per_s or self._least(plan)
        while self._keeps(plan, rate_per_s * (1 + step)):
            if self.best is not plan:
                self._passed.append(self.best)
            self.best, self.rate_per_s = plan, rate_per_s * (1 + step)
            step *= 2
        return self.best is plan

    def _least(self, plan: Plan) -> float:
        """Where nothing is sustained so far, a tenth of what devices compute is worth a try."""
        return 0.1 * evaluate(plan, self.facts).goodput_per_s

    def _keeps(self, plan: Plan, rate_per_s: float) -> bool:
        """A short run refuses most at little cost; a long one decides."""
        world, care = self._world(plan), self.care
        lasting_s = (self.slo_s * min(care.slos, SHORT_SLOS), self.slo_s * care.slos)
        for inputs in sorted({max(care.inputs, int(seconds * rate_per_s)) for seconds in lasting_s}):
            self.played += inputs
            if kept_run(world, rate_per_s, inputs, 0, care.in_time) is None:
                return False
        return True

    def settled(self, planned: Plan, rivals: Iterable[Plan] = ()) -> SimulatedChoice:
        """Other inputs decide: if they show more of the first plan than of the best one, that stays.

        A rival that they show to be better takes its place, as does one that was the best before: chance may have
        spoken against it.
        """
        first, best = replace(planned, promise=None), self.best
        after_per_s = before_per_s = self._settled(best, self.rate_per_s)
        if best != first:
            worse = self.first_per_s * (1 + SURELY) < after_per_s
            before_per_s = self.first_per_s if worse else self._settled(first, self.first_per_s)
        if before_per_s > after_per_s:
            best, after_per_s = first, before_per_s
        passed = [plan for plan in reversed(self._passed) if plan != first]
        for rival in chain(passed[:PASSED], rivals):
            if self.care.out_of_time():
                break
            if rival not in (first, best) and (rival_per_s := self._above(rival, after_per_s)):
                best, after_per_s = rival, rival_per_s
        return self._promised(best, planned, before_per_s, after_per_s)

    def _promised(self, best: Plan, planned: Plan, before_per_s: float, after_per_s: float) -> SimulatedChoice:
        """The promise is the mean, by ratios, of what the inputs that decided show and what still others do."""
        last_per_s = self._settled(best, after_per_s, LAST_SEED) or after_per_s
        times = sqrt(last_per_s / after_per_s) if after_per_s else 1.0
        before_per_s, after_per_s = times * before_per_s, times * after_per_s
        plan = promising(best, planned, self.facts, after_per_s, self._times(best, after_per_s))
        return SimulatedChoice(plan, before_per_s, after_per_s, self.tried)

    def _times(self, plan: Plan, rate_per_s: float) -> SimulatedTimes | None:
        if not rate_per_s:
            return None
        report = run(self._world(plan), rate_per_s, self._last_inputs(rate_per_s), TOLD_SEED)
        return SimulatedTimes(report.tally.quantile_s(0.5), report.tally.quantile_s(0.99), report.good_share)

    def _last_inputs(self, rate_per_s: float) -> int:
        """Of one run by which a plan is judged in the end."""
        return max(self.care.last_inputs, int(self.care.last_slos * self.slo_s * rate_per_s))

    def _above(self, plan: Plan, rate_per_s: float) -> float:
        """What other inputs show of a plan, if that is better than this rate; else 0."""
        care, better_per_s = self.care, rate_per_s * (1 + STEP)
        if not 0 < better_per_s < evaluate(plan, self.facts).goodput_per_s * HOPE:
            return 0.0
        inputs = self._last_inputs(better_per_s)
        if kept_run(self._world(plan), better_per_s, inputs, OTHER_SEED, care.in_time) is None:
            return 0.0
        found_per_s = self._settled(plan, better_per_s)
        return found_per_s if found_per_s > rate_per_s else 0.0

    def _settled(self, plan: Plan, rate_per_s: float, seed: int = OTHER_SEED) -> float:
        care = self.care
        if not rate_per_s:
            return 0.0
        return settled(self._world(plan), rate_per_s, care.last_inputs, seed, care.last_slos, care.in_time)

    def _world(self, plan: Plan) -> World:
        return World(plan, self.facts, self.slo_s)


def check_playable(objective: Objective) -> float:
    """The SLO, without which there is nothing to sustain."""
    if objective.slo_s is None or not objective.aim.adds_up:
        raise UserError("--polish looks for the most goodput within --slo-ms: it needs that, and no other goal")
    return objective.slo_s


def is_playable(plan: Plan, facts: Problem, objective: Objective, care: SimulationEffort = CARE) -> bool:
    """Whether playing tells all that was asked, and is cheap."""
    return not unplayable(plan, facts, objective, care)


def unplayable(plan: Plan, facts: Problem, objective: Objective, care: SimulationEffort = CARE) -> str:
    """Why playing would not tell all that was asked, or would not be cheap; empty where it is playable."""
    plain = not objective.goodput_per_s and objective.cost_per_hour is None
    if objective.slo_s is None or not objective.aim.adds_up or not plain or facts.pessimistic is not None:
        return "only the most goodput within an SLO is, with no other wish"
    if care.affords(at_once := _at_once(plan, facts, objective.slo_s)):
        return ""
    return f"{at_once:,.0f} inputs come within the SLO, so that it would take long (--polish SECONDS does it)"


def _at_once(plan: Plan, facts: Problem, slo_s: float) -> float:
    """Inputs that come within one SLO."""
    return slo_s * evaluate(plan, facts).goodput_per_s


def played(
    plan: Plan, facts: Problem, objective: Objective, find: Find, care: SimulationEffort = CARE, apart: bool = True
) -> SimulatedChoice:
    """The best of the plan, of those that `find` finds within other limits, and of the baselines.

    First with other limits for all, then for one pipeline after the other; then of those one move away.
    """
    slo_s = check_playable(objective)
    care = care.shortened(_at_once(plan, facts, slo_s))
    climb = BestSoFar(facts, slo_s, replace(plan, promise=None), care)
    others = _other_plans(facts, objective, find, apart)
    while climb.through(others):
        pass
    while apart and climb.through(_other_parts(climb.best, facts, objective, find)):
        pass
    while climb.through(_promising(climb.best, facts, objective)):
        pass
    near = (objective, _within(objective, 1.0)) if _may_be_baseline(facts, objective, apart) else ()
    return climb.settled(plan, chain.from_iterable(_baselines(facts, each) for each in near))


def around(plan: Plan, facts: Problem, objective: Objective, care: SimulationEffort) -> SimulatedChoice:
    """The best of the plan and of those that are reached by one move after the other."""
    climb = BestSoFar(facts, check_playable(objective), replace(plan, promise=None), care)
    while climb.through(_promising(climb.best, facts, objective)):
        pass
    return climb.settled(plan)


def _within(objective: Objective, limit: float) -> Objective:
    assert objective.slo_s
    return replace(objective, slo_s=limit * objective.slo_s, slack=0.0)


def _may_be_baseline(facts: Problem, objective: Objective, apart: bool) -> bool:
    """Baselines are cut as they want, and run kinds apart."""
    return objective.cuts is None and not facts.edges and (apart or len(facts.devices) == 1)


def _baselines(facts: Problem, objective: Objective) -> Iterator[Plan]:
    for each in baselines(facts, objective):
        if each.plan:
            yield replace(each.plan, promise=None)


def _other_plans(facts: Problem, objective: Objective, find: Find, apart: bool) -> Iterator[Plan]:
    """The best plans within other limits, and the baselines."""
    free = _may_be_baseline(facts, objective, apart)
    for asked in (objective, *(_within(objective, limit) for limit in LIMITS)):
        if asked is not objective and (plan := find(facts, asked)):
            yield replace(plan, promise=None)
        if free:
            yield from _baselines(facts, asked)


def _other_parts(plan: Plan, facts: Problem, objective: Objective, find: Find) -> Iterator[Plan]:
    """One pipeline planned anew for its devices within another limit; and one more, for devices that are left."""
    used, pipelines = plan.devices(), plan.pipelines
    left = {each.kind: each.count - used.get(each.kind, 0) for each in facts.devices}
    for kind, count in left.items():
        if count:
            for limit in LIMITS:
                if more := find(_of_devices(facts, {kind: count}), _within(objective, limit)):
                    yield joined([*pipelines, more])
    for index, pipeline in enumerate(pipelines if len(pipelines) > 1 else ()):
        for limit in LIMITS:
            if other := find(_of_devices(facts, pipeline.devices()), _within(objective, limit)):
                yield joined([*pipelines[:index], *other.pipelines, *pipelines[index + 1 :]])


def _promising(plan: Plan, facts: Problem, objective: Objective) -> Iterator[Plan]:
    """The neighbours, those first whose devices can do most."""
    moved = {each: evaluate(each, facts).goodput_per_s for each in neighbours(plan, facts, objective)}
    yield from sorted(moved, key=lambda each: -moved[each])


def _of_devices(facts: Problem, counts: dict[str, int]) -> Problem:
    return facts.with_devices([replace(facts.device(kind), count=count) for kind, count in counts.items()])


def promising(
    plan: Plan, planned: Plan, facts: Problem, goodput_per_s: float, times: SimulatedTimes | None = None
) -> Plan:
    """The plan with the promise of so much, and the gap to the most that the planner holds possible."""
    score, believed = evaluate(plan, facts), evaluate(planned, facts).goodput_per_s
    most = max(believed * (1 + (planned.promise.gap if planned.promise else 0.0)), score.goodput_per_s)
    gap = min(max(0.0, most / goodput_per_s - 1), MOST_GAP) if goodput_per_s else MOST_GAP
    return replace(plan, promise=Promise(goodput_per_s, score.latency_s, score.cost_per_hour, gap, times))
