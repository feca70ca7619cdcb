"""A decoding replica as Serve runs it: the network, its KV memory, and the loop, in one process."""

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deployments.decoding.anatomy import shape_of
from deployments.decoding.checkpoint import rules_of
from deployments.decoding.config import DecoderConfig, pipeline_on
from deployments.decoding.engine import Engine
from deployments.decoding.leading import led_to
from deployments.decoding.loading import engine_of, load_decoder, way_of
from deployments.decoding.loop import EngineLoop, FullError
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Wanted
from deployments.logs import join_serves_log
from deployments.metrics import DECODER_REPLICA, MetricSeries
from deployments.models.backends import warn_of_ramps
from deployments.ray_facts import Remembered
from deployments.tracing import Tracing, part_of, tracing_here
from optimizer.plan import Plan

log = logging.getLogger("ray.serve")  # where Serve's own lines about a replica go
DECODER = "decoder"  # the deployment
TELL_EVERY_S = 1.0  # Ray tells a gauge only where it was set since the last time


@dataclass(frozen=True)
class ReplicaState:
    """What a replica has done until now, and what is on it."""

    residents: int
    waiting: int
    free_pages: int
    pages: int
    preempted: int
    tokens_per_s: float
    depths: dict[int, int]  # tokens by the block after which they were known
    launches: dict[int, tuple[int, int, int]]  # by a split's first block: how many, sequences in them, room for so many
    version: int = 0  # of the plan that it follows


class DecoderReplica:
    """Decodes what fronts ask for. Tokens come in groups: as many as were written while the front was busy.

    `origin`: the mark of what the user's files say of all replicas; `kind`: of the device that this one is on.
    """

    def __init__(self, config: DecoderConfig, origin: str, kind: str = "") -> None:
        join_serves_log()
        folder = Path(config.model)
        if config.device == "cpu":
            torch.set_num_threads(max(1, round(config.cpus_per_replica)))
        model = load_decoder(folder, "cpu" if kind == "cpu" else config.device, config.dtype)
        self._origin, self._kind = origin, kind
        self._config, self._rules = config, rules_of(folder, shape_of(model.config).num_blocks)
        if self._rules.ramps and config.exits != "off":
            warn_of_ramps(folder, self._rules.dtype, config.dtype)
        engine = engine_of(model, self._rules, config)
        self._version = 0  # of the plan that is followed
        self._depths: Counter[int] = Counter()
        self._loop = EngineLoop(engine)
        self._tracing = tracing_here(time.perf_counter)
        self._telling = asyncio.get_running_loop().create_task(self._tell())
        # Serve awaits this before it ends a replica. It is set on the instance, so that Python does not call it too.
        self.__del__ = self.close
        gc.freeze()  # the network stays for good, so the garbage collector need not look through it

    async def write(self, wanted: Wanted, trace: str = "") -> AsyncGenerator[Written | Full, None]:
        """What a sequence writes; or, alone, that there is no place for it. `trace`: what its spans belong to."""
        try:
            async with aclosing(traced(self._loop.write(wanted), wanted, self._tracing, trace)) as groups:
                async for group in groups:
                    self._depths.update(group.depths)
                    yield group
        except FullError as full:
            yield Full(full.retry_after_s)

    async def close(self) -> None:
        """Tell what is left to be told."""
        self._telling.cancel()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    async def _tell(self) -> None:
        """Tell Prometheus, and see which plan is to run, until cancelled; works only inside a replica of Serve, which
        Ray adds to each series."""
        from ray.serve import metrics

        series = MetricSeries(DECODER_REPLICA, metrics)
        while True:
            try:
                await self._catch_up()
            except Exception:  # the store of Ray may be away for a moment: what runs goes on
                log.exception("which plan is to run cannot be told")
            tell(series, await self.state())
            await asyncio.sleep(TELL_EVERY_S)

    async def _catch_up(self) -> None:
        """Follow the plan that is written down, whoever wrote it: so a replica that starts later does, too."""
        written = await asyncio.to_thread(led_to, self._origin)
        if written and written.version != self._version:
            await self._loop.call(partial(self._follow, written))

    def _follow(self, written: Remembered, engine: Engine) -> None:
        config = self._config.led_by(pipeline_on(Plan.from_json(written.plan), self._kind))
        engine.follow(*way_of(config, self._rules, engine.scheduler.splits.num_blocks))
        self._version = written.version

    async def state(self) -> ReplicaState:
        return await self._loop.call(self._state)

    def check_health(self) -> None:
        """Serve starts another replica where this raises."""
        if not self._loop.alive:
            raise RuntimeError("the loop has ended")

    def _state(self, engine: Engine) -> ReplicaState:
        scheduler = engine.scheduler
        return ReplicaState(
            len(scheduler.residents),
            len(scheduler.waiting),
            scheduler.pool.free,
            scheduler.pool.count,
            scheduler.preempted,
            scheduler.pace.tokens_per_s,
            dict(self._depths),
            dict(scheduler.launched),
            self._version,
        )


async def traced(
    groups: AsyncGenerator[Written, None], wanted: Wanted, tracing: Tracing | None, trace: str
) -> AsyncGenerator[Written, None]:
    """What a sequence writes, in two spans if its request is traced: up to the first token, and from there on."""
    async with aclosing(groups):
        with part_of(tracing, trace, "first token", {"prompt_tokens": wanted.given}):
            group = await anext(groups)
        yield group
        if not group.finish:
            with part_of(tracing, trace, "further tokens"):
                async for group in groups:
                    yield group


def tell(series: MetricSeries, state: ReplicaState) -> None:
    """What a replica has done, and what is on it. A launch has room for as many residents as there may be then."""
    for block, tokens in state.depths.items():
        series.total("isobatch_exits", tokens, block=str(block))
    for start, (count, sequences, room) in state.launches.items():
        where = {"group": DECODER, "block": str(start)}
        series.total("isobatch_launches", count, **where)
        series.total("isobatch_launched_inputs", sequences, **where)
        series.total("isobatch_launched_weight", sequences, **where)
        series.total("isobatch_launched_room", room, **where)
    series.now("isobatch_waiting_inputs", state.waiting, group=DECODER, block="0")
    series.now("isobatch_residents", state.residents)
    series.now("isobatch_pages", state.pages - state.free_pages, state="used")
    series.now("isobatch_pages", state.free_pages, state="free")
    series.total("isobatch_preempted", state.preempted)
