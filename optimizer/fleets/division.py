"""Divides the devices of a fleet among applications.

On small fleets every part of the fleet is planned for every application, and with `most` applications

    best(a, left) = max over part <= left of value(best(a - 1, left - part), worth of part for application a)

is the best of all divisions. Devices may stay unused, so with more devices no value is smaller. On larger fleets the
best of equal shares and the program's proposals is taken; after each proposal the plans set the program's scales.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, product
from math import prod
from operator import itemgetter

import numpy as np

from isobatch.optimizer.effort import MOST_GAP, SAME
from isobatch.optimizer.fleets.application import (
    NEAR,
    SOMETHING,
    FleetApplication,
    FleetGoal,
    KindCounts,
    PartPlans,
    value_of,
)
from isobatch.optimizer.fleets.program import DivisionProgram
from isobatch.profiles.devices import Device
from isobatch.profiles.errors import UserError

MOST_PARTS = 128  # of a fleet that is divided exactly
MOST_PLANS = 400  # for that
ROUNDS, ENOUGH_ROUNDS = 8, 3  # of proposals; where one gives every application what it needs, fewer are enough

PartWorths = Mapping[KindCounts, float]  # parts of the fleet that an application may get, with what they are worth


@dataclass(frozen=True)
class Comparison:
    """The estimated goodput of an application on its devices, on an equal share, and alone on the whole fleet."""

    estimated_per_s: float
    equal_share_per_s: float
    alone_per_s: float


@dataclass(frozen=True)
class Division:
    """The devices of each application, by kind of the fleet. No division is better by more than `gap`, by estimate."""

    parts: tuple[KindCounts, ...]
    gap: float = 0.0
    exact: bool = True  # all divisions were compared
    estimates: tuple[Comparison, ...] = ()  # of each application; none for one alone
    value: tuple[float, ...] = ()  # by estimate, as of `value_of`


def divide(
    applications: Sequence[FleetApplication],
    devices: Sequence[Device],
    goal: FleetGoal,
    gap: float = 0.0,
    most_plans: int = MOST_PLANS,
) -> Division:
    """The division with the most value for the goal. The error names an application that cannot have what it needs.

    One application alone gets all devices. `gap` is that of the plans; all divisions are compared where an application
    can have at most `MOST_PARTS` parts of the fleet, and that takes at most `most_plans` plans.
    """
    counts = tuple(each.count for each in devices)
    if len(applications) == 1:
        return Division((counts,))
    plans = part_plans(applications, devices, gap, most_plans)
    for each in plans:
        each.check_any(counts)
    division = best_division(plans, devices, goal, most_plans)
    rows = zip(plans, division.parts, equal_shares(counts, len(plans)), strict=True)
    estimates = [Comparison(*map(each.goodput_per_s, (part, equal, counts))) for each, part, equal in rows]
    return replace(division, estimates=tuple(estimates), value=_value(plans, goal, division.parts) or ())


def part_plans(
    applications: Sequence[FleetApplication], devices: Sequence[Device], gap: float = 0.0, most_plans: int = MOST_PLANS
) -> list[PartPlans]:
    exact = _is_small(len(applications), devices, most_plans)
    return [PartPlans(each, devices, gap if exact else max(gap, NEAR)) for each in applications]


def best_division(
    plans: Sequence[PartPlans], devices: Sequence[Device], goal: FleetGoal, most_plans: int = MOST_PLANS,
    known: Sequence[tuple[KindCounts, ...]] = (),
) -> Division:  # fmt: skip
    """As `divide`, without estimates. On a large fleet the best of `known` divisions and of those that it finds."""
    if _is_small(len(plans), devices, most_plans):
        return _exact(plans, tuple(each.count for each in devices), goal)
    return _near(plans, devices, goal, known)


def _value(plans: Sequence[PartPlans], goal: FleetGoal, parts: Sequence[KindCounts]) -> tuple[float, ...] | None:
    """The value of one division, by the planner's estimates; None if an application has less than it needs."""
    worths = [each.worth(goal, part) for each, part in zip(plans, parts, strict=True)]
    return None if None in worths else value_of(goal, [worth for worth in worths if worth is not None])


def _is_small(applications: int, devices: Sequence[Device], most_plans: int) -> bool:
    parts = prod(each.count + 1 for each in devices)
    return parts <= MOST_PARTS and parts * applications <= most_plans


def equal_shares(counts: KindCounts, applications: int) -> tuple[KindCounts, ...]:
    """Devices dealt like cards: kind by kind, one to each application in turn.

    >>> equal_shares((3, 2), 2)
    ((2, 1), (1, 1))
    """
    edges = list(pairwise((0, *accumulate(counts))))
    return tuple(
        tuple(sum(number % applications == application for number in range(*edge)) for edge in edges)
        for application in range(applications)
    )


