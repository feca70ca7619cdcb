"""What /stats tells: of every front that there is, together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deployments.dispatch.route import Route, Stage
from deployments.driver import Driver
from deployments.front.tally import OUTCOMES, Tally, merged
from deployments.front.usage import Usage, usage


@dataclass(frozen=True)
class Tell:
    """What all other fronts are asked when one is asked for /stats."""


@dataclass(frozen=True)
class Seen:
    """What one front knows."""

    tally: Tally
    route: Route
    inside: int  # inputs that were admitted and have no answer yet
    waiting: dict[tuple[str, int], int]  # of them, by group and next block
    replicas: dict[str, int]  # of each group
    usage: Usage

    @property
    def missing(self) -> list[str]:
        """Groups without a replica."""
        return [group for group, count in self.replicas.items() if not count]


def seen_by(driver: Driver) -> Seen:
    dispatcher = driver.dispatcher
    return Seen(driver.tally, dispatcher.route, dispatcher.inside, dispatcher.waiting(), dispatcher.replicas(), usage())


def told(seen: Sequence[Seen]) -> dict[str, Any]:
    """The first is who was asked. A route may change: fronts follow within milliseconds of each other."""
    tally, route = merged([each.tally for each in seen]), seen[0].route
    splits = [_of(stage, tally, seen) for stage in route.everywhere]
    return {
        "requests": {name: tally.outcomes[name] for name in OUTCOMES},
        "latency_ms": tally.latency_ms(),
        "inside": sum(each.inside for each in seen),
        "waiting": sum(sum(each.waiting.values()) for each in seen),
        "splits": splits,
        "exits": {str(block): tally.exits[block] for block in range(route.num_blocks)},
        "survival": tally.survival(route.num_blocks),
        "survivor_bytes": dict(tally.survivor_bytes),
        "fronts": [asdict(each.usage) for each in seen],
    }


def _of(stage: Stage, tally: Tally, seen: Sequence[Seen]) -> dict[str, Any]:
    where = stage.group, stage.start
    return {
        "blocks": [stage.start, stage.stop],
        "batch": stage.batch,
        "ramps": sorted(stage.ramps),
        "group": stage.group,
        "replicas": seen[0].replicas.get(stage.group, 0),
        "launches": tally.launches[where].count,
        "fill": round(tally.launches[where].fill, 3),
        "waiting": sum(each.waiting.get(where, 0) for each in seen),
    }
