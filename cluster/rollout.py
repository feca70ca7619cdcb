"""A running application as the controller sees it: what it does, and how it is led to another plan."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cluster.controller.application import RolloutError
from deployments.front.counting import since
from deployments.front.observed import Observed, merged
from deployments.rollout.steps import Moved, Undone
from optimizer.plan import Plan

Inventory = Callable[[], Mapping[str, int]]


class RunningApplication:
    """The application of this name on the Serve that this process is connected to; used from one event loop.

    Whoever asks remembers what was asked before, so several may ask, and neither fronts nor deployers need to.
    """

    def __init__(self, name: str, inventory: Inventory = dict) -> None:
        from ray import serve

        from deployments.rollout.deployer import DEPLOYER

        self._deployer: Any = serve.get_deployment_handle(DEPLOYER, name)
        self._inventory = inventory
        self._before: dict[str, Observed] = {}  # by front

    async def observe(self) -> Observed:
        """Of all fronts together. What one that died has counted since it was last asked is lost."""
        now: dict[str, Observed] = await self._deployer.counted.remote()
        if not now:
            raise ConnectionError("no front of the application answers")
        news = [since(count, self._before.get(front)) for front, count in now.items()]
        self._before = now
        return replace(merged(news), devices=self._inventory())

    async def plan(self) -> Plan:
        return Plan.from_json(await self._deployer.plan.remote())

    async def roll_out(self, plan: Plan) -> None:
        """Returns when all fronts follow the plan. Who asked may end meanwhile: the roll-out is brought to an end."""
        await self.lead_to(plan)

    async def lead_to(self, plan: Plan) -> Moved:
        """The same, and how it went."""
        ended: Moved | Undone = await self._deployer.apply.remote(plan.to_json())
        if isinstance(ended, Undone):
            raise RolloutError(ended.reason)
        return ended
