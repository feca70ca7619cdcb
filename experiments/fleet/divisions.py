"""Compares `divide` with all divisions of small fleets, and times it on large ones.

The comparison shares only the planner's plan of one application with `divide`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from typing import get_args

import numpy as np

from experiments.planner.random_problems import random_objective, random_problem
from experiments.planner.settings import BERT_BASE, BERT_LARGE, DISTILBERT, FOUR_KINDS, RESNET50, evenly
from isobatch.optimizer.fleets.application import BEYOND, FleetApplication, FleetGoal, KindCounts
from isobatch.optimizer.fleets.division import divide
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.devices import Device, fleet
from isobatch.profiles.errors import UserError

GOALS: tuple[FleetGoal, ...] = get_args(FleetGoal)
NETWORKS = (BERT_BASE, RESNET50, DISTILBERT, BERT_LARGE)
MOST_DEVICES = 6
OF_TWO_KINDS = (2, 4, 5, 7, 8)  # the rests of such seeds of random problems
LARGE = {"10_on_46": (10, FOUR_KINDS), "50_on_1000": (50, evenly(1000, 4))}  # applications and devices
Value = tuple[float, ...]


def random_fleet(seed: int) -> tuple[list[FleetApplication], list[Device]]:
    """Two or three small applications, and up to six devices of two kinds."""
    random = np.random.default_rng(seed)
    first = int(random.integers(1, MOST_DEVICES))
    counts = first, int(random.integers(1, MOST_DEVICES - first + 1))
    prices = [float(price) for price in random.choice([0.5, 1.0, 2.5], 2)]
    applications = []
    for number in range(int(random.integers(2, 4))):
        facts = random_problem(int(random.integers(10**5)) * 11 + int(random.choice(OF_TWO_KINDS)))
        rows = zip(facts.devices, counts, prices, strict=True)
        here = [replace(each, count=count, price_per_hour=price, memory_bytes=10_000) for each, count, price in rows]
        facts = facts.with_devices(here)
        objective = Objective(slo_s=random_objective(seed + number, facts).slo_s, max_batch=2)
        per_s = 1 / float(np.mean([np.sum(table.block_s[0]) for table in facts.tables]))
        application = FleetApplication(
            f"application{number}",
            facts,
            objective,
            weight=float(random.choice([1.0, 2.0, 5.0])),
            rate_per_s=per_s * float(random.uniform(0.3, 3)),
            least_per_s=float(random.choice([0.0, 0.2, 1.0], p=[0.4, 0.4, 0.2])) * per_s,
        )
        applications.append(application)
    return applications, here


def divides_best(seed: int, goal: FleetGoal) -> bool:
    """Whether `divide` finds the best division of a small fleet, or an error where none is possible."""
    applications, devices = random_fleet(seed)
    best = best_by_trying(applications, devices, goal)
    try:
        parts = divide(applications, devices, goal).parts
    except UserError:
        return best is None
    result = value_on(applications, devices, parts, goal)
    return best is not None and result is not None and np.allclose(result, best, rtol=1e-9)


def best_by_trying(
    applications: Sequence[FleetApplication], devices: Sequence[Device], goal: FleetGoal
) -> Value | None:
    """The value of the best of all divisions; None if no division meets all needs.

    An application without a plan on all devices is an error, even if it may get no device.
    """
    parts = list(product(*(range(each.count + 1) for each in devices)))
    worths = [{part: worth_on(each, devices, part, goal) for part in parts} for each in applications]
    if not all(each[parts[-1]] for each in worths):
        return None
    return max((_value([*each], goal) for each in _divisions(worths, devices)), default=None)


def worth_on(
    application: FleetApplication, devices: Sequence[Device], part: KindCounts, goal: FleetGoal
) -> float | None:
    """The value of some devices for an application (docs/planner.md); None if they do not suffice."""
    here = [replace(each, count=count) for each, count in zip(devices, part, strict=True) if count]
    least, rate, weight = application.least_per_s, application.rate_per_s or inf, application.weight
    objective = replace(application.objective, goal="goodput")
    if goal == "cost":
        objective = replace(objective, goal="cost", goodput_per_s=max(least, rate))
    plan = side_by_side(application.facts.with_devices(here), objective) if here else None
    promise = plan.promise if plan else None
    if goal == "cost":
        return -promise.cost_per_hour if promise else None
    sustained = promise.goodput_per_s if promise else 0.0
    if sustained < least * (1 - 1e-9):
        return None
    if goal == "fairness":
        return sustained / rate / weight if rate < inf else sustained / weight
    return weight * sustained if sustained <= rate else weight * (rate + BEYOND * (sustained - rate))


def _divisions(
    worths: Sequence[Mapping[KindCounts, float | None]], devices: Sequence[Device]
) -> Iterator[tuple[float, ...]]:
    """The values of the applications in every division of the devices."""
    counts = np.array([each.count for each in devices])
    for parts in product(*worths):
        result = [of_each[part] for of_each, part in zip(worths, parts, strict=True)]
        if None not in result and (np.sum(parts, axis=0) <= counts).all():
            yield tuple(worth for worth in result if worth is not None)


def _value(worths: Sequence[float], goal: FleetGoal) -> Value:
    return tuple(sorted(worths)) if goal == "fairness" else (float(np.sum(worths)),)


def value_on(
    applications: Sequence[FleetApplication], devices: Sequence[Device], parts: Sequence[KindCounts], goal: FleetGoal
) -> Value | None:
    """The value of one division; None if an application has less than it needs."""
    worths = [worth_on(each, devices, part, goal) for each, part in zip(applications, parts, strict=True)]
    return None if None in worths else _value([worth for worth in worths if worth is not None], goal)


@cache
def large_fleet(name: str, rated: bool) -> tuple[list[FleetApplication], tuple[Device, ...]]:
    """Networks of E3's evaluation with several SLOs and weights. `rated`: with rates of about 60 % of their shares."""
    many, text = LARGE[name]
    random, devices = np.random.default_rng(many), fleet(text)
    applications = []
    for number in range(many):
        facts, slo_s = NETWORKS[number % len(NETWORKS)].facts(text), float(random.choice([0.05, 0.1, 0.2]))
        alone = side_by_side(facts, Objective(slo_s=slo_s), 0.01)
        assert alone is not None
        assert alone.promise is not None
        rate_per_s = 0.6 * float(random.uniform(0.3, 1.7)) * alone.promise.goodput_per_s / many if rated else None
        weight = float(random.choice([1, 2, 4]))
        applications.append(FleetApplication(f"application{number}", facts, Objective(slo_s=slo_s), weight, rate_per_s))
    return applications, devices
