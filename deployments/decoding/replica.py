"""The replica of a decoder in Serve: the network, its KV memory, and the decoding loop, in one process.

All replicas follow the plan in Ray's store, to which `PlanSwitch` writes.
"""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

from isobatch.deployments import ray_facts
from isobatch.deployments.decoding.anatomy import DecoderShape, shape_of
from isobatch.deployments.decoding.config import DecoderConfig, pipeline_on
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.engine_setup import (
    engine_of,
    grammars_of,
    language_of,
    load_decoder,
    load_tokenizer,
    splits_and_limits,
)
from isobatch.deployments.decoding.loop import DecodingError, EngineLoop, TokenAddress, TokenOutlets
from isobatch.deployments.decoding.pages import pages_for
from isobatch.deployments.decoding.ramp_rules import DecoderRules, rules_of
from isobatch.deployments.decoding.scheduler import SHORTEST_RETRY_S, NewTokens, NoReplica, ReplicaFull
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.deployer.steps import FRONT, Moved, Undone
from isobatch.deployments.metrics import TEXT_REPLICA, MetricSeries
from isobatch.deployments.models.backends import compute_with, warn_of_ramp_dtype
from isobatch.deployments.models.loading import resolve_dtype
from isobatch.deployments.own_cores import as_computing
from isobatch.deployments.ray_facts import StoredPlan, wire_of
from isobatch.deployments.serve_process import ReplicaProcess
from isobatch.deployments.tracing import Tracing, part_of
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.text_plans import shares_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import PROJECT, load_text_profile

log = logging.getLogger("ray.serve")  # the log of Serve's own lines about a replica
DECODER = "decoder"  # the name of the deployment, and the `group` of its metrics
FOLLOW_WITHIN_S = 5.0  # the time for which a switch to another plan waits for all replicas
LOOK_EVERY_S = 0.1  # between two looks at the plans of the replicas
SHORTEST_TEXT = 2  # tokens: one of a prompt, and one after it
EXPORT_EVERY_S = 1.0  # Ray exports a gauge only if it was set since the last export


@dataclass(frozen=True)
class ReplicaState:
    """The counts of a replica since its start, and its sequences now."""

    residents: int
    waiting: int
    free_pages: int
    pages: int
    preempted: int
    tokens_per_s: float
    depths: dict[int, int]  # tokens by the block after which they were known
    # By the first block of each split: launches, sequences in them, room for sequences.
    launches: dict[int, tuple[int, int, int]]
    version: int = 0  # of the plan that runs
    asked: int = 0  # positions that texts needed before their first token
    shared: int = 0  # how many of these positions were in pages of other texts already


def switched_plan(origin: str) -> StoredPlan | None:
    """The plan to which this application was switched, if its configurations, by their hash, are unchanged."""
    stored = ray_facts.stored_plan(ray_facts.application_name())
    return stored if stored and stored.origin == origin else None


