"""The interface of an application to its controller, and the application on Ray Serve that implements it.

The simulated application (`cluster/controller/rehearsal.py`) implements the same calls.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Protocol

from isobatch.deployments.config import ServedConfig
from isobatch.deployments.deployer.steps import DEPLOYER, FRONT, Moved, Undone
from isobatch.deployments.front.observed import Observed, merged, since
from isobatch.optimizer.plan import Plan


class RolloutError(Exception):
    """A plan could not be rolled out, and the previous plan runs again.

    `blameless`: the plan is not the cause, for instance because its devices are gone.
    """

    def __init__(self, reason: str, blameless: bool = False) -> None:
        super().__init__(reason)
        self.blameless = blameless


class Application(Protocol):
    """An application that serves requests by a plan and can change to another plan while it serves."""

    async def observe(self, devices: bool = True) -> Observed:
        """The counts since the last call, or since the start of the application, and the present devices.

        Without `devices` these are not counted: counting them takes longest.
        """

    async def plan(self) -> Plan:
        """The plan that runs, even if another client rolled it out."""

    async def roll_out(self, plan: Plan) -> object:
        """Returns when the plan runs and the previous plan takes no more work.

        Raises RolloutError when the plan could not be rolled out and the previous plan was restored.
        """

    async def use(self, device_ids: frozenset[str]) -> object:
        """Returns when only replicas on these devices are used; those of other applications stand by there, too."""

    async def park(self, wakes_in_s: float) -> object:
        """End all replicas; the next roll-out starts some. `wakes_in_s`: from the next input until they run."""


def without(devices: Mapping[str, int], benched: Mapping[str, str]) -> dict[str, int]:
    """The devices without those of replicas that were benched because they are too slow.

    >>> without({"v100": 4}, {"app#1": "v100"})
    {'v100': 3}
    """
    slow = Counter(benched.values())
    return {kind: max(0, count - slow[kind]) for kind, count in devices.items()}


MOST_SILENT = 100  # silent fronts whose counts are remembered: most have ended, but one may answer again


class RecentCounts:
    """The counts of each front since it answered last. Fronts themselves count from their start.

    A front that had started before the first call and did not answer it counts from its first answer on.
    """

    def __init__(self) -> None:
        self._before: dict[str, Observed] = {}  # by front, the longest silent first
        self._began_s = -inf  # when the first call was answered

    def update(self, now: Mapping[str, Observed]) -> list[Observed]:
        first = {front: count for front, count in now.items() if count.started_s < self._began_s}
        recent = [since(count, (first | self._before).get(front)) for front, count in now.items()]
        if not self._before:
            self._began_s = max((count.ended_s for count in now.values()), default=-inf)
        silent = [(front, count) for front, count in self._before.items() if front not in now]
        self._before = dict(silent[-MOST_SILENT:]) | dict(now)
        return recent


def leader_of(application: str) -> str:
    """The deployment that changes an application's plan: its deployer or, of a decoder, the front."""
    from ray import serve

    if (status := serve.status().applications.get(application)) is None:
        raise LookupError(f"Serve has no application {application!r}")
    return DEPLOYER if DEPLOYER in status.deployments else FRONT


class RunningApplication:
    """The application of this name on the Serve that this process is connected to; used from one event loop.

    `leader` is the deployment that answers the calls. This side remembers the last counts, so that several clients may
    observe one application and fronts need not know their clients.
    """

    inventory: Callable[[], Mapping[str, int]] = dict  # the devices that plans may use; a controller counts them

    def __init__(self, name: str, leader: str = DEPLOYER) -> None:
        from ray import serve

        self._name, self._leader = name, leader
        self._deployer: Any = serve.get_deployment_handle(leader, name)
        self._counts = RecentCounts()
        self._benched: Mapping[str, str] = {}

    async def observe(self, devices: bool = True) -> Observed:
        """The counts of all fronts that answer. When a front dies, its counts since its last answer are lost."""
        now: dict[str, Observed] = await self._deployer.counted.remote()
        if not now:
            raise ConnectionError("no front of the application answers")
        self._benched = {name: kind for each in now.values() for name, kind in each.benched}
        observed = replace(merged(self._counts.update(now)), benched=tuple(self._benched.items()))
        if not devices:
            return observed
        present = await asyncio.to_thread(self.inventory)  # it waits while Ray or Serve's controller starts again
        return replace(observed, devices=without(present, self._benched))

    async def config(self) -> ServedConfig:
        config: ServedConfig = await self._deployer.config.remote()
        return config

    async def is_as(self, config: ServedConfig) -> bool:
        """Whether this configuration is still deployed, and no other one has replaced it."""
        try:
            return await self.config() == config
        except Exception:
            if await asyncio.to_thread(leader_of, self._name) == self._leader:
                raise
            return False

    async def plan(self) -> Plan:
        plan: Plan = await self._deployer.plan.remote()
        return plan

    async def roll_out(self, plan: Plan) -> Moved:
        """Returns when all fronts follow the plan. The roll-out continues even if the caller ends before that."""
        benched = {"benched": self._benched} if self._benched else {}  # only a deployer takes this argument
        ended: Moved | Undone = await self._deployer.apply.remote(plan, **benched)
        if isinstance(ended, Undone):
            raise RolloutError(ended.reason, ended.blameless)
        return ended

    async def use(self, device_ids: frozenset[str]) -> None:
        await self._deployer.use.remote(device_ids)

    async def park(self, wakes_in_s: float) -> None:
        await self._deployer.park.remote(wakes_in_s)
