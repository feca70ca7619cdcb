"""Leads a running decoder to another plan: it is written down, and every replica follows what it finds there.

So nobody needs to know who is alive: a replica that starts later, or another front, goes on with the plan that runs.
Only what a running replica can change is led: where it cuts, how many are resident, when its deep part runs, and how
prompts are read. Memory, precision and the number of replicas are those of the start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from time import monotonic

from deployments import ray_facts
from deployments.decoding.checkpoint import DecoderRules
from deployments.decoding.config import FRONT, DecoderConfig
from deployments.decoding.loading import way_of
from deployments.deployer.steps import Moved, Undone
from deployments.ray_facts import Remembered, remembered
from optimizer.decoding_plans import shares_of
from optimizer.plan import Plan
from profiles.decoding import PROJECT, load_decoder_profile
from profiles.errors import UserError

FOLLOW_WITHIN_S = 5.0
LOOK_EVERY_S = 0.1


def led_to(origin: str) -> Remembered | None:
    """The plan that this application was led to since the user's own files said this."""
    memory = remembered(ray_facts.application_name())
    return memory if memory and memory.origin == origin else None


def origin_of(configs: Iterable[DecoderConfig]) -> str:
    """A mark of what the user's own files say of all replicas."""
    return sha256("".join(each.model_dump_json() for each in configs).encode()).hexdigest()


class DecoderLead:
    """What the controller asks of a decoder. `first` is the user's plan, if there is one, and `config` that of the
    first of its pipelines. `origin`: the mark of what his files say.

    `versions` tells which plan each replica follows, of those that answer.
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
        self._memory = led_to(origin)
        self._told = Plan.from_json(self._memory.plan) if self._memory else first
        self._moving = asyncio.Lock()

    @property
    def ramps(self) -> list[int]:
        """The blocks after which tokens may be known early, on some replicas at least."""
        if self._told:
            return sorted({ramp for each in self._told.pipelines for ramp in each.ramps})
        splits, _ = way_of(self.config, self._rules, self._num_blocks)
        return [end - 1 for end in splits.ends[:-1]]

    @property
    def shares(self) -> Mapping[str, float]:
        """How much of all texts those on each kind of device are to have, where a plan says it."""
        if self._told is None:
            return {}
        kinds = (each.placements[0].kind for each in self._told.pipelines)
        return dict(zip(kinds, shares_of(self._told), strict=True))

    def plan(self) -> Plan:
        """The plan that runs; without one of the user's, that which his configuration amounts to."""
        return self._told or self._standing()

    async def apply(self, plan: Plan) -> Moved | Undone:
        """Returns when all replicas follow it that answer in time; the others follow as soon as they can."""
        async with self._moving:
            begun_s = monotonic()
            if why := self._refusal(plan):
                return Undone(why)
            version = self._memory.version + 1 if self._memory else 1
            self._memory = Remembered("", self._origin, version, plan.to_json())
            self._told = plan
            await asyncio.to_thread(self._memory.keep, self._application)
            while set(await self._versions()) - {version} and monotonic() < begun_s + FOLLOW_WITHIN_S:
                await asyncio.sleep(LOOK_EVERY_S)
            return Moved(monotonic() - begun_s)

    def end(self) -> None:
        """Forget the plan if the application goes for good."""
        with suppress(Exception):
            if ray_facts.is_gone(self._application, FRONT):
                ray_facts.forget(self._application)

    def _refusal(self, plan: Plan) -> str | None:
        try:
            for each in plan.pipelines:
                led = self.config.led_by(each)
                if led.exits == PROJECT:
                    self._rules.check_projectable(led.cuts)
                way_of(led, self._rules, self._num_blocks)
            has, wants = self.plan().devices(), plan.devices()
        except UserError as error:
            return str(error)
        return None if has == wants else f"a running decoder has {has}, and this plan is for {wants}"

    def _standing(self) -> Plan:
        known = load_decoder_profile(self.config.known)
        measured = next((table for table in known.tables if not table.estimated), known.tables[0])
        return self.config.standing(*way_of(self.config, self._rules, self._num_blocks), measured.kind)
