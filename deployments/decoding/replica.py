"""A decoding replica as Serve runs it: the network, its KV memory, and the loop, in one process."""

import gc
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.decoding.checkpoint import rules_of
from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine
from deployments.decoding.loading import engine_of, load_decoder
from deployments.decoding.loop import EngineLoop, FullError
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Wanted
from deployments.logs import join_serves_log

DECODER = "decoder"  # the deployment


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
        engine = engine_of(model, rules_of(folder, model.config.num_hidden_layers), config)
        self._depths: Counter[int] = Counter()
        self._loop = EngineLoop(engine)
        gc.freeze()  # the network stays for good, so the garbage collector need not look through it

    async def write(self, wanted: Wanted) -> AsyncGenerator[Written | Full, None]:
        """What a sequence writes; or, alone, that there is no place for it."""
        try:
            async with aclosing(self._loop.write(wanted)) as groups:
                async for group in groups:
                    self._depths.update(group.depths)
                    yield group
        except FullError as full:
            yield Full(full.retry_after_s)

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
