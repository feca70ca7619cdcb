"""Chooses among plans by simulating them: a plan promises the goodput that it sustains in the simulator.

The planner estimates with sums of median times and evenly spaced inputs, and requires that every input could run to the
end. The simulator has bursts, queues, random exits and the product's own dispatcher. So simple plans are tried first:
the baselines, at several batch sizes, and one cut. Then the planner searches for the best plan within several limits of
its estimated latency, some above the SLO. From the one that sustains most, plans one move away are tried for as long as
one sustains more (optimizer/moves.py). Large fleets are simulated as cells (cluster/simulator/cells.py).

Simulated inputs limit the effort, not seconds, so that the same problem has the same answer on any machine. `--seconds`
ends earlier.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, tee
from math import inf, sqrt

from isobatch.cluster.simulator import sustained
from isobatch.cluster.simulator.candidates import LIMITS, Find, most_promising_first, other_parts, within_limits
from isobatch.cluster.simulator.cells import SIZE, CellError, world_of
from isobatch.cluster.simulator.cores import Each
from isobatch.cluster.simulator.simulation import World
from isobatch.cluster.simulator.tails import Tails
from isobatch.optimizer.effort import MOST_GAP, never
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import starts
from isobatch.optimizer.plan import Plan, SimulatedTimes
from isobatch.optimizer.problem import Problem

CANDIDATE_GAP = 0.03  # of plans that are only candidates: simulation corrects their estimates
STEP = 0.01  # a plan is better if it sustains this share more
HOPE = 1.1  # a plan sustains at most this many times the planner's estimate of its goodput
COMPARED = 20  # the effort suffices for at least this many runs, shortened if necessary
OTHER_SEED = 1  # of the inputs that confirm the best plan, which may have been the best by chance
LAST_SEED = 2  # of inputs that choose no plan: they and those of OTHER_SEED make the promise
TIMES_SEED = 3  # of the inputs whose latencies at the promised rate are written into the plan
FIRST_RUNS = 10  # how many runs the first plan takes, about: five, one after another, on one of several cores
RUNS = 4  # at nearby rates, which confirm a rate
LAST_RUNS = 2 * RUNS + 1  # runs that make a promise: twice at nearby rates, and one for the latencies
HURRIED_RUNS = RUNS + 1  # the same in a hurry
# A run of n SLOs passes rates that are this share of 1 / n too high, because queues grow slowly. Runs longer than
# `LASTING_SLOS` are not corrected for this.
PASSES, LASTING_SLOS = 0.3, 60.0
LEAST_RUN = 2_000, 4.0  # inputs, and SLOs, of the shortest run that makes a promise in a hurry
PASSED = 4  # earlier best plans that are simulated with other inputs too
HURRIED_CELL = 200  # inputs within an SLO of a cell that makes a promise in a hurry
SURELY = 0.05  # a plan that sustains this share less is worse, and not by chance
# The first simple plans, which are the baselines with slack and without: they are simulated with other inputs.
RIVALS = 6
# A plan with more splits must sustain this share more: the costs of launches beside the tables are that uncertain.
LEAST_GAIN = 0.05


def ignore(plan: Plan, rate_per_s: float, tried: int) -> None:
    """Do nothing: the default for `SimulationEffort.better`, which is called with each better plan."""


def untimed(inputs: int, simulate: Callable[[], float]) -> float:
    """The default for `SimulationEffort.timed`."""
    return simulate()


@dataclass(frozen=True)
class SimulationEffort:
    """How much is simulated: the least number of inputs in a run, and its least duration in SLOs."""

    in_time: float = sustained.IN_TIME_SHARE  # the share of inputs that must be answered in time
    inputs: int = 5_000
    slos: float = 30
    last_inputs: int = 15_000  # inputs of the runs that make the promise
    last_slos: float = LASTING_SLOS
    most: float = 400_000  # inputs of all runs that choose a plan
    cell: float = SIZE  # inputs within an SLO of a cell; fleets of twice as many are simulated whole
    out_of_time: Callable[[], bool] = never
    fits: Callable[[float], bool] = sustained.always  # whether there is time to simulate this many inputs
    timed: Callable[[int, Callable[[], float]], float] = untimed  # simulates this many inputs, and learns the pace
    better: Callable[[Plan, float, int], None] = ignore
    each: Each = map  # runs independent simulations
    tails: Tails | None = None  # the latencies that plans must keep; None: any

    def allows(self, plan: Plan) -> bool:
        return self.tails is None or self.tails.kept_by(plan)

    def shortened(self, at_once: float) -> "SimulationEffort":
        """With runs that are short enough to compare some plans, if `at_once` inputs arrive within an SLO."""
        slos = max(min(self.slos, sustained.SHORT_SLOS), min(self.slos, self.most / (COMPARED * at_once)))
        return replace(self, slos=slos, last_slos=self.last_slos * slos / self.slos)


DEFAULT_EFFORT = SimulationEffort()


@dataclass(frozen=True)
class SimulatedChoice:
    """The better plan, the sustained rates before and after, and how many other plans were simulated.

    The rate before is that of shorter runs if the first plan is much worse. `cell`: None where the whole fleet was
    simulated.
    """

    plan: Plan
    before_per_s: float
    after_per_s: float
    tried: int
    cell: CellError | None = None
    simpler: bool = False  # whether another plan sustains slightly more, but has more splits

    @property
    def gain(self) -> float:
        return self.after_per_s / self.before_per_s - 1 if self.before_per_s else 0.0

    @property
    def comparison(self) -> str:
        """The plan beside the others that were simulated, as text."""
        after = f" after {self.tried} other plan{'s' * (self.tried > 1)}" if self.tried else ""
        if self.simpler:
            return f"the simplest within {LEAST_GAIN:.0%} of the best{after}"
        return f"{max(0.0, self.gain):+.1%}{after}" if after else "no other was promising"


@dataclass
class BestSoFar:
    """The best plan so far, and the rate that it sustains."""

    facts: Problem
    slo_s: float
    best: Plan
    effort: SimulationEffort = DEFAULT_EFFORT
    first_per_s: float = 0.0
    rate_per_s: float = 0.0
    tried: int = 0
    simulated: float = 0.0  # inputs
    _first: Plan = field(init=False)
    _short_inputs: int = field(init=False)
    _guesses: bool = field(init=False)  # whether there is no time to simulate more than the promise of the first plan
    _hurries: bool = field(init=False, default=False)  # whether the runs that make the promise are few and small
    _tried: set[Plan] = field(default_factory=set)
    _worlds: dict[tuple[Plan, float, float], World] = field(default_factory=dict)
    _passed: list[Plan] = field(default_factory=list)  # earlier best plans, the last one last

    def __post_init__(self) -> None:
        self._first, effort, world = self.best, self.effort, self._world(self.best)
        believed_per_s = evaluate(self.best, self.facts).goodput_per_s
        short, long = (
            sustained.inputs_of(world, believed_per_s, effort.inputs, slos)
            for slos in (min(effort.slos, sustained.SHORT_SLOS), effort.slos)
        )
        most_per_s = sustained.ABOVE * believed_per_s
        count = sustained.inputs_of(world, most_per_s, *LEAST_RUN)
        _ = world.route  # is computed once, so it is no part of the pace
        guess_per_s = effort.timed(count, partial(sustained.overloaded_in, world, most_per_s, count))
        self._short_inputs = short
        self._guesses = not effort.fits(FIRST_RUNS * long + LAST_RUNS * short)
        first_per_s = guess_per_s if self._guesses else self._searched_per_s(self.best)
        self.first_per_s = self.rate_per_s = first_per_s
        self._tried.add(self.best)
        if not self._guesses:
            effort.better(self.best, self.rate_per_s, 0)

    def improve(self, plans: Iterator[Plan]) -> Iterator[Plan] | None:
        """Simulate these plans until one is better, which becomes the best. Return the rest; None: no plan is better.

        Which plan that is does not depend on how many are simulated at once.
        """
        if self._is_over():
            return None
        ahead, left = tee(self._promising(plans))
        results = self.effort.each(
            sustained.sustains, (self._trial(plan, self._from_per_s(plan) * (1 + STEP)) for plan in ahead)
        )
        for plan in left:
            if self._is_over():
                return None
            self._tried.add(plan)
            self.tried += 1
            if self._is_better(plan, *next(results)):
                self.effort.better(plan, self.rate_per_s, self.tried)
                return left
        return None

    def _is_over(self) -> bool:
        return self._guesses or self.simulated >= self.effort.most or self._is_late()

    def _is_late(self) -> bool:
        """Whether the promise needs all the time left."""
        return self.effort.out_of_time() or not self.effort.fits(LAST_RUNS * self._short_inputs)

    def _must_hurry(self) -> bool:
        """Whether there is no time to confirm the best plan and the first one, and to simulate a larger cell."""
        small, large = (self._last_inputs(self._world(self.best, times), self.rate_per_s) for times in (1, 2))
        confirmed = RUNS * (1 if self.best == self._first else 2)
        return not self.effort.fits(confirmed * small + HURRIED_RUNS * large)

    def improve_by_all(self, plans: Iterator[Plan]) -> None:
        while left := self.improve(plans):
            plans = left

    def _promising(self, plans: Iterator[Plan]) -> Iterator[Plan]:
        """Plans that were not tried and may sustain more than the best so far, each once."""
        seen = set[Plan]()
        for plan in plans:
            new = plan not in self._tried and plan not in seen
            if new and evaluate(plan, self.facts).goodput_per_s * HOPE > self.rate_per_s:
                seen.add(plan)
                yield plan

    def _from_per_s(self, plan: Plan) -> float:
        """The rate from which a better plan goes up. Where none is sustained so far, it is a tenth of the estimate."""
        return self.rate_per_s or 0.1 * evaluate(plan, self.facts).goodput_per_s

    def _is_better(self, plan: Plan, kept: bool, simulated: int) -> bool:
        """Raise the rate of a plan that `kept` the first one until it fails. Return whether the plan is the best."""
        step, from_per_s = STEP, self._from_per_s(plan)
        self.simulated += simulated
        while kept and self.effort.allows(plan):
            if self.best is not plan:
                self._passed.append(self.best)
            self.best, self.rate_per_s = plan, from_per_s * (1 + step)
            step *= 2
            kept, simulated = sustained.sustains(self._trial(plan, from_per_s * (1 + step)))
            self.simulated += simulated
        return self.best is plan

    def _trial(self, plan: Plan, rate_per_s: float) -> sustained.RateTrial:
        """A short run rejects most plans at little cost; a long run decides."""
        world, effort = self._world(plan), self.effort
        lasting = (min(effort.slos, sustained.SHORT_SLOS), effort.slos)
        counts = {sustained.inputs_of(world, rate_per_s, effort.inputs, slos) for slos in lasting}
        return sustained.RateTrial(world, rate_per_s, tuple(sorted(counts)), effort.in_time)

    def _shorten(self) -> None:
        """Shorten the runs that make the promise until they fit the time that is left, or cannot be shorter."""
        world, effort = self._world(self.best), self.effort
        for least, most_slos in ((effort.inputs, effort.slos), (LEAST_RUN[0], sustained.SHORT_SLOS), LEAST_RUN):
            inputs, slos = min(effort.inputs, least), min(effort.last_slos, effort.slos, most_slos)
            self.effort = replace(effort, last_inputs=inputs, last_slos=slos)
            if effort.fits(HURRIED_RUNS * sustained.inputs_of(world, self.rate_per_s, inputs, slos)):
                break

    def choose(self, planned: Plan, rivals: Iterable[Plan] = ()) -> SimulatedChoice:
        """Choose with other inputs: the first plan stays if it sustains more of them than the best plan.

        A rival that sustains more replaces the best plan, as does an earlier best plan, which may have lost by chance.
        In the end a plan with fewer splits is taken if it sustains nearly as much, and no less than any rival.
        """
        first, best, self._hurries = self._first, self.best, self._must_hurry()
        if self._hurries:
            self._shorten()
        after_per_s = before_per_s = self._confirmed_per_s(best, self.rate_per_s) or self._searched_per_s(best)
        if best != first:
            worse = self._hurries or self.first_per_s * (1 + SURELY) < after_per_s
            before_per_s = self.first_per_s if worse else self._confirmed_per_s(first, self.first_per_s)
        if before_per_s > after_per_s:
            best, after_per_s = first, before_per_s
        rivals, passed = [*rivals], [plan for plan in reversed(self._passed) if plan != first]
        others = [*passed[:PASSED], *rivals]
        best, after_per_s = self._best_of(best, after_per_s, [each for each in others if each != first])
        simplest, after_per_s = self._simplest(best, after_per_s, [first, *others])
        if simplest != best:
            simplest, after_per_s = self._best_of(simplest, after_per_s, rivals)
        after_per_s = max(after_per_s, self._beyond_per_s(simplest, after_per_s))
        return replace(self._promised(simplest, planned, before_per_s, after_per_s), simpler=simplest != best)

    def _best_of(self, best: Plan, rate_per_s: float, others: Iterable[Plan]) -> tuple[Plan, float]:
        """The plan that sustains most of other inputs, and its rate; `rate_per_s`: that of `best`."""
        for other in others:
            if self._is_late():
                break
            if other != best and (other_per_s := self._rate_above(other, rate_per_s)):
                best, rate_per_s = other, other_per_s
        return best, rate_per_s

    def _simplest(self, best: Plan, rate_per_s: float, others: Iterable[Plan]) -> tuple[Plan, float]:
        """The plan with the fewest splits that sustains nearly as much as the best one, and its rate."""
        enough_per_s = rate_per_s / (1 + LEAST_GAIN) / (1 + STEP)
        for other in sorted(others, key=num_splits):
            if num_splits(other) >= num_splits(best) or self._is_late():
                break
            if other_per_s := self._rate_above(other, enough_per_s):
                return other, other_per_s
        return best, rate_per_s

    def _promised(self, best: Plan, planned: Plan, before_per_s: float, after_per_s: float) -> SimulatedChoice:
        """The promise is the geometric mean of the rates with the inputs that chose the plan and with still others.

        For a fleet that is simulated as a cell it is the rate of a cell twice as large, in a hurry the rate with the
        inputs that chose the plan. The error of short runs is subtracted.
        """
        world = self._world(best, larger=1 if self._hurries else 2)
        is_whole = world.share == 1 and world.slo_s == self.slo_s
        slos = self._last_inputs(world, after_per_s) / (world.slo_s * world.share * after_per_s) if after_per_s else inf
        times, error = 1 - PASSES * max(0.0, 1 / slos - 1 / LASTING_SLOS), None
        if not self._hurries:
            last_per_s = self._confirmed_in(world, after_per_s, LAST_SEED)
            ratio = last_per_s / after_per_s if last_per_s else 1.0
            error = abs(ratio - 1)
            times *= sqrt(ratio) if is_whole else ratio
        devices, of_devices = (sum(each.devices().values()) for each in (world.plan, best))
        cell = None if is_whole else CellError(devices, of_devices, error, world.slo_s / self.slo_s)
        before_per_s, after_per_s = times * before_per_s, times * after_per_s
        plan = promising(best, planned, self.facts, after_per_s, self._times(world, after_per_s))
        return SimulatedChoice(plan, before_per_s, after_per_s, self.tried, cell)

    def _times(self, world: World, rate_per_s: float) -> SimulatedTimes | None:
        if not rate_per_s:
            return None
        report = sustained.run(world, rate_per_s, self._last_inputs(world, rate_per_s), TIMES_SEED)
        return SimulatedTimes(report.tally.quantile_s(0.5), report.tally.quantile_s(0.99), report.good_share)

    def _last_inputs(self, world: World, rate_per_s: float) -> int:
        return sustained.inputs_of(world, rate_per_s, self.effort.last_inputs, self.effort.last_slos)

    def _rate_above(self, plan: Plan, rate_per_s: float) -> float:
        """The rate that a plan sustains with other inputs, if it is clearly above this rate; else 0."""
        better_per_s = rate_per_s * (1 + STEP)
        if not 0 < better_per_s < evaluate(plan, self.facts).goodput_per_s * HOPE:
            return 0.0
        world = self._world(plan)
        inputs = self._last_inputs(world, better_per_s)
        if sustained.run_if_sustained(world, better_per_s, inputs, OTHER_SEED, self.effort.in_time) is None:
            return 0.0
        if not self.effort.allows(plan):
            return 0.0
        confirmed_per_s = self._confirmed_per_s(plan, better_per_s)
        return confirmed_per_s if confirmed_per_s > rate_per_s else 0.0

    def _beyond_per_s(self, plan: Plan, rate_per_s: float) -> float:
        """A higher rate that the plan sustains, although it lost more at some rate between the two; else 0."""
        if self._is_late():
            return 0.0
        world, effort = self._world(plan), self.effort
        most_per_s = HOPE * evaluate(plan, self.facts).goodput_per_s
        inputs, slos = effort.last_inputs, effort.last_slos
        beyond_per_s = sustained.rate_beyond(world, rate_per_s, most_per_s, inputs, OTHER_SEED, slos, effort.in_time)
        return self._confirmed_per_s(plan, beyond_per_s)

    def _searched_per_s(self, plan: Plan) -> float:
        """The rate that a plan sustains in the runs that choose, from its estimate on."""
        effort, estimate_per_s = self.effort, evaluate(plan, self.facts).goodput_per_s
        return sustained.sustained_in(
            self._world(plan), estimate_per_s, effort.inputs, 0, effort.slos, effort.in_time, effort.out_of_time
        )

    def _confirmed_per_s(self, plan: Plan, rate_per_s: float) -> float:
        return self._confirmed_in(self._world(plan), rate_per_s, OTHER_SEED)

    def _confirmed_in(self, world: World, rate_per_s: float, seed: int) -> float:
        if not rate_per_s:
            return 0.0
        effort = self.effort
        return sustained.confirmed_rate_per_s(
            world, rate_per_s, effort.last_inputs, seed, effort.last_slos, effort.in_time, effort.each, effort.fits
        )

    def _world(self, plan: Plan, larger: int = 1) -> World:
        size = min(self.effort.cell, HURRIED_CELL) if self._hurries else self.effort.cell
        key = plan, larger * size, 2 * size
        if key not in self._worlds:
            self._worlds[key] = world_of(plan, self.facts, self.slo_s, *key[1:])
        return self._worlds[key]


def num_splits(plan: Plan) -> int:
    """The splits of the pipeline that is cut most often."""
    return max(len(pipeline.splits) for pipeline in plan.pipelines)


def why_not_simulated(objective: Objective) -> str:
    """Why a simulation would not cover the objective; empty where plans are simulated."""
    plain = not objective.goodput_per_s and objective.cost_per_hour is None
    if objective.slo_s is None or not objective.aim.adds_up or not plain:
        return "only the most goodput within an SLO is, without another limit"
    return ""


def best_simulated(
    plan: Plan, facts: Problem, objective: Objective, find: Find, effort: SimulationEffort = DEFAULT_EFFORT
) -> SimulatedChoice:
    """The best of the plan, of simple plans, and of the plans that `find` returns for other limits.

    Limits are changed for all pipelines first, then for one pipeline after the other; then moves are tried.
    """
    if (slo_s := objective.slo_s) is None or not objective.aim.adds_up:
        raise ValueError("only plans for the most goodput within an SLO are simulated")
    world = world_of(plan, facts, slo_s, effort.cell, 2 * effort.cell)
    effort = effort.shortened(world.slo_s * world.share * evaluate(plan, facts).goodput_per_s)
    begun = replace(plan, promise=None)
    if effort.tails and not effort.tails.kept_by(begun):
        begun = replace(effort.tails.stock, promise=None)
    search = BestSoFar(facts, slo_s, begun, effort)
    free = objective.cuts is None and not facts.edges  # simple plans cut anywhere
    simple, rivals = tee(starts(facts, objective, LIMITS, effort.out_of_time) if free else ())
    others = chain(simple, within_limits(facts, objective, find))
    search.improve_by_all(others)
    while search.improve(other_parts(search.best, facts, objective, find)):
        pass
    while search.improve(most_promising_first(search.best, facts, objective)):
        pass
    return search.choose(plan, islice(rivals, RIVALS))


def promising(
    plan: Plan, planned: Plan, facts: Problem, goodput_per_s: float, times: SimulatedTimes | None = None
) -> Plan:
    """The plan with this promise, and its gap to the planner's upper bound."""
    score, believed = evaluate(plan, facts), evaluate(planned, facts).goodput_per_s
    most = max(believed * (1 + (planned.promise.gap if planned.promise else 0.0)), score.goodput_per_s)
    gap = min(max(0.0, most / goodput_per_s - 1), MOST_GAP) if goodput_per_s else MOST_GAP
    return replace(plan, promise=replace(score.promise(gap), goodput_per_s=goodput_per_s, simulated=times))
