"""Switches a running decoder to another plan: the plan is written to Ray's store, and every replica reads it there.

So the front need not know which replicas are alive: a replica that starts later, or another front, reads the same plan.
Only what a running replica can change is switched: the cuts, the residents, the share that the deep part waits for, and
the rows of prompts. Memory, precision and the number of replicas are those of the start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from time import monotonic

from isobatch.deployments import ray_facts
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import splits_and_limits
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.deployer.steps import FRONT, Moved, Undone
from isobatch.deployments.ray_facts import StoredPlan, stored_plan
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.text_plans import shares_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import PROJECT, load_text_profile

FOLLOW_WITHIN_S = 5.0  # the time for which a switch waits for all replicas
LOOK_EVERY_S = 0.1  # between two looks at the plans of the replicas


def switched_plan(origin: str) -> StoredPlan | None:
    """The plan that this application was switched to, if its configurations are still the same."""
    memory = stored_plan(ray_facts.application_name())
    return memory if memory and memory.origin == origin else None


def origin_of(configs: Iterable[DecoderConfig]) -> str:
    """A hash of the configurations of all replicas."""
    return sha256("".join(each.model_dump_json() for each in configs).encode()).hexdigest()


class PlanSwitch:
    """The plan of a decoder, which a controller may replace.

    `first` is the plan of the user's file, if there is one, and `config` the configuration of its first pipeline.
    `origin`: the hash of all configurations. `versions` returns the version of the plan on each replica that answers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        first: Plan | None,
        origin: str,
        rules: DecoderRules,
        num_blocks: int,
        versions: Callable[[], Awaitable[Sequence[int]]],
    ) -> None:
        self.config, self._origin = config, origin
        self._rules, self._num_blocks, self._versions = rules, num_blocks, versions
        self._application = ray_facts.application_name()
        self._memory = switched_plan(origin)
        self._plan = Plan.from_json(self._memory.plan) if self._memory else first
        self._moving = asyncio.Lock()

    @property
    def ramps(self) -> list[int]:
        """The blocks after which tokens may be known early, on at least one replica."""
        if self._plan:
            return sorted({ramp for each in self._plan.pipelines for ramp in each.ramps})
        splits, _ = splits_and_limits(self.config, self._rules, self._num_blocks)
        return [end - 1 for end in splits.ends[:-1]]

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of all texts for each kind of device, if a plan says it."""
        if self._plan is None:
            return {}
        kinds = (each.placements[0].kind for each in self._plan.pipelines)
        return dict(zip(kinds, shares_of(self._plan), strict=True))

    def plan(self) -> Plan:
        """The plan that runs; without a plan in a file, one that the configuration is equivalent to."""
        if self._plan:
            return self._plan
        tables = load_text_profile(self.config.profile_path).tables
        measured = next((table for table in tables if not table.estimated), tables[0])
        return self.config.as_plan(*splits_and_limits(self.config, self._rules, self._num_blocks), measured.kind)

    async def apply(self, plan: Plan) -> Moved | Undone:
        """Switch to a plan. Returns when all replicas run it, or after `FOLLOW_WITHIN_S`; late ones still follow."""
        async with self._moving:
            begun_s = monotonic()
            if reason := self._refusal(plan):
                return Undone(reason)
            version = self._memory.version + 1 if self._memory else 1
            self._memory = StoredPlan("", self._origin, version, plan.to_json())
            self._plan = plan
            await asyncio.to_thread(self._memory.store, self._application)
            while set(await self._versions()) - {version} and monotonic() < begun_s + FOLLOW_WITHIN_S:
                await asyncio.sleep(LOOK_EVERY_S)
            return Moved(monotonic() - begun_s)

    def end(self) -> None:
        """Forget the plan if the application is deleted."""
        with suppress(Exception):
            if ray_facts.is_gone(self._application, FRONT):
                ray_facts.forget(self._application)

    def _refusal(self, plan: Plan) -> str | None:
        try:
            for each in plan.pipelines:
                config = self.config.switched_to(each)
                if config.exits == PROJECT:
                    self._rules.check_projectable(config.cuts)
                splits_and_limits(config, self._rules, self._num_blocks)
            devices, needed = self.plan().devices(), plan.devices()
        except UserError as error:
            return str(error)
        return None if devices == needed else f"a running decoder has {devices}, and this plan is for {needed}"
