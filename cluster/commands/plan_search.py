"""From the options of `isobatch plan` to its result: the problem, the objective, the search and the simulations.

Meanwhile the best plan so far is shown on a line that changes, until the time is over or Ctrl-C is pressed.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from isobatch.cluster.commands import number_text, numbers_in
from isobatch.cluster.commands.plan_report import PlanResult
from isobatch.cluster.commands.shared_options import check_not_given
from isobatch.cluster.simulator import plan_choice as choice
from isobatch.cluster.simulator.candidates import Find
from isobatch.cluster.simulator.cells import world_of
from isobatch.cluster.simulator.cores import Cores
from isobatch.cluster.simulator.sustained import SHORT_SLOS, inputs_of, sustained_in
from isobatch.cluster.simulator.tails import Tails
from isobatch.deployments.named import known_backend
from isobatch.deployments.own_cores import usable_cores
from isobatch.deployments.progress import busy
from isobatch.optimizer import Objective, Plan, Problem, evaluate, problem
from isobatch.optimizer.effort import EFFORT
from isobatch.optimizer.goals import GOALS
from isobatch.optimizer.infeasible import reason
from isobatch.optimizer.pipelines.baselines import NO_EXITS, Baseline, baseline, baselines, no_later
from isobatch.optimizer.pipelines.batch_gain import batch_gains
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.pipelines.spread import best_of
from isobatch.optimizer.tuning import plan_for_its_ramps, promised_value
from isobatch.profiles.curves import BACKENDS as PUBLISHED_BACKENDS
from isobatch.profiles.devices import Device, fleet, links_between, sharing_choices
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import MOST_BATCH

if TYPE_CHECKING:
    from isobatch.cluster.commands.plan import ClassifierPlanOptions

# The shares of --seconds after which the search ends and after which no further plan is simulated. The rest is needed
# to simulate the best plan with other inputs, which make its promise.
SEARCHING, CHOOSING = 0.25, 0.5
STOPPED_S = 3.0  # for the promise of the best plan, after Ctrl-C
PARALLEL_RUNS = 3  # cores that the runs which make a promise keep busy: four rates at once, twice, and one run alone


class LivePlan:
    """Shows the best plan so far, and says when to stop: after `seconds`, if given, or at the first Ctrl-C."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self._began_s = clock, inf if seconds is None else seconds, clock()
        self._until_share, self.stopped, self._confirming = SEARCHING, False, False
        self._best, self._inputs_per_s = "looking for a first plan", 0.0
        self._before: Any = None  # the handler of Ctrl-C
        self._busy = busy(self.text)
        self._show: Callable[[str], None] = lambda text: None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._stop)
        self._show = self._busy.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._busy.__exit__(*error)
        finally:
            if self._before is not None:
                signal.signal(signal.SIGINT, self._before)

    def is_over(self) -> bool:
        """Whether to stop searching, and later whether to simulate no further plan."""
        before = self._confirming
        self._confirming = self.stopped or self._clock() - self._began_s >= self._until_share * self._seconds
        if self._confirming != before:
            self._show(self.text)
        return self._confirming

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, 0 after Ctrl-C; None: there is no limit."""
        if self.stopped:
            return 0.0
        return None if self._seconds == inf else max(0.0, self._seconds - (self._clock() - self._began_s))

    def fits(self, inputs: float) -> bool:
        """Whether this many inputs can be simulated in the time that is left."""
        left_s = STOPPED_S if self.stopped else self.left_s
        return left_s is None or inputs <= left_s * min(usable_cores(), PARALLEL_RUNS) * self._inputs_per_s

    def timed(self, inputs: int, simulate: Callable[[], float]) -> float:
        """Simulate, and learn how many inputs a core simulates in a second."""
        began_s = self._clock()
        result = simulate()
        self._inputs_per_s = inputs / max(1e-6, self._clock() - began_s)
        return result

    def estimated(self, plan: Plan, rate_per_s: float) -> None:
        """A first plan, with the planner's estimate of its goodput."""
        self._best = f"{number_text(rate_per_s)} per second by estimate: {_splits(plan)}"
        self._show(self.text)

    def allow(self, share: float) -> None:
        """Let the next phase continue until this share of `seconds` is over."""
        self._until_share, self._confirming = share, self.stopped

    def better(self, plan: Plan, rate_per_s: float, tried: int) -> None:
        """A plan that sustains more in the simulator than all before."""
        others = f"{tried} other plan{'s' * (tried != 1)} tried"
        self._best = f"{number_text(rate_per_s)} per second, as simulated: {_splits(plan)}; {others}"
        self._show(self.text)

    @property
    def text(self) -> str:
        """What is shown."""
        return f"planning: {self._best}; {'confirming it with other inputs' if self._confirming else 'Ctrl-C keeps it'}"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Keep the best plan at the first Ctrl-C; end without a plan at the second."""
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = self._confirming = True


def _splits(plan: Plan) -> str:
    """The batch sizes of a plan's splits, by pipeline.

    >>> from isobatch.optimizer import Placement, Split
    >>> _splits(Plan((Placement("v100", 2, (Split(0, 6, 8), Split(6, 12, 4))),)))
    'batches of 8 > 4'
    """
    pipelines = (" > ".join(str(split.batch_size) for split in each.splits) for each in plan.pipelines)
    return f"batches of {' beside '.join(pipelines)}"


# Simulates a plan and others near it; None: no plan is simulated.
Simulate = Callable[[Plan, Problem, Objective, Find], choice.SimulatedChoice | None]
USUAL_S = 40.0  # with fewer seconds than this, runs are shorter
FEWEST_INPUTS = 2_000  # of a run
ROUGH_RUNS = 10  # about this many short runs find a plan's goodput at both ends of an interval


def planned(options: "ClassifierPlanOptions", fleet_text: str, profile: Profile, objective: Objective) -> PlanResult:
    """The best plan. Several replicas share a device, as far as that was measured, where such a plan promises more.

    Where dollars count, no device is shared: a share has its part of the price, but only whole devices are rented.
    """
    counts_dollars = objective.aim.at_expected_rate or objective.cost_per_hour is not None
    alone, *shared = sharing_choices(fleet(fleet_text), () if options.no_later or counts_dollars else profile.kinds)
    seconds, hurried = options.seconds, False
    if shared:
        with LivePlan(seconds) as live:
            shared = most_promising(options, profile, objective, shared, live)
        hurried = live.stopped
        seconds = live.left_s and live.left_s / (1 + len(shared))
    results, errors = dict[str, PlanResult](), list[UserError]()
    for name, devices in (("not shared", alone), *(("shared", each) for each in shared)):
        try:
            with LivePlan(seconds) as live:
                results[name] = searched(replace(options, seconds=seconds), devices, profile, objective, live)
        except UserError as error:
            errors.append(error)
        if live.stopped:
            break
    if not results:
        raise errors[0]
    best = min(
        results,
        key=lambda name: promised_value(results[name].plan, objective) * (1 + choice.LEAST_GAIN * (name == "shared")),
    )
    if promised_value(results[best].plan, objective) == inf:
        late = f"as simulated, no plan answers {options.in_time:.4g} of the inputs in time, however few come"
        raise UserError(f"{late}, as the slowest take longer than the SLO: raise --slo-ms, or lower --in-time")
    others = (Baseline(name, each.plan, each.score) for name, each in results.items() if name != best)
    hurried = hurried or live.stopped
    return replace(results[best], baselines=(*results[best].baselines, *others), hurried=hurried)


def most_promising(
    options: "ClassifierPlanOptions", profile: Profile, objective: Objective, choices: Sequence[tuple[Device, ...]],
    live: LivePlan,
) -> list[tuple[Device, ...]]:  # fmt: skip
    """The choice of shared devices that is best by estimate; none where no choice has a plan."""
    within = objective if options.no_simulation else replace(objective, slack=0.0)  # as simulated plans need no slack
    gap, values = max(options.gap, choice.CANDIDATE_GAP), dict[tuple[Device, ...], float]()
    for devices in choices:
        with suppress(UserError):  # no times of the backend, for example
            facts = problem_of(options, devices, profile)
            values[devices] = promised_value(found_in_time(live, facts, within, gap), objective)
        if live.is_over():
            break
    return [devices for devices in sorted(values, key=values.__getitem__) if values[devices] < inf][:1]


def searched(
    options: "ClassifierPlanOptions", devices: Sequence[Device], profile: Profile, objective: Objective, live: LivePlan
) -> PlanResult:
    """The result for the inputs that leave at the ramps of its plan; plans are simulated once these are known."""
    facts = problem_of(options, devices, profile)
    within = no_later(facts, objective) if options.no_later else objective
    simulate = simulation(options, live)

    def result(facts: Problem, simulate: Simulate | None = None) -> PlanResult:
        return plan_result(options, facts, within, live, simulate)

    if facts.exits:
        with suppress(UserError):  # the last search says why there is no plan
            first = plan_for_its_ramps(facts, within, lambda given: result(given).plan)
            facts = first[1] if first else facts
    last = result(facts, simulate)
    why_not = choice.why_not_simulated(last.objective) if simulate else "--no-simulation"
    return replace(
        last,
        not_simulated="" if last.simulated else why_not,
        batch_gains=(*batch_gains(last.facts, within),),
        between_per_s=_between_per_s(last, within.slo_s, live),
    )


def _between_per_s(result: PlanResult, slo_s: float | None, live: LivePlan) -> tuple[float, float] | None:
    """What the plan sustains if all estimated times are at the long end of their interval, and at the short end.

    It is simulated, as the promise was, where there is time; otherwise the promise changes as the estimate does.
    """
    plan, facts, promised = result.plan, result.facts, result.plan.promise
    if promised is None or not any(facts.table(kind).interval for kind in plan.devices()):
        return None
    problems = [replace(facts, tables=tuple(table.at_end_of_interval(end) for table in facts.tables)) for end in (1, 0)]
    if result.simulated and slo_s and live.fits(ROUGH_RUNS * _rough_inputs(plan, facts, slo_s)):
        with Cores(min(len(problems), usable_cores())) as cores:
            low, high = cores.each(partial(_roughly_sustained_per_s, plan, slo_s), problems)
    else:
        times = promised.goodput_per_s / evaluate(plan, facts).goodput_per_s
        low, high = (times * evaluate(plan, each).goodput_per_s for each in problems)
    return min(low, promised.goodput_per_s), max(high, promised.goodput_per_s)


def _rough_inputs(plan: Plan, facts: Problem, slo_s: float) -> int:
    """The inputs of one run in a small cell."""
    world = world_of(plan, facts, slo_s, choice.HURRIED_CELL, 2 * choice.HURRIED_CELL)
    return inputs_of(world, evaluate(plan, facts).goodput_per_s, FEWEST_INPUTS, SHORT_SLOS)


def _roughly_sustained_per_s(plan: Plan, slo_s: float, facts: Problem) -> float:
    """By few inputs, in a small cell."""
    world = world_of(plan, facts, slo_s, choice.HURRIED_CELL, 2 * choice.HURRIED_CELL)
    return sustained_in(world, evaluate(plan, facts).goodput_per_s, FEWEST_INPUTS, slos=SHORT_SLOS)


def named(plan: Plan, profile: Profile, slo_s: float | None) -> Plan:
    """The plan with the network and the SLO that it was made for."""
    return replace(plan, model=profile.model, weights=profile.weights, slo_s=slo_s)


def objective_of(options: "ClassifierPlanOptions") -> Objective:
    goal = options.goal or "goodput"
    if not 0 <= options.gap < inf:
        raise UserError(f"--gap {options.gap:g} must be 0 or more, and finite")
    if options.rate is None and goal in GOALS and GOALS[goal].at_given_goodput:
        raise UserError(f"the goal {goal} needs --rate: how many inputs per second must the plan sustain?")
    cuts = numbers_in("--cut", options.cut, int, "numbers of blocks above 0, as in 2,4") if options.cut else ()
    return Objective(
        goal,
        slo_s=None if options.slo_ms is None else options.slo_ms / 1e3,
        slack=options.slack,
        goodput_per_s=options.rate or 0.0,
        cost_per_hour=options.budget,
        max_batch=options.max_batch or MOST_BATCH,
        cuts=tuple(sorted({*cuts})) or None,
    )


def problem_of(options: "ClassifierPlanOptions", devices: Sequence[Device], profile: Profile) -> Problem:
    """The planning problem while all ramps are open."""
    backend, dtype = options.backend, options.dtype or ""
    if backend not in ("", *PUBLISHED_BACKENDS):
        known_backend(backend)
    measured = profile.on(backend, dtype)
    for device in devices:
        measured.check_has(device.kind, backend, dtype)
    links = links_between(devices, one_machine=options.one_machine, measured=profile.links)
    return problem(measured, devices, links, length=measured.length, exits=measured.exits_of(measured.length))


def simulation(options: "ClassifierPlanOptions", live: LivePlan) -> Simulate | None:
    """The function that simulates the plan and similar ones; None where no plan is simulated."""
    in_time = options.in_time
    if not 0 < in_time < 1:
        raise UserError(f"--in-time {in_time} must be between 0 and 1: the share of inputs that are answered in time")
    if options.no_simulation:
        check_not_given(options, ("in_time",), "is for plans that are simulated: leave it out with --no-simulation")
        live.allow(1.0)
        return None

    def simulate(plan: Plan, facts: Problem, objective: Objective, find: Find) -> choice.SimulatedChoice | None:
        live.allow(CHOOSING)
        if choice.why_not_simulated(objective):
            return None
        effort = replace(
            _hurried(options.seconds), out_of_time=live.is_over, in_time=in_time, better=live.better,
            fits=live.fits, timed=live.timed,
        )  # fmt: skip
        if options.no_later and (stock := baseline(NO_EXITS, facts, objective).plan) and objective.slo_s:
            effort = replace(effort, tails=Tails(facts, stock, objective.slo_s, effort.last_inputs, effort.cell))
        with Cores() as cores:
            return choice.best_simulated(plan, facts, objective, find, replace(effort, each=cores.each))

    return simulate


def _hurried(seconds: float | None) -> choice.SimulationEffort:
    """Shorter runs where there is less time than the usual effort takes."""
    effort = choice.DEFAULT_EFFORT
    if seconds is None or seconds >= USUAL_S:
        return effort
    share = seconds / USUAL_S
    inputs = min(effort.inputs, max(FEWEST_INPUTS, int(share * effort.inputs)))
    return replace(
        effort,
        inputs=inputs,
        cell=max(choice.HURRIED_CELL, share * effort.cell),
        slos=min(effort.slos, max(SHORT_SLOS, share * effort.slos)),
        last_inputs=max(inputs, int(share * effort.last_inputs)),
        last_slos=min(effort.last_slos, max(2 * SHORT_SLOS, share * effort.last_slos)),
    )


def found_in_time(
    live: LivePlan, facts: Problem, objective: Objective, gap: float = choice.CANDIDATE_GAP
) -> Plan | None:
    """The best plan by estimate, or the best so far once the search is over."""
    return side_by_side(facts.given, objective, gap, effort=replace(EFFORT, out_of_time=live.is_over))


def plan_result(
    options: "ClassifierPlanOptions", facts: Problem, objective: Objective, live: LivePlan, simulate: Simulate | None
) -> PlanResult:
    """The best plan, beside the baselines. The error says why when no plan fits.

    Where plans are simulated, the planner's estimate of their latency need not keep the SLO.
    """
    if objective.cuts and objective.cuts[-1] >= facts.num_blocks:
        last, blocks = facts.num_blocks - 1, facts.num_blocks
        within = f"{blocks} blocks: cut before 1 to {last}" if last else "1 block, which cannot be cut"
        raise UserError(f"--cut {objective.cuts[-1]}: the network has {within}")
    others = baselines(facts, objective)
    if simple := best_of([each.plan for each in others], facts, objective):
        live.estimated(simple, evaluate(simple, facts).goodput_per_s)
    find = partial(found_in_time, live)
    chosen = find(facts, objective, options.gap)
    first = chosen or (find(facts, replace(objective, slack=0.0), options.gap) if simulate else None)
    if first:
        live.estimated(first, evaluate(first, facts).goodput_per_s)
    better = simulate(first, facts, objective, find) if simulate and first else None
    if better:
        chosen, objective = better.plan, replace(objective, slo_s=None)
    if chosen is None:
        needs_no_slack = simulate and not choice.why_not_simulated(objective)
        raise UserError(reason(facts, replace(objective, slack=0.0) if needs_no_slack else objective))
    plan = facts.annotated(chosen)
    return PlanResult(facts, objective, plan, evaluate(plan, facts, objective), others, better)
