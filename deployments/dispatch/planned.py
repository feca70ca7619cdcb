"""From a plan to the route that inputs take through it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deployments.dispatch.route import Route, Stage
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem
from optimizer.works import work


def placements_of(plan: Plan) -> list[Placement]:
    """All that have replicas: the plan's own, then those of the pipelines beside it."""
    return [placement for lane in plan.lanes for placement in lane.placements]


def route_of(plan: Plan, facts: Problem, groups: Sequence[str]) -> Route:
    """The plan's splits as stages, with the times that the planner's own cost model gives to every size of launch.

    `groups` names the replicas of each of `placements_of(plan)`.
    """
    names = iter(groups)
    first, *others = [Route(tuple(_stages(lane, facts, [next(names) for _ in lane.placements]))) for lane in plan.lanes]
    return replace(first, beside=tuple(others))


def _stages(lane: Plan, facts: Problem, groups: Sequence[str]) -> Iterator[Stage]:
    reach, before = 1.0, None
    for split in lane.splits:
        number = next(index for index, placement in enumerate(lane.placements) if split in placement.splits)
        here = lane.placements[number]
        stays = here.local and before is here
        source = None if before is None or stays else before.kind
        yield _stage(split, here, groups[number], facts, source, reach)
        reach, before = work(split, facts, here.kind, None, reach).survivors, here


def _stage(split: Split, here: Placement, group: str, facts: Problem, source: str | None, reach: float) -> Stage:
    works = [
        work(replace(split, batch_size=size), facts, here.kind, source, reach)
        for size in range(1, split.batch_size + 1)
    ]
    return Stage(
        split.start,
        split.stop,
        split.batch_size,
        group,
        tuple(each.launch_s for each in works),
        reach,
        frozenset(split.ramps),
        here.local,
        works[-1].transfer_s,
    )
