"""The plans that are simulated beside the planner's first one: for other limits, with other parts, one move away."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.moves import neighbours
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.spread import joined
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

Find = Callable[[Problem, Objective], Plan | None]
LIMITS = (1.0, 1.6, 0.65, 1.25, 2.2, 0.5, 0.85)  # limits of the estimated latency, as shares of the SLO


def within_limits(facts: Problem, objective: Objective, find: Find) -> Iterator[Plan]:
    """The best plans within several limits of the estimated latency."""
    for limit in LIMITS:
        if plan := find(facts, objective.within(limit)):
            yield replace(plan, promise=None)


def other_parts(plan: Plan, facts: Problem, objective: Objective, find: Find) -> Iterator[Plan]:
    """Plans with a new pipeline for idle devices, then plans with one pipeline planned again within another limit."""
    used, pipelines = plan.devices(), plan.pipelines
    left = {each.kind: each.count - used.get(each.kind, 0) for each in facts.devices}
    for kind, count in left.items():
        for more in within_limits(_of_devices(facts, {kind: count}), objective, find) if count else ():
            yield joined([*pipelines, more])
    for index, pipeline in enumerate(pipelines if len(pipelines) > 1 else ()):
        for other in within_limits(_of_devices(facts, pipeline.devices()), objective, find):
            yield joined([*pipelines[:index], *other.pipelines, *pipelines[index + 1 :]])


def most_promising_first(plan: Plan, facts: Problem, objective: Objective) -> Iterator[Plan]:
    """The plans one move away, those with the most estimated goodput first."""
    moved = {each: evaluate(each, facts).goodput_per_s for each in neighbours(plan, facts, objective)}
    yield from sorted(moved, key=lambda each: -moved[each])


def _of_devices(facts: Problem, counts: dict[str, int]) -> Problem:
    return facts.with_devices([replace(facts.device(kind), count=count) for kind, count in counts.items()])