def _exact(plans: Sequence[PartPlans], counts: KindCounts, goal: FleetGoal) -> Division:
    parts = list(product(*(range(count + 1) for count in counts)))
    options = [{part: worth for part in parts if (worth := each.worth(goal, part)) is not None} for each in plans]
    solution = _best(options, counts, goal)
    if solution is None:

        def most_per_s(index: int, before: Sequence[int]) -> float:
            """The highest goodput of an application if those before it get what they need, and the rest nothing."""
            needing = [dict.fromkeys(options[each], 0.0) for each in before]
            most = {part: plans[index].goodput_per_s(part) for part in parts}
            solution = _best([*needing, most], counts, "goodput")
            return most[solution[-1]] if solution else 0.0

        raise UserError(_missing([each.application for each in plans], goal, most_per_s))
    return Division(solution)


def _best(options: Sequence[PartWorths], counts: KindCounts, goal: FleetGoal) -> tuple[KindCounts, ...] | None:
    """The best choice of a part for each application, out of its options; None: there is none."""
    lefts = list(product(*(range(count + 1) for count in counts)))
    best: dict[KindCounts, tuple[tuple[float, ...], tuple[KindCounts, ...]]] = dict.fromkeys(lefts, ((), ()))
    for worths in options:
        following = {}
        for left in lefts:
            choices = [
                (value_of(goal, (*before[0], worth)), (*before[1], part))
                for part, worth in worths.items()
                if (before := best.get(tuple(has - used for has, used in zip(left, part, strict=True))))
            ]
            if choices:
                following[left] = max(choices, key=itemgetter(0))
        best = following
    return best[counts][1] if counts in best else None


def _missing(
    applications: Sequence[FleetApplication], goal: FleetGoal, most_per_s: Callable[[int, Sequence[int]], float]
) -> str:
    """Which application cannot have what it needs, and how much is missing: those of higher priority come first."""
    order = sorted(range(len(applications)), key=lambda index: -applications[index].priority)
    for place, index in enumerate(order):
        needed_per_s, before = applications[index].needed_per_s(goal), order[:place]
        most = most_per_s(index, before)
        if most < needed_per_s * (1 - SAME):
            names = ", ".join(applications[each].name for each in before)
            beside = f" beside what {names} must have" if names else ""
            if needed_per_s <= SOMETHING:
                return f"{applications[index].name}: no device that it could use is left{beside}: add devices"
            needs = f"{applications[index].name} needs {needed_per_s:.6g} per second"
            return f"{needs}, these devices sustain {most:.6g}{beside}: {needed_per_s - most:.6g} are missing"
    return "no division was found in which every application has what it needs: ask for less, or add devices"


def _near(
    plans: Sequence[PartPlans], devices: Sequence[Device], goal: FleetGoal, known: Sequence[tuple[KindCounts, ...]]
) -> Division:
    applications = [each.application for each in plans]
    held = [each.held for each in plans if each.held is not None]
    lost_share = max(each.lost_share for each in plans)
    program = DivisionProgram(applications, goal, devices, [each.worths for each in plans], held, lost_share)
    bound = program.bound()
    if bound is None:
        raise UserError(_missing(applications, goal, program.most_per_s))
    best: tuple[tuple[float, ...], tuple[KindCounts, ...]] | None = None
    first = known or [equal_shares(tuple(each.count for each in devices), len(applications))]
    for tried, parts in enumerate(chain(first, _proposals(plans, program))):
        if best and tried >= len(first) + ENOUGH_ROUNDS:
            break
        if value := _value(plans, goal, parts):
            best = max(best or (value, parts), (value, parts), key=itemgetter(0))
    if best is None:
        raise UserError(_missing(applications, goal, program.most_per_s))
    (worth, *_), parts = best
    return Division(parts, _gap(worth, bound, goal), exact=False)


def _gap(worth: float, bound: float, goal: FleetGoal) -> float:
    """The share by which another division could be better than one of this worth."""
    if worth >= bound:
        return 0.0
    unit = abs(bound if goal == "cost" else worth)  # 0 where free devices may suffice, or an application gets none
    return min((bound - worth) / unit, MOST_GAP) if unit else MOST_GAP


def _proposals(plans: Sequence[PartPlans], program: DivisionProgram) -> Iterator[tuple[KindCounts, ...]]:
    """Divisions in whole devices. Each one lowers `scales` to the share of the bounds that its plans sustain."""
    needed, scales, proposed = program.needed, np.ones(len(plans)), set[tuple[KindCounts, ...]]()
    for _ in range(ROUNDS):
        parts = program.proposal(needed, scales)
        if parts is None or parts in proposed:
            return
        proposed.add(parts)
        yield parts
        for index, (each, part) in enumerate(zip(plans, parts, strict=True)):
            bound_per_s = float((program.worths[index].rows @ np.array(part)).min())
            if sustained_per_s := each.goodput_per_s(part):
                scales[index] = min(scales[index], sustained_per_s / bound_per_s)
            elif needed[index]:  # so few devices do nothing
                needed[index] = max(needed[index], 2 * scales[index] * bound_per_s)
