"""The steps from one plan to another: start replicas, switch the fronts over, end replicas. Independent of Ray."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic as now_s
from typing import Protocol

from isobatch.optimizer.plan import Plan

log = logging.getLogger("ray.serve")
FRONT = "front"  # the name of the fronts' Serve deployment; a decoder's fronts also change its replicas' plan
# Its name if there are several fronts without a plan, each with the whole network: HAProxy shares requests among them,
# while it fills the fronts of a plan one after another.
NETWORK = "network"
DEPLOYER = "deployer"  # the name of the deployer's Serve deployment
LOOK_EVERY_S = 0.25  # each status call takes processor time that starting replicas need
COUNT_EVERY_S = 1.0  # between two checks that Ray has the devices
STALE_S = 2.0  # after a new attempt, Serve may report the failure of the previous one for this time
ReplicaCounts = Mapping[str, int]  # replicas by kind


@dataclass(frozen=True)
class ReplicaStates:
    """The number of a kind's replicas in each state. `failed` is Serve's message about those that cannot start."""

    running: int = 0
    starting: int = 0
    stopping: int = 0
    failed: str = ""


class Fleet(Protocol):
    """Counts and changes the replicas of an application. Calls may block."""

    def states(self) -> dict[str, ReplicaStates]:
        """The replicas by state, for every kind that has a Serve application."""

    def scale_to(self, counts: ReplicaCounts) -> None:
        """Request these numbers of replicas, and return at once. Other kinds stay as they are."""

    def leads(self) -> bool:
        """Whether no other deployer leads these replicas; otherwise `scale_to` changes nothing."""

    def has_room(self, more: ReplicaCounts) -> bool:
        """Whether these additional replicas could start now beside the running ones."""

    def missing_devices(self, counts: ReplicaCounts) -> dict[str, int]:
        """The number of these replicas, by kind, for which no node has a device, free or not; complete kinds are left
        out."""


class CannotStartError(Exception):
    """Some replicas of a plan do not start."""


class NoDevicesError(CannotStartError):
    """No node has the devices that the replicas need."""


class ReplacedError(CannotStartError):
    """Another deployer leads the replicas."""


BLAMELESS = (NoDevicesError, ReplacedError)  # faults for which the plan is not to blame


@dataclass(frozen=True)
class Moved:
    """A move that succeeded: the time until the fronts followed, and the part of it when devices served no plan."""

    seconds: float
    missing_s: float = 0.0


@dataclass(frozen=True)
class Undone:
    """A move that failed, and why. The previous plan continues. `blameless`: the new plan is not the cause."""

    reason: str
    blameless: bool = False


async def move(
    fleet: Fleet,
    before: Plan | None,
    after: Plan,
    switch: Callable[[Plan], Awaitable[None]],
    use_interim: Callable[[ReplicaCounts], Awaitable[None]],
    patience_s: float,
    stay: ReplicaCounts,
    standby: ReplicaCounts,
) -> Moved:
    """Start the replicas that the new plan adds, switch all fronts to it, then end those that it does not need.

    `before`: None where no replica runs, as in a parked application. If the new replicas do not fit beside the old
    ones, those that the new plan does not need end first. Until the new ones run, the fronts follow a plan for the
    replicas that remain, as `use_interim` tells them. If the new ones do not start, the previous plan is restored
    and CannotStartError is raised: immediately if no node has their devices, or if another deployer leads the replicas.
    It is also restored if `switch` fails.
    `stay`: additional replicas by kind that are not to end, though the new plan does not use them. `standby`: replicas
    by kind that run under any plan, also under `before`.
    """
    started_s, new = now_s(), most_of(after.devices(), standby)
    old = most_of(before.devices(), standby) if before else {}
    states = await asyncio.to_thread(fleet.states)
    beside = {kind: each.running + each.starting - stay.get(kind, 0) for kind, each in states.items()}
    growing = {kind: count + stay.get(kind, 0) for kind, count in new.items() if count > old.get(kind, 0)}
    has = {kind: max(count, beside.get(kind, 0)) for kind, count in old.items()}  # with those benched before
    shrinking = {kind: new.get(kind, 0) for kind, count in has.items() if new.get(kind, 0) < count}
    remaining = {kind: count + stay.get(kind, 0) for kind, count in shrinking.items()}
    earlier = with_benched({kind: old.get(kind, 0) for kind in (*growing, *remaining)}, stay, states)
    added = {kind: count - earlier[kind] for kind, count in growing.items()}
    freed_s = None
    try:
        if remaining and not await asyncio.to_thread(fleet.has_room, added):
            freed_s = now_s()
            await use_interim({kind: shrinking.get(kind, count) for kind, count in old.items()})
            await _free(fleet, remaining, patience_s)
        await start(fleet, growing, patience_s, only_here=True)
        await switch(after)
    except Exception:
        await asyncio.to_thread(fleet.scale_to, earlier)
        if freed_s is not None:
            with suppress(CannotStartError):
                await start(fleet, old | earlier, patience_s, only_here=True)
            if before:
                await switch(before)
        raise
    followed_s = now_s()
    await asyncio.to_thread(fleet.scale_to, remaining)
    return Moved(followed_s - started_s, 0.0 if freed_s is None else followed_s - freed_s)


def most_of(one: ReplicaCounts, other: ReplicaCounts) -> dict[str, int]:
    """The larger count of each kind.

    >>> most_of({"v100": 1}, {"v100": 3, "k80": 2})
    {'v100': 3, 'k80': 2}
    """
    return {kind: max(one.get(kind, 0), other.get(kind, 0)) for kind in {**one, **other}}


def with_benched(counts: ReplicaCounts, benched: ReplicaCounts, states: Mapping[str, ReplicaStates]) -> dict[str, int]:
    """These numbers of replicas, and the benched ones that run beside them.

    >>> with_benched({"v100": 3}, {"v100": 1}, {"v100": ReplicaStates(running=4)})
    {'v100': 4}
    """
    alive = {kind: states[kind].running + states[kind].starting for kind in counts if kind in states}
    return {kind: max(count, min(alive.get(kind, 0), count + benched.get(kind, 0))) for kind, count in counts.items()}


async def start(
    fleet: Fleet,
    counts: ReplicaCounts,
    patience_s: float,
    only_here: bool = False,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Request these numbers of replicas; returns when they run, or are no longer wanted. `only_here`: do not wait for
    nodes to join."""
    before = await asyncio.to_thread(fleet.states) if counts else {}
    failed_before = [kind for kind in counts if kind in before and before[kind].failed]
    await asyncio.to_thread(fleet.scale_to, counts)
    began_s = count_s = now_s()
    until_s, lack = began_s + patience_s, ""
    while late := await _below(fleet, counts, failed_before if now_s() < began_s + STALE_S else (), only_here):
        if not wanted():
            return
        if not await asyncio.to_thread(fleet.leads):
            raise ReplacedError("the application was deployed anew meanwhile")
        if now_s() >= count_s:
            known, lack = lack, await _lack(fleet, {kind: counts[kind] for kind in late})
            if lack and only_here:
                raise NoDevicesError(lack)
            if lack and lack != known:
                log.warning("the start waits for more nodes: %s", lack)
            count_s = now_s() + COUNT_EVERY_S
        if now_s() > until_s:
            running = ", ".join(f"{count} of {counts[kind]} {kind}" for kind, count in late.items())
            raise CannotStartError(f"after {patience_s:g} s only {running} run: {lack or 'are there enough devices?'}")
        await asyncio.sleep(LOOK_EVERY_S)