class PlanSwitch:
    """The plan of a decoder, which a controller may replace.

    It is written to Ray's store, where every replica reads it: so the front need not know which replicas run, and one
    that starts later reads the same plan. Only the cuts, the residents, the share that the deep part waits for, and the
    rows of prompts are switched: memory, precision and the number of replicas are those of the start.

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
        stored = switched_plan(origin)
        self._version = stored.version if stored else 0
        self._plan = Plan.from_json(stored.plan) if stored else first
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
        """The plan that runs; without a plan in a file, one that is equivalent to the configuration."""
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
            self._version += 1  # even after a failed switch, whose version may be stored: replicas follow only new ones
            stored = StoredPlan("", self._origin, self._version, plan.to_json())
            await asyncio.to_thread(self._follow, stored, plan)
            while set(await self._versions()) - {stored.version} and monotonic() < begun_s + FOLLOW_WITHIN_S:
                await asyncio.sleep(LOOK_EVERY_S)
            return Moved(monotonic() - begun_s)

    def _follow(self, stored: StoredPlan, plan: Plan) -> None:
        """Store a plan for the replicas, and follow it. A thread does both, so that both happen if the caller goes."""
        stored.store(self._application)
        self._plan = plan

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


def check_memory(shape: DecoderShape, config: DecoderConfig, number_bytes: int) -> None:
    """Raise UserError if the memory for KV is too small for any text: every request would be refused."""
    position_bytes = 2 * shape.num_blocks * shape.kv_width * number_bytes
    pages = pages_for(SHORTEST_TEXT, config.page_tokens) * (1 + (shape.start is not None))  # a source has KV, too
    if config.pages(position_bytes) < pages:
        least = -(-pages * config.page_tokens * position_bytes // 2**20)
        raise UserError(f"kv_megabytes = {config.kv_megabytes}: the shortest text needs {least}")


class DecoderReplica(ReplicaProcess):
    """Writes texts for fronts. Tokens come in groups: those that were written while the front was busy.

    `origin`: the hash of the configurations of all replicas; `kind`: of the device of this replica.
    """

    def __init__(self, config: DecoderConfig, origin: str, kind: str = "") -> None:
        super().__init__()
        folder = config.folder
        if config.device == "cpu":
            compute_with(max(1, round(config.cpus_per_replica)))
        with as_computing():  # libraries start threads as they load
            model = load_decoder(folder, config.device, config.dtype)
        self._origin, self._kind, shape = origin, kind, shape_of(model.config)
        self._language = language_of(folder)
        check_memory(shape, config, resolve_dtype(config.dtype).itemsize)
        self._config, self._rules = config, rules_of(folder, shape.num_blocks)
        if self._rules.ramps and config.exits != "off":
            warn_of_ramp_dtype(folder, self._rules.dtype, config.dtype)
        grammars = grammars_of(folder, load_tokenizer(folder))  # now: it would hold up texts
        engine = engine_of(model, self._rules, config, grammars=grammars)
        self._version = 0  # of the plan that runs
        self._depths: Counter[int] = Counter()
        self._loop = EngineLoop(engine)
        if config.device == "cpu":
            self.compute_on_own_cores(config.cpus_per_replica)
        self._outlets = TokenOutlets(wire_of(config), kind)
        running = asyncio.get_running_loop()
        self._tasks = [
            running.create_task(self._export_metrics()), running.create_task(self._outlets.beat(self.state))
        ]  # fmt: skip
        gc.freeze()  # the network stays until the end, so the garbage collector need not visit it

    async def write(
        self, request: TextRequest, front: TokenAddress, number: int, trace: str, language: str
    ) -> ReplicaFull | DecodingError | None:
        """Send the tokens of a sequence to a front, which has this number for it; returns after the last one, or with
        the reason why it ends before. `trace`: the traceparent of its spans. `language`: of the front's tokens; during
        a deploy it may be that of another network."""
        if language != self._language:
            return NoReplica(SHORTEST_RETRY_S)
        outlet = await self._outlets.to(front)
        outlet.put(number, NewTokens(0, (), ()))  # the front knows that there is a replica
        try:
            async with aclosing(traced(self._loop.write(request), request, self._tracing, trace)) as groups:
                async for group in groups:
                    self._depths.update(group.depths)
                    outlet.put(number, group)
        except (ReplicaFull, DecodingError) as reason:
            return reason
        return None

    async def drain(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _export_metrics(self) -> None:
        """Export metrics and follow the written plan, until cancelled. Works only inside a replica of Serve, whose name
        Ray adds to each series."""
        from ray.serve import metrics

        series = MetricSeries(TEXT_REPLICA, metrics)
        while True:
            try:  # the plan in Ray's store, which a replica that starts later reads, too
                stored = await asyncio.to_thread(switched_plan, self._origin)
                if stored and stored.version != self._version:
                    await self._loop.call(partial(self._switch_to, stored))
            except Exception:  # without Ray's store the present plan runs on
                log.exception("the plan to run cannot be read")
            export(series, await self.state())
            await asyncio.sleep(EXPORT_EVERY_S)

    def _switch_to(self, stored: StoredPlan, engine: Engine) -> None:
        config = self._config.switched_to(pipeline_on(Plan.from_json(stored.plan), self._kind))
        engine.recut(*splits_and_limits(config, self._rules, engine.scheduler.splits.num_blocks))
        self._version = stored.version

    async def state(self) -> ReplicaState:
        return await self._loop.call(self._state)

    async def check_health(self) -> None:
        await super().check_health()
        if not self._loop.alive or self._outlets.hangs:
            raise RuntimeError("decoding has ended, or hangs")

    def _state(self, engine: Engine) -> ReplicaState:
        scheduler = engine.scheduler
        return ReplicaState(
            len(scheduler.residents),
            len(scheduler.waiting),
            scheduler.pool.free,
            scheduler.pool.count,
            scheduler.preempted,
            scheduler.tokens_per_s,
            dict(self._depths),
            dict(scheduler.launched),
            self._version,
            scheduler.pool.asked,
            scheduler.pool.shared,
        )


async def traced(
    groups: AsyncGenerator[NewTokens, None], request: TextRequest, tracing: Tracing | None, trace: str
) -> AsyncGenerator[NewTokens, None]:
    """The tokens of a sequence, in two spans if its request is traced: to the first token, and after it."""
    async with aclosing(groups):
        with part_of(tracing, trace, "first token", {"prompt_tokens": request.given}):
            group = await anext(groups)
        yield group
        if not group.finish:
            with part_of(tracing, trace, "further tokens"):
                async for group in groups:
                    yield group


def export(series: MetricSeries, state: ReplicaState) -> None:
    """Export the state of a replica. A launch has room for as many sequences as may be resident."""
    for block, tokens in state.depths.items():
        series.set_total("isobatch_exits", tokens, block=str(block))
    for start, (count, sequences, room) in state.launches.items():
        series.set_launches(DECODER, start, count, sequences, sequences, room)
    series.set("isobatch_waiting_inputs", state.waiting, group=DECODER, block="0")
    series.set("isobatch_residents", state.residents)
    series.set("isobatch_pages", state.pages - state.free_pages, state="used")
    series.set("isobatch_pages", state.free_pages, state="free")
    series.set_total("isobatch_preempted", state.preempted)
    series.set_total("isobatch_prefix_positions", state.shared, way="shared")
    series.set_total("isobatch_prefix_positions", state.asked - state.shared, way="read")
