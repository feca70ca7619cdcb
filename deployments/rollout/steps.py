"""The order in which replicas come and go while an application is led from one plan to another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic as now_s
from typing import Protocol

from optimizer.plan import Plan

LOOK_EVERY_S = 0.1
Counts = Mapping[str, int]  # replicas by kind


@dataclass(frozen=True)
class Standing:
    """How a kind's replicas stand. `failed` is what Serve says of those that cannot start."""

    running: int = 0
    starting: int = 0
    stopping: int = 0
    failed: str = ""


class Fleet(Protocol):
    """What a roll-out asks of the replicas. Its calls may block."""

    def standing(self) -> dict[str, Standing]:
        """Of every kind that has an application."""
        ...

    def want(self, counts: Counts) -> None:
        """From now on so many replicas of these kinds. Other kinds stay as they are."""
        ...

    def has_room(self, more: Counts) -> bool:
        """Whether so many more replicas could start now, beside all that run."""
        ...


class CannotStartError(Exception):
    """Replicas that a plan needs do not come up."""


@dataclass(frozen=True)
class Moved:
    """How long it took until the new plan was followed, and for how long of that devices were missing to both."""

    seconds: float
    missing_s: float = 0.0


@dataclass(frozen=True)
class Undone:
    """Why a plan was not rolled out. The one from before goes on."""

    reason: str


async def move(
    fleet: Fleet,
    before: Plan,
    after: Plan,
    lead: Callable[[Plan], Awaitable[None]],
    meanwhile: Callable[[Counts], Awaitable[Plan | None]],
    patience_s: float,
) -> Moved:
    """Add what the new plan needs, lead all fronts to it, take away what it does not.

    Where the new replicas have no room beside the old ones, those that will go are freed first. For that long those
    that stay do what they can: `meanwhile` plans for them. If the new ones do not come up, the plan from before is
    restored and CannotStartError says why.
    """
    started_s, has, wants = now_s(), before.devices(), after.devices()
    more = {kind: count for kind, count in wants.items() if count > has.get(kind, 0)}
    less = {kind: wants.get(kind, 0) for kind, count in has.items() if wants.get(kind, 0) < count}
    freed_s = None
    try:
        if less and not await asyncio.to_thread(fleet.has_room, _growth(has, more)):
            freed_s = now_s()
            if fewer := await meanwhile({kind: less.get(kind, count) for kind, count in has.items()}):
                await lead(fewer)
            await _freed(fleet, less, patience_s)
        await risen(fleet, more, patience_s)
    except Exception:
        await asyncio.to_thread(fleet.want, {kind: has.get(kind, 0) for kind in (*more, *less)})
        if freed_s is not None:
            with suppress(CannotStartError):
                await risen(fleet, has, patience_s)
            await lead(before)
        raise
    await lead(after)
    followed_s = now_s()
    await asyncio.to_thread(fleet.want, less)
    return Moved(followed_s - started_s, 0.0 if freed_s is None else followed_s - freed_s)


async def risen(fleet: Fleet, counts: Counts, patience_s: float) -> None:
    """Returns when so many replicas of each kind run."""
    await asyncio.to_thread(fleet.want, counts)
    until_s = now_s() + patience_s
    while late := await _below(fleet, counts):
        if now_s() > until_s:
            told = ", ".join(f"{running} of {counts[kind]} {kind}" for kind, running in late.items())
            raise CannotStartError(f"after {patience_s:g} s only {told} run: are there enough devices?")
        await asyncio.sleep(LOOK_EVERY_S)


async def _below(fleet: Fleet, counts: Counts) -> dict[str, int]:
    """The kinds that have too few replicas, and how many those have."""
    if not counts:
        return {}
    standing = await asyncio.to_thread(fleet.standing)
    for kind in counts:
        if kind in standing and standing[kind].failed:
            raise CannotStartError(standing[kind].failed)
    running = {kind: standing[kind].running if kind in standing else 0 for kind in counts}
    return {kind: running[kind] for kind, count in counts.items() if running[kind] < count}


async def _freed(fleet: Fleet, counts: Counts, patience_s: float) -> None:
    await asyncio.to_thread(fleet.want, counts)
    until_s = now_s() + patience_s
    while now_s() < until_s:
        standing = await asyncio.to_thread(fleet.standing)
        if all(standing[kind].running + standing[kind].stopping <= count for kind, count in counts.items()):
            return
        await asyncio.sleep(LOOK_EVERY_S)


def _growth(before: Counts, more: Counts) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in more.items()}