async def _lack(fleet: Fleet, counts: ReplicaCounts) -> str:
    """The devices that no node has, as text; empty if there are all."""
    missing = await asyncio.to_thread(fleet.missing_devices, counts)
    kinds = ", ".join(f"{count} of {counts[kind]} {kind}" for kind, count in missing.items())
    return f"no node has a device for {kinds}" if kinds else ""


async def _below(fleet: Fleet, counts: ReplicaCounts, excused: Collection[str], only_here: bool) -> dict[str, int]:
    """The number of running replicas of each kind that has too few. For kinds in `excused`, failures are ignored."""
    if not counts:
        return {}
    states = await asyncio.to_thread(fleet.states)
    for kind in counts:
        if kind in states and states[kind].failed and kind not in excused:
            # A replica also fails when its node vanishes, for which the plan is not to blame.
            if only_here and (lack := await _lack(fleet, counts)):
                raise NoDevicesError(lack)
            raise CannotStartError(states[kind].failed)
    running = {kind: states[kind].running if kind in states else 0 for kind in counts}
    return {kind: running[kind] for kind, count in counts.items() if running[kind] < count}


async def _free(fleet: Fleet, counts: ReplicaCounts, patience_s: float) -> None:
    """Scale down to `counts`; returns when the other replicas have ended, or after `patience_s`."""
    await asyncio.to_thread(fleet.scale_to, counts)
    until_s = now_s() + patience_s
    while now_s() < until_s and await asyncio.to_thread(fleet.leads):
        states = await asyncio.to_thread(fleet.states)
        left = {kind: states[kind].running + states[kind].stopping for kind in counts if kind in states}
        if all(left.get(kind, 0) <= count for kind, count in counts.items()):
            return
        await asyncio.sleep(LOOK_EVERY_S)
