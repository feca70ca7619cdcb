"""Plans that differ from a given plan by one move. The simulator tries them (cluster/simulator/plan_choice.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, permutations

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.spread import joined
from isobatch.optimizer.plan import Plan, Split
from isobatch.optimizer.problem import Problem, split_with_ramps

Changes = dict[Split, tuple[Split, ...]]  # the splits that replace a split


def neighbours(plan: Plan, facts: Problem, objective: Objective) -> Iterator[Plan]:
    """Plans with another batch size, cut, ramp, replica, or way of survivors, one at a time, within devices, cuts and
    batch limits."""
    pipelines = plan.pipelines
    for index, pipeline in enumerate(pipelines):
        for other in _changed(pipeline, facts, objective):
            moved = joined([*pipelines[:index], other, *pipelines[index + 1 :]])
            if _allowed(other, facts, objective) and not evaluate(moved, facts).broken:
                yield moved
    yield from _replicas(pipelines, facts.lanes(plan))


def _changed(pipeline: Plan, facts: Problem, objective: Objective) -> Iterator[Plan]:
    changes = chain(
        _batches(pipeline, facts, objective), _cuts(pipeline, facts), _merged(pipeline, facts),
        _parted(pipeline, facts), _ramps(pipeline, facts),
    )  # fmt: skip
    for change in changes:
        placements = (
            replace(each, splits=tuple(new for split in each.splits for new in change.get(split, (split,))))
            for each in pipeline.placements
        )
        yield replace(pipeline, placements=tuple(placements))
    for placement in pipeline.placements:
        if placement.replicas > 1 and len(placement.splits) > 1:
            other = replace(placement, local=not placement.local)
            placements = (other if each is placement else each for each in pipeline.placements)
            yield replace(pipeline, placements=tuple(placements))


def _allowed(plan: Plan, facts: Problem, objective: Objective) -> bool:
    cuts = {split.start for split in plan.splits} - {0}
    if facts.keeps_open and plan.ramps and {*plan.ramps} != _leaving(facts):
        return False
    return {*facts.edges} <= cuts and (objective.cuts is None or cuts == {*objective.cuts, *facts.edges})


def _leaving(facts: Problem) -> set[int]:
    """The ramps at which inputs leave while all are open."""
    return {block for block in facts.ramp_blocks if facts.survival[block + 1] < facts.survival[block]}


def _inner(split: Split) -> bool:
    return any(ramp < split.stop - 1 for ramp in split.ramps)


def _batches(plan: Plan, facts: Problem, objective: Objective) -> Iterator[Changes]:
    """One more, one fewer, a quarter more, a fifth fewer, twice and half as many: small steps may stay on a plateau."""
    least, most = objective.batches
    for split in plan.splits:
        largest = min(most, facts.table(plan.placement_of(split).kind).largest)
        size = split.batch_size
        sizes = {size - 1, size + 1, round(0.8 * size), round(1.25 * size), size // 2, 2 * size}
        for other in sorted(sizes - {size}):
            if least <= other <= largest:
                yield {split: (replace(split, batch_size=other),)}


def _cuts(plan: Plan, facts: Problem) -> Iterator[Changes]:
    """Each cut a block earlier or later."""
    for early, late in pairwise(plan.splits):
        for cut in (early.stop - 1, early.stop + 1):
            if early.start < cut < late.stop:
                yield {
                    early: (split_with_ramps(facts, early.start, cut, early.batch_size, _inner(early)),),
                    late: (split_with_ramps(facts, cut, late.stop, late.batch_size, _inner(late)),),
                }


def _merged(plan: Plan, facts: Problem) -> Iterator[Changes]:
    """Two neighbouring splits of one placement as a single split: with their ramps, all, or no inner ones."""
    for early, late in pairwise(plan.splits):
        if plan.placement_of(early) is plan.placement_of(late):
            kept = replace(early, stop=late.stop, ramps=early.ramps + late.ramps)
            ends = early.start, late.stop, early.batch_size
            for whole in dict.fromkeys((kept, *(split_with_ramps(facts, *ends, inner) for inner in (False, True)))):
                yield {early: (whole,), late: ()}


def _parted(plan: Plan, facts: Problem) -> Iterator[Changes]:
    for split in plan.splits:
        for cut in range(split.start + 1, split.stop):
            ends = ((split.start, cut), (cut, split.stop))
            yield {split: tuple(split_with_ramps(facts, *each, split.batch_size, _inner(split)) for each in ends)}


def _ramps(plan: Plan, facts: Problem) -> Iterator[Changes]:
    """One ramp inside a split opened or closed, as the search opens all of them or none."""
    for split in plan.splits:
        for ramp in _leaving(facts).intersection(range(split.start, split.stop - 1)):
            yield {split: (replace(split, ramps=tuple(sorted({*split.ramps} ^ {ramp}))),)}


def _replicas(pipelines: Sequence[Plan], lanes: Sequence[int]) -> Iterator[Plan]:
    """One device moved between two placements of its kind, which may be in different lanes."""
    places = [(at, index) for at, pipeline in enumerate(pipelines) for index in range(len(pipeline.placements))]
    for source, target in permutations(places, 2):
        giver, taker = (pipelines[at].placements[index] for at, index in (source, target))
        same_place = (lanes[source[0]], source[1]) == (lanes[target[0]], target[1])
        if giver.kind == taker.kind and giver.replicas > 1 and not same_place:
            counts = {source: giver.replicas - 1, target: taker.replicas + 1}
            yield joined([_counted(pipeline, at, counts) for at, pipeline in enumerate(pipelines)])


def _counted(pipeline: Plan, at: int, counts: dict[tuple[int, int], int]) -> Plan:
    placements = enumerate(pipeline.placements)
    counted = (replace(each, replicas=counts.get((at, index), each.replicas)) for index, each in placements)
    return replace(pipeline, placements=tuple(counted))
