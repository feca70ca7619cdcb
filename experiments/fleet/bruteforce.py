"""Compares the arbiter's decisions on small fleets with all divisions of the devices.

The comparison shares only the planner's plan of one application with the arbiter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from experiments.fleet.divisions import random_fleet
from isobatch.cluster.controller.arbiter import Arbiter
from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms
from isobatch.cluster.controller.fleet_division import Standing
from isobatch.optimizer.fleets.application import BEYOND, FleetApplication, KindCounts
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.devices import Device

WINDOW_S = 120.0
GAIN = 0.03
RESERVE = 0.1  # of rates and needs
LEAST_ASKED = 0.01  # of what all devices sustain
CLOSE = 1e-9
Parts = tuple[KindCounts, ...]


@dataclass(frozen=True)
class SmallFleet:
    """Applications on a few devices. `own`: each application's own devices; `present`: those that it has now."""

    applications: Sequence[FleetApplication]
    devices: Sequence[Device]
    own: Parts
    present: Parts
    start_s: float

    @classmethod
    def random(cls, seed: int) -> "SmallFleet":
        applications, devices = random_fleet(seed)
        random = np.random.default_rng([seed, 1])
        asks = [
            replace(
                each,
                rate_per_s=float(random.uniform(0.0, 2.0)) * (each.rate_per_s or 1.0),
                priority=int(random.integers(3)),
                kept=float(random.choice([0.8, 1.0])),
            )
            for each in applications
        ]
        own, present = (_dealt(random, devices, len(asks)) for _ in range(2))
        return cls(asks, devices, own, present, start_s=float(random.choice([0.0, 10.0, 40.0])))

    @property
    def config(self) -> ArbiterConfig:
        members = tuple(
            MemberTerms(
                name=each.name,
                weight=each.weight,
                least_per_s=each.least_per_s,
                priority=each.priority,
                devices=self._budget(part),
                controller="c",
            )
            for each, part in zip(self.applications, self.own, strict=True)
        )
        devices = {each.kind: each.count for each in self.devices}
        return ArbiterConfig(devices=devices, applications=members, replan_every_s=WINDOW_S, least_gain=GAIN)

    def decided(self) -> Parts:
        """The arbiter's division at the end of its first window."""
        standings = {
            each.name: Standing(
                each.facts,
                each.objective,
                each.rate_per_s or 0.0,
                each.kept,
                self._budget(part),
                self._budget(part),
                refuses=False,
                start_s=self.start_s,
            )
            for each, part in zip(self.applications, self.present, strict=True)
        }
        arbiter = Arbiter(self.config)
        for at_s in (0.0, WINDOW_S):
            arbiter.look(standings, self.config.devices, at_s)
        budgets = arbiter.decisions[-1].budgets
        if budgets is None:
            return self.present
        rows = (budgets[each.name] for each in self.applications)
        return tuple(tuple(row[device.kind] for device in self.devices) for row in rows)

    def _budget(self, part: KindCounts) -> dict[str, int]:
        return {each.kind: count for each, count in zip(self.devices, part, strict=True)}


def agrees(seed: int) -> bool:
    """Whether the arbiter changes to the best of all divisions if it gains enough, and else changes nothing."""
    fleet = SmallFleet.random(seed)
    tables = [_sustained(each, fleet.devices) for each in fleet.applications]
    whole = tuple(each.count for each in fleet.devices)
    if not all(table[whole] for table in tables):
        return True  # the arbiter leaves out an application that the fleet cannot run
    asks = [
        replace(each, rate_per_s=max(each.rate_per_s or 0.0, LEAST_ASKED * table[whole]))
        for each, table in zip(fleet.applications, tables, strict=True)
    ]
    divisions = list(_divisions(fleet.devices, len(asks)))
    for needs in _needs(asks, tables, fleet.own):
        allowed = [parts for parts in divisions if _has(tables, parts, needs)]
        if allowed:
            break

    def value(parts: Parts, beyond: float) -> float:
        return _value(asks, tables, parts, beyond, fleet)

    best = max(value(parts, BEYOND) for parts in allowed)
    result = max(value(parts, 0.0) for parts in allowed if value(parts, BEYOND) >= best - CLOSE)
    before = value(fleet.present, 0.0)
    enough = [need / (1 + RESERVE) for need in needs]  # an application that lacks only its reserve takes no devices
    stays = fleet.present in divisions and _has(tables, fleet.present, enough) and result - before < GAIN * before
    decided = fleet.decided()
    if stays:
        return decided == fleet.present
    return decided in allowed and value(decided, BEYOND) >= best * (1 - CLOSE)


def _dealt(random: np.random.Generator, devices: Sequence[Device], applications: int) -> Parts:
    """Give each device to a random application."""
    rows = [np.bincount(random.integers(applications, size=each.count), minlength=applications) for each in devices]
    return tuple(tuple(int(count) for count in part) for part in np.array(rows).T)


def _sustained(application: FleetApplication, devices: Sequence[Device]) -> Mapping[KindCounts, float]:
    """The goodput of an application on each part of the devices."""
    table = {}
    for part in product(*(range(each.count + 1) for each in devices)):
        here = [replace(each, count=count) for each, count in zip(devices, part, strict=True) if count]
        plan = side_by_side(application.facts.with_devices(here), application.objective) if here else None
        table[part] = application.kept * (plan.promise.goodput_per_s if plan and plan.promise else 0.0)
    return table


def _divisions(devices: Sequence[Device], applications: int) -> Iterator[Parts]:
    counts = np.array([each.count for each in devices])
    for parts in product(product(*(range(count + 1) for count in counts)), repeat=applications):
        if (np.sum(parts, axis=0) <= counts).all():
            yield parts


def _needs(
    asks: Sequence[FleetApplication], tables: Sequence[Mapping[KindCounts, float]], own: Parts
) -> Iterator[list[float]]:
    """The needs of each application, given up in turn: first of low priority, and of equals the later application."""
    order = sorted(range(len(asks)), key=lambda index: (asks[index].priority, -index))
    sustained = [table[part] for table, part in zip(tables, own, strict=True)]
    lends = [min(each.rate_per_s or 0.0, most) for each, most in zip(asks, sustained, strict=True)]
    reached = [min(each.least_per_s, most) for each, most in zip(asks, sustained, strict=True)]
    needs = [max(each.least_per_s, lent) for each, lent in zip(asks, lends, strict=True)]
    yield list(needs)
    for lower in (list(map(max, reached, lends)), reached, [0.0] * len(asks)):
        for index in order:
            needs[index] = lower[index]
            yield list(needs)


def _has(tables: Sequence[Mapping[KindCounts, float]], parts: Parts, needs: Sequence[float]) -> bool:
    return all(table[part] >= need * (1 - 1e-6) for table, part, need in zip(tables, parts, needs, strict=True))


def _value(
    asks: Sequence[FleetApplication], tables: Sequence[Mapping[KindCounts, float]], parts: Parts, beyond: float,
    fleet: SmallFleet,
) -> float:  # fmt: skip
    """The weighted goodput of a division. Goodput beyond the expected rate counts with the share `beyond`.

    Devices that change hands answer nothing until their replicas have started.
    """
    value = 0.0
    for each, table, part, present in zip(asks, tables, parts, fleet.present, strict=True):
        gained = sum(count - has for count, has in zip(part, present, strict=True) if count > has)
        sustained = table[part] * (1 - min(1.0, fleet.start_s / WINDOW_S) * gained / max(1, sum(part)))
        first = min(sustained, each.rate_per_s or 0.0)
        value += each.weight * (first + beyond * (sustained - first))
    return value
