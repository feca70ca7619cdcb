"""The route of inputs through a plan: all that the dispatcher knows of the plan."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from isobatch.optimizer.model.work import inside_of, until_s, work
from isobatch.optimizer.plan import Placement, Plan, Split, Thresholds
from isobatch.optimizer.problem import Problem
from isobatch.profiles.model import OpenRamps


@dataclass(frozen=True)
class ExitPoint:
    """Where inputs leave a launch: after `block`, at a ramp or at the end of the stage.

    `launch_s[n - 1]` is the planned time until a launch of n inputs gets here, if any input does; `least_s` as in
    `Stage`. `survival` is the share of all inputs that continue from here (for the last exit point, see the next
    stage).
    """

    block: int
    launch_s: tuple[float, ...]
    survival: float = 0.0
    least_s: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Blocks `start..stop`, run as one launch by any replica of `group`.

    `launch_s[n - 1]` is the planned time of a launch of n inputs; `survival` is the share of all inputs that get here;
    `transfer_s` is the time that a full batch needs on the link to this stage. `local`: an input stays on the replica
    on which it passed an earlier stage of the same group.

    `length`: the tokens of a planned input. An input then weighs its tokens, and a launch has room for `batch` planned
    inputs; `least_s` is the time of a launch of almost no tokens. None: every input weighs 1.

    `exits`: where inputs leave a launch, the last at the end of the stage. Default: only at the end.
    """

    start: int
    stop: int
    batch: int
    group: str
    launch_s: tuple[float, ...]
    survival: float = 1.0
    ramps: frozenset[int] = frozenset()
    local: bool = False
    transfer_s: float = 0.0
    length: int | None = None
    least_s: float = 0.0
    exits: tuple[ExitPoint, ...] = ()

    def __post_init__(self) -> None:
        if not self.exits:
            end = ExitPoint(self.stop - 1, self.launch_s, least_s=self.least_s)
            object.__setattr__(self, "exits", (end,))

    @cached_property
    def room(self) -> int:
        """The weight of a full launch."""
        return self.batch * (self.length or 1)

    def counted(self, weight: int) -> int:
        """The weight that counts here: 1 if inputs have no lengths."""
        return 1 if self.length is None else weight

    def seconds(self, weight: int) -> float:
        """The planned time of a launch of this weight: interpolated between sizes where inputs have lengths.

        >>> Stage(0, 4, batch=2, group="a", launch_s=(0.01, 0.012)).seconds(1)
        0.01
        >>> texts = Stage(0, 4, batch=2, group="a", launch_s=(0.01, 0.012), length=10, least_s=0.006)
        >>> [round(texts.seconds(tokens), 4) for tokens in (5, 10, 15, 20, 30)]
        [0.008, 0.01, 0.011, 0.012, 0.018]
        """
        if self.length is None:
            return self.launch_s[weight - 1 if weight < self.batch else -1]
        return seconds_at(weight / self.length, self.least_s, self.launch_s)

    def until_s(self, weight: int) -> Sequence[float]:
        """The planned time until a launch of this weight gets to each of its exit points."""
        if self.length is None:
            return self._until_s[weight - 1 if weight < self.batch else -1]
        size = weight / self.length
        return [seconds_at(size, point.least_s, point.launch_s) for point in self.exits]

    def staying_s(self, weight: int, added: int, behind: int | None = None) -> float:
        """The planned time that `added` of a launch's weight costs after this block (None: from the start), if it stays
        to the end. Since others leave on the way, it costs more than its part of the launch.

        >>> half = ExitPoint(0, (0.01, 0.012), survival=0.5), ExitPoint(3, (0.03, 0.036))
        >>> stage = Stage(0, 4, batch=2, group="a", launch_s=(0.03, 0.035), exits=half)
        >>> round(stage.staying_s(2, 1), 3), round(stage.staying_s(2, 1, behind=0), 3), stage.staying_s(1, 1)
        (0.01, 0.008, 0.03)
        """
        first = 0 if behind is None else self.exit_at(behind) + 1
        if added == weight:  # without the first input there would be no launch
            one = min(self.length or 1, weight)
            ends_s = (0.0, *self.until_s(one))
            more_s = self.staying_s(weight, weight - one, behind) if one < weight else 0.0
            return ends_s[-1] - ends_s[first] + more_s
        ends_s, others_end_s = ((0.0, *self.until_s(each)) for each in (weight, weight - added))
        inside, staying_s = (self.survival, *(point.survival for point in self.exits)), 0.0
        for number in range(first, len(self.exits)):
            part_s, others_s = (ends[number + 1] - ends[number] for ends in (ends_s, others_end_s))
            share = max(inside[number] / self.survival, 1 / self.room) if self.survival else 1.0
            staying_s += max(0.0, part_s - others_s) / share
        return staying_s

    def exit_at(self, block: int) -> int:
        """The index of the exit point at this block, or of the first one after it."""
        return self._exit_by_block[block - self.start]

    @cached_property
    def _exit_by_block(self) -> tuple[int, ...]:
        blocks = [point.block for point in self.exits]
        return tuple(bisect_left(blocks, block) for block in range(self.start, self.stop))

    @cached_property
    def _until_s(self) -> tuple[tuple[float, ...], ...]:
        return tuple(zip(*(point.launch_s for point in self.exits), strict=True))

    @cached_property
    def seconds_per_weight(self) -> float:
        """The cost of a weight of 1 in a full batch."""
        return self.launch_s[-1] / self.room


