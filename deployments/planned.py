"""From a plan to the route that inputs take through it."""

from dataclasses import replace

from deployments.dispatch.route import Route, Stage
from optimizer.evaluate import work
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem


def route_of(plan: Plan, facts: Problem, groups: dict[Placement, str]) -> Route:
    """The plan's splits as stages, with the times that the planner's own cost model gives to every size of launch."""
    stages, reach = [], 1.0
    for split in plan.splits:
        placement = plan.placement_of(split)
        stages.append(_stage(split, placement.kind, groups[placement], facts, reach))
        reach = work(split, facts, placement.kind, None, reach).survivors
    return Route(tuple(stages))


def _stage(split: Split, kind: str, group: str, facts: Problem, reach: float) -> Stage:
    sizes = range(1, split.batch_size + 1)
    times = tuple(work(replace(split, batch_size=size), facts, kind, None, reach).launch_s for size in sizes)
    return Stage(split.start, split.stop, split.batch_size, group, times, reach, frozenset(split.ramps))
