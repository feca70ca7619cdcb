"""Plans a kind of device that has several names as one kind, and names its devices afterwards.

A plan names kinds: a pipeline on devices of several names is written as several pipelines beside each other, which
differ only in names and replicas. They are scored and served as one lane (Problem.lanes).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from isobatch.optimizer.pipelines.spread import joined
from isobatch.optimizer.plan import Placement, Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device

Names = dict[str, list[str]]  # the names of each kind, by the first one


def merged_by_kind(facts: Problem) -> Problem:
    """The same problem with each kind under its first name."""
    devices = {device.kind: device for device in facts.devices}
    together = [
        replace(devices[first], count=sum(devices[name].count for name in names))
        for first, names in _names(facts).items()
    ]
    return facts if len(together) == len(devices) else facts.with_devices(together)


def split_by_name(plan: Plan, facts: Problem) -> Plan | None:
    """A plan of the merged problem with devices of all names; None where a placement has fewer devices than names."""
    names, left = _names(facts), {device.kind: device.count for device in facts.devices}
    pipelines: list[Plan] = []
    for pipeline in plan.pipelines:
        parts = [list(_of_names(placement, names[placement.kind], left)) for placement in pipeline.placements]
        most = max(map(len, parts))
        if any(each.replicas < most for each in pipeline.placements):
            return None
        rows = zip(*(_in_parts(each, most) for each in parts), strict=True)
        pipelines += [replace(pipeline, placements=placements) for placements in rows]
    return replace(joined(pipelines), promise=plan.promise)


def _names(facts: Problem) -> Names:
    """The names of each kind. Devices of one kind agree in everything but their name and count."""
    names: dict[tuple[str, Device], list[str]] = defaultdict(list)
    for each in facts.devices:
        names[facts.first_names[each.kind], replace(each, kind="", count=0)].append(each.kind)
    return {kinds[0]: kinds for kinds in names.values()}


def _of_names(placement: Placement, names: list[str], left: dict[str, int]) -> Iterator[Placement]:
    """The placement under the name that leaves the fewest devices over, or else under several names."""
    enough = [kind for kind in names if left[kind] >= placement.replicas]
    missing = placement.replicas
    for kind in sorted(enough, key=lambda each: left[each])[:1] or sorted(names, key=lambda each: -left[each]):
        taken = min(left[kind], missing)
        if taken:
            yield replace(placement, kind=kind, replicas=taken)
        left[kind] -= taken
        missing -= taken


def _in_parts(placements: list[Placement], count: int) -> list[Placement]:
    """The same devices in `count` placements, one for every pipeline."""
    while len(placements) < count:
        largest = max(placements, key=lambda each: each.replicas)
        rest = replace(largest, replicas=largest.replicas - 1)
        placements = [*(each for each in placements if each is not largest), rest, replace(largest, replicas=1)]
    return placements
