"""The gain from each mechanism on these devices and for these inputs, and what would gain more.

A step is the best plan of a wider family. Its goodput comes from the simulator, so a mechanism that does not pay here
shows a loss. Possible gains are the planner's estimates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from isobatch.cluster.simulator.candidates import LIMITS, within_limits
from isobatch.cluster.simulator.plan_choice import BestSoFar, SimulationEffort
from isobatch.cluster.simulator.sustained import SHORT_SLOS
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS, SERIAL, baseline, batch_sizes
from isobatch.optimizer.pipelines.batch_gain import without_hand_overs
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.pipelines.spread import Planner, spread
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search

GAP = 0.03  # of the planner
WORTH = 0.01  # a change that gains less than this share is left out
EFFORT = SimulationEffort(inputs=4_000, slos=SHORT_SLOS, most=80_000)  # of a step
SINGLE = "single inputs, no exits"
BATCHES = "batches"
PACKING = "packing: texts without padding"
EXITS = "exits, in batches that shrink"
CONSTANT = "constant batches: survivors merge on their device"
CUTS = "cuts: splits on devices of their own"
TOGETHER = "this plan: kinds chained or side by side, other inputs"


@dataclass(frozen=True)
class MechanismStep:
    """A mechanism, and the inputs per second that are in time with it and all before it; 0: there is no plan."""

    mechanism: str
    goodput_per_s: float


@dataclass(frozen=True)
class Improvement:
    """A change of the devices or the SLO, and the goodput of the best plan then, as a multiple of the present one."""

    what: str
    times: float


def steps(plan: Plan, facts: Problem, objective: Objective, padded: Problem | None = None) -> Iterator[MechanismStep]:
    """The steps from single inputs to this plan. `padded`: the same problem, with texts padded to a common length."""
    first, best = padded or facts, partial(_best, objective=objective)
    yield best(SINGLE, first, _baselines(NO_EXITS, first, objective, single=True))
    yield best(BATCHES, first, _baselines(NO_EXITS, first, objective))
    if padded:
        yield best(PACKING, facts, _baselines(NO_EXITS, facts, objective))
    yield best(EXITS, facts, _baselines(EARLY_EXIT, facts, objective))
    yield best(CONSTANT, facts, _baselines(SERIAL, facts, objective))
    if objective.cuts is None and not facts.edges:
        alone: Planner = partial(search, gap=GAP)
        yield best(CUTS, facts, within_limits(facts, objective, lambda facts, each: spread(facts, each, alone)))
    yield best(TOGETHER, facts, iter([replace(plan, promise=None)]))


def _best(mechanism: str, facts: Problem, plans: Iterator[Plan], objective: Objective) -> MechanismStep:
    """The best of these plans, by short runs."""
    ordered = sorted(dict.fromkeys(plans), key=lambda each: -evaluate(each, facts).goodput_per_s)
    if not ordered or objective.slo_s is None:
        return MechanismStep(mechanism, 0.0)
    best = BestSoFar(facts, objective.slo_s, ordered[0], EFFORT)
    best.improve_by_all(iter(ordered[1:]))
    return MechanismStep(mechanism, best.rate_per_s)


def _baselines(name: str, facts: Problem, objective: Objective, single: bool = False) -> Iterator[Plan]:
    """A baseline at one batch size after the other; `single`: only one input at a time."""
    loosest = objective.within(max(LIMITS))
    for size in (1,) if single else batch_sizes(facts, objective):
        if plan := baseline(name, facts, replace(loosest, fixed_batch=size)).plan:
            yield plan
    if not single:
        yield from within_limits(facts, objective, lambda facts, each: baseline(name, facts, each).plan)


def changes(facts: Problem, objective: Objective) -> list[Improvement]:
    """The changes that would gain more, by the planner's estimates, the best first."""
    now_per_s = _planned_per_s(facts, objective)
    if not now_per_s:
        return []
    then = [(what, _planned_per_s(changed, aim)) for what, changed, aim in _changes(facts, objective)]
    better = [Improvement(what, per_s / now_per_s) for what, per_s in then]
    return sorted((each for each in better if each.times > 1 + WORTH), key=lambda each: -each.times)


def _planned_per_s(facts: Problem, objective: Objective) -> float:
    plan = side_by_side(facts, objective, GAP)
    return evaluate(plan, facts).goodput_per_s if plan else 0.0


def _changes(facts: Problem, objective: Objective) -> Iterator[tuple[str, Problem, Objective]]:
    assert objective.slo_s
    yield "an SLO twice as long", facts, replace(objective, slo_s=2 * objective.slo_s)
    if objective.max_batch < max(table.largest for table in facts.tables):
        yield "batches twice as large", facts, replace(objective, max_batch=2 * objective.max_batch)
    yield "hand-overs that take no time (the most a faster link brings)", without_hand_overs(facts), objective
    free = tuple(replace(table, launch_s=0.0, stop_s=0.0) for table in facts.tables)
    yield "launches and stops that take no time", replace(facts, tables=free), objective
    memory = tuple(replace(each, memory_bytes=2 * each.memory_bytes) for each in facts.devices)
    yield "twice the memory", facts.with_devices(memory), objective
    for device in facts.devices:
        more = [replace(each, count=each.count + (each is device)) for each in facts.devices]
        yield f"one more {device.kind}", facts.with_devices(more), objective
