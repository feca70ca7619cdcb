"""A decoding replica as Serve runs it: the network, its KV memory, and the loop, in one process."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.decoding.anatomy import shape_of
from deployments.decoding.checkpoint import rules_of
from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine
from deployments.decoding.loading import engine_of, load_decoder
from deployments.decoding.loop import EngineLoop, FullError
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Splits, Wanted
from deployments.logs import join_serves_log
from deployments.metrics import DECODER_REPLICA, MetricSeries
from deployments.tracing import Tracing, part_of, tracing_here

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
    launches: dict[int, tuple[int, int]]  # by split: how many, and sequences in them


class DecoderReplica:
    """Decodes what fronts ask for. Tokens come in groups: as many as were written while the front was busy."""

    def __init__(self, config: DecoderConfig) -> None:
        join_serves_log()
        folder = Path(config.model)
        if config.device == "cpu":
            torch.set_num_threads(max(1, round(config.cpus_per_replica)))
        model = load_decoder(folder, config.device, config.dtype)
        engine = engine_of(model, rules_of(folder, shape_of(model.config).num_blocks), config)
        self._depths: Counter[int] = Counter()
        self._loop = EngineLoop(engine)
        self._tracing = tracing_here(time.perf_counter)
        self._telling = asyncio.get_running_loop().create_task(self._tell(engine.scheduler.splits, config))
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

    async def _tell(self, splits: Splits, config: DecoderConfig) -> None:
        """Tell Prometheus, until cancelled; works only inside a replica of Serve, which Ray adds to each series."""
        from ray.serve import metrics

        series = MetricSeries(DECODER_REPLICA, metrics)
        while True:
            tell(series, await self.state(), splits, config.max_residents)
            await asyncio.sleep(TELL_EVERY_S)

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


def tell(series: MetricSeries, state: ReplicaState, splits: Splits, places: int) -> None:
    """What a replica has done, and what is on it. A launch has room for all residents."""
    for block, tokens in state.depths.items():
        series.total("isobatch_exits", tokens, block=str(block))
    for split, (count, sequences) in state.launches.items():
        where = {"group": DECODER, "block": str(splits.blocks(split).start)}
        series.total("isobatch_launches", count, **where)
        series.total("isobatch_launched_inputs", sequences, **where)
        series.total("isobatch_launched_weight", sequences, **where)
        series.total("isobatch_launched_room", count * places, **where)
    series.now("isobatch_waiting_inputs", state.waiting, group=DECODER, block="0")
    series.now("isobatch_residents", state.residents)
    series.now("isobatch_pages", state.pages - state.free_pages, state="used")
    series.now("isobatch_pages", state.free_pages, state="free")
    series.total("isobatch_preempted", state.preempted)