def seconds_at(size: float, least_s: float, launch_s: Sequence[float]) -> float:
    """The time of a launch of any size, interpolated: `least_s` at size 0, `launch_s[n - 1]` at size n.

    >>> [round(seconds_at(size, 1.0, (2.0, 4.0)), 3) for size in (0.5, 1.0, 1.25, 2.0, 3.0)]
    [1.5, 2.0, 2.5, 4.0, 6.0]
    """
    if size >= len(launch_s):
        return launch_s[-1] * size / len(launch_s)
    below = int(size)
    below_s = launch_s[below - 1] if below else least_s
    return below_s + (size - below) * (launch_s[below] - below_s)


@dataclass(frozen=True)
class Route:
    """Stages that cover all blocks, in order. `beside`: the routes of further pipelines, each on its own groups.

    An input goes through one pipeline. `edges` are the blocks at which the second and later levels of a cascade begin.
    `thresholds` replace those of the network at these ramps.
    """

    stages: tuple[Stage, ...]
    beside: "tuple[Route, ...]" = ()
    edges: tuple[int, ...] = ()
    thresholds: Thresholds = ()

    @property
    def pipelines(self) -> "tuple[Route, ...]":
        return (replace(self, beside=()), *self.beside)

    @property
    def all_stages(self) -> "tuple[Stage, ...]":
        return tuple(stage for route in (self, *self.beside) for stage in route.stages)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of all groups, each once."""
        return tuple(dict.fromkeys(stage.group for stage in self.all_stages))

    @property
    def length(self) -> int | None:
        """The tokens of a planned input; None: every input weighs 1."""
        return self.stages[0].length

    @cached_property
    def ramps(self) -> OpenRamps:
        """The open ramps of the whole network, with their thresholds where these replace the network's own."""
        opened = frozenset[int]().union(*(stage.ramps for stage in self.stages))
        thresholds = dict(self.thresholds)
        return {ramp: thresholds.get(ramp) for ramp in sorted(opened)} if thresholds else opened

    @property
    def num_blocks(self) -> int:
        return self.stages[-1].stop

    def onward(self, block: int) -> Sequence[Stage]:
        """The stage that holds this block, and all after it."""
        return [stage for stage in self.stages if stage.stop > block]

    def keeps(self, stage: Stage) -> bool:
        """Whether the survivors of this stage stay on the same replica."""
        after = self.stages[self.numbers[stage.stop]] if stage.stop < self.num_blocks else None
        return after is not None and after.local and after.group == stage.group

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The index of the stage of each block. After a change of plans, inputs may begin inside a stage."""
        return tuple(number for number, stage in enumerate(self.stages) for _ in range(stage.start, stage.stop))

    @cached_property
    def remaining_s(self) -> tuple[float, ...]:
        """The planned time of full batches from the stage of each block to the end."""
        return tuple(sum(stage.launch_s[-1] for stage in self.onward(block)) for block in range(self.num_blocks))


def stops(cursor: int, stop: int, ramps: Collection[int]) -> Sequence[int]:
    """The blocks before which inputs may leave a launch: after every open ramp that it passes, and at its end.

    >>> stops(2, 8, {0, 3, 5, 7, 9})
    [4, 6, 8]
    """
    return sorted({ramp + 1 for ramp in ramps if cursor <= ramp < stop} | {stop})


def named_groups(plan: Plan, facts: Problem, name: Callable[[Placement], str]) -> list[str]:
    """The group of each of `plan.all_placements`. Pipelines of one lane share their groups; the first names them."""
    groups: dict[int, list[str]] = {}
    for lane, pipeline in zip(facts.lanes(plan), plan.pipelines, strict=True):
        groups.setdefault(lane, [name(placement) for placement in pipeline.placements])
    return [group for lane in facts.lanes(plan) for group in groups[lane]]


def route_of(plan: Plan, facts: Problem, groups: Sequence[str]) -> Route:
    """The plan's splits as stages. Their times come from the planner's own cost model, for every size of launch.

    `groups` names the replicas of each of `plan.all_placements`. Pipelines with the same groups become one route.
    """
    names = iter(groups)
    lanes = {tuple(next(names) for _ in pipeline.placements): pipeline for pipeline in plan.pipelines}
    first, *others = [
        Route(tuple(_stages(pipeline, facts, lane)), edges=facts.edges, thresholds=plan.thresholds)
        for lane, pipeline in lanes.items()
    ]
    return replace(first, beside=tuple(others))


def _stages(pipeline: Plan, facts: Problem, groups: Sequence[str]) -> Iterator[Stage]:
    reach, before = 1.0, None
    for split in pipeline.splits:
        number = next(index for index, placement in enumerate(pipeline.placements) if split in placement.splits)
        placement = pipeline.placements[number]
        stays = placement.local and before is placement
        source = None if before is None or stays else before.kind
        yield _stage(split, placement, groups[number], facts, source, reach)
        reach, before = work(split, facts, placement.kind, None, reach).survivors, placement


def _stage(split: Split, placement: Placement, group: str, facts: Problem, source: str | None, reach: float) -> Stage:
    """`source`: the kind of device that inputs come from over a link; `reach`: the share of inputs that get here."""
    kind, sizes = placement.kind, range(1, split.batch_size + 1)
    works = [work(split, facts, kind, source, reach, size) for size in sizes]
    least = min(1, facts.table(kind).batch_sizes[0])
    by_size = [until_s(split, facts, kind, reach, size) for size in (least, *sizes)]
    inside = inside_of(split, facts.survival, reach)
    exits = []
    for stop in stops(split.start, split.stop, split.ramps):
        least_s, *launch_s = [seconds[stop - 1 - split.start] for seconds in by_size]
        survival = inside[stop - split.start]
        exits.append(ExitPoint(stop - 1, tuple(launch_s), survival, least_s if facts.length else 0.0))
    return Stage(
        split.start,
        split.stop,
        split.batch_size,
        group,
        tuple(each.launch_s for each in works),
        reach,
        frozenset(split.ramps),
        placement.local,
        works[-1].transfer_s,
        facts.length,
        0.0 if facts.length is None else work(split, facts, kind, source, reach, least).launch_s,
        tuple(exits),
    )
