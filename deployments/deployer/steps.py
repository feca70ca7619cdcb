"""The steps from one plan to another: start replicas, tell the fronts, end replicas. Independent of Ray."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic as now_s
from typing import Protocol

from optimizer.plan import Plan

DEPLOYER = "deployer"  # the name of its deployment
LOOK_EVERY_S = 0.25  # each look takes processor time of Serve, which is needed for what starts
COUNT_EVERY_S = 1.0  # Ray is asked so often whether the devices are there
STALE_S = 2.0  # Serve may tell for so long after a new attempt that the one before it failed
ReplicaCounts = Mapping[str, int]  # replicas by kind
NOTHING: ReplicaCounts = {}


@dataclass(frozen=True)
class ReplicaStates:
    """How many replicas a kind has in each state. `failed` is Serve's message on those that cannot start."""

    running: int = 0
    starting: int = 0
    stopping: int = 0
    failed: str = ""


class Fleet(Protocol):
    """The replicas, as the steps below need them. Calls may block."""

    def standing(self) -> dict[str, ReplicaStates]:
        """The replicas by state, of every kind that has an application."""
        ...

    def want(self, counts: ReplicaCounts) -> None:
        """Ask for so many replicas of these kinds, and return at once. Other kinds stay as they are."""
        ...

    def has_room(self, more: ReplicaCounts) -> bool:
        """Whether so many more replicas could start now beside the running ones."""
        ...

    def lacks(self, counts: ReplicaCounts) -> dict[str, int]:
        """For how many of so many replicas no node has a device, free or not, of each kind where that is so."""
        ...


class CannotStartError(Exception):
    """Some replicas that a plan needs do not start."""


class NoDevicesError(CannotStartError):
    """No node has the devices that they need."""


@dataclass(frozen=True)
class Moved:
    """A move that succeeded: the time until fronts followed, and for how long of it devices served neither plan."""

    seconds: float
    missing_s: float = 0.0


@dataclass(frozen=True)
class Undone:
    """A move that did not succeed, and why. The previous plan continues."""

    reason: str
    no_devices: bool = False  # those that it needs are not there, as of a node that vanished


async def move(
    fleet: Fleet,
    before: Plan,
    after: Plan,
    lead: Callable[[Plan], Awaitable[None]],
    meanwhile: Callable[[ReplicaCounts], Awaitable[None]],
    patience_s: float,
    stay: ReplicaCounts = NOTHING,
) -> Moved:
    """Start the replicas that the new plan adds, lead all fronts to it, then end those that it does not need.

    Where the new replicas do not fit beside the old ones, those that will go end first; until the new ones run, fronts
    follow a plan for the replicas that stay, to which `meanwhile` leads them. If the new ones do not start, the plan
    from before is restored, and CannotStartError says why: at once where their devices are not there, as of a node that
    vanishes. So many replicas of each kind `stay` beside those of the new plan.
    """
    started_s, has, wants = now_s(), before.devices(), after.devices()
    more = {kind: count for kind, count in wants.items() if count > has.get(kind, 0)}
    fewer = {kind: wants.get(kind, 0) for kind, count in has.items() if wants.get(kind, 0) < count}
    less = {kind: count + stay.get(kind, 0) for kind, count in fewer.items()}
    freed_s = None
    try:
        if less and not await asyncio.to_thread(fleet.has_room, _growth(has, more)):
            freed_s = now_s()
            await meanwhile({kind: fewer.get(kind, count) for kind, count in has.items()})
            await _freed(fleet, less, patience_s)
        await start(fleet, more, patience_s, only_here=True)
    except Exception:
        await asyncio.to_thread(fleet.want, {kind: has.get(kind, 0) for kind in (*more, *less)})
        if freed_s is not None:
            with suppress(CannotStartError):
                await start(fleet, has, patience_s, only_here=True)
            await lead(before)
        raise
    await lead(after)
    followed_s = now_s()
    await asyncio.to_thread(fleet.want, less)
    return Moved(followed_s - started_s, 0.0 if freed_s is None else followed_s - freed_s)


async def start(fleet: Fleet, counts: ReplicaCounts, patience_s: float, only_here: bool = False) -> None:
    """Ask for so many replicas of each kind; returns when they run. `only_here`: nobody waits for nodes to come."""
    failed = await _failed(fleet, counts)
    await asyncio.to_thread(fleet.want, counts)
    began_s = count_s = now_s()
    until_s = began_s + patience_s
    while late := await _below(fleet, counts, failed if now_s() < began_s + STALE_S else ()):
        if only_here and now_s() >= count_s:
            await _check_devices(fleet, {kind: counts[kind] for kind in late})
            count_s = now_s() + COUNT_EVERY_S
        if now_s() > until_s:
            told = ", ".join(f"{running} of {counts[kind]} {kind}" for kind, running in late.items())
            raise CannotStartError(f"after {patience_s:g} s only {told} run: are there enough devices?")
        await asyncio.sleep(LOOK_EVERY_S)


async def _check_devices(fleet: Fleet, counts: ReplicaCounts) -> None:
    if lacks := await asyncio.to_thread(fleet.lacks, counts):
        told = ", ".join(f"{count} of {counts[kind]} {kind}" for kind, count in lacks.items())
        raise NoDevicesError(f"no node has a device for {told}")


async def _failed(fleet: Fleet, counts: ReplicaCounts) -> list[str]:
    """The kinds of these that could not start when they were wanted before."""
    standing = await asyncio.to_thread(fleet.standing) if counts else {}
    return [kind for kind in counts if kind in standing and standing[kind].failed]


async def _below(fleet: Fleet, counts: ReplicaCounts, excused: Collection[str]) -> dict[str, int]:
    """The number of running replicas, of each kind that has too few. Those that are excused may have failed before."""
    if not counts:
        return {}
    standing = await asyncio.to_thread(fleet.standing)
    for kind in counts:
        if kind in standing and standing[kind].failed and kind not in excused:
            raise CannotStartError(standing[kind].failed)
    running = {kind: standing[kind].running if kind in standing else 0 for kind in counts}
    return {kind: running[kind] for kind, count in counts.items() if running[kind] < count}


async def _freed(fleet: Fleet, counts: ReplicaCounts, patience_s: float) -> None:
    await asyncio.to_thread(fleet.want, counts)
    until_s = now_s() + patience_s
    while now_s() < until_s:
        standing = await asyncio.to_thread(fleet.standing)
        left = {kind: standing[kind].running + standing[kind].stopping for kind in counts if kind in standing}
        if all(left.get(kind, 0) <= count for kind, count in counts.items()):
            return
        await asyncio.sleep(LOOK_EVERY_S)


def _growth(before: ReplicaCounts, more: ReplicaCounts) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in more.items()}
