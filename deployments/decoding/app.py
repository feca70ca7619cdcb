"""The Serve application of a decoder: a front, and replicas that decode.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to turn `args:` into a
DecoderConfig.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from deployments.decoding.api import create_decoder_api
from deployments.decoding.checkpoint import rules_of
from deployments.decoding.config import FRONT, DecoderConfig
from deployments.decoding.front import DecoderFront, summed
from deployments.decoding.leading import DecoderLead
from deployments.decoding.loading import decoder_shape, load_tokenizer, stop_tokens
from deployments.decoding.metrics import ClientMeter
from deployments.decoding.replica import DECODER, DecoderReplica, ReplicaState
from deployments.decoding.rpc import serving
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Wanted
from deployments.decoding.texts import TextTokens
from deployments.deployer.steps import Moved, Undone
from deployments.front.headers import key_in
from deployments.front.observed import Observed
from deployments.front.open_inference.calls import check_port
from deployments.logs import join_serves_log, logging_config
from deployments.metrics import DECODER_FRONT, MetricSeries
from deployments.ray_facts import ask_all, replica_name
from deployments.tracing import current, tracing_here
from optimizer.plan import Plan, read_plan


class DecoderIngress:
    """The front as Serve runs it."""

    def __init__(self, config: DecoderConfig, replicas: Any, first: Plan | None) -> None:
        join_serves_log()
        folder = Path(config.model)
        self._config, self._shape = config, decoder_shape(folder)
        self._key = key_in(config.api_key_variable)
        if config.grpc_port:
            check_port(config.grpc_host, config.grpc_port)
        self._replicas = replicas
        self._tracing = tracing_here(time.perf_counter)
        series = MetricSeries(DECODER_FRONT, serve.metrics)
        meter = ClientMeter(series, time.perf_counter, config.ttft_ms / 1e3, config.tpot_ms / 1e3)
        texts = TextTokens(load_tokenizer(folder), self._shape.context(config.max_context))
        rules = rules_of(folder, self._shape.num_blocks)
        self._lead = DecoderLead(config, first, rules, self._shape.num_blocks, self._versions)
        name, stop = config.name or folder.name, stop_tokens(folder)
        self._front = DecoderFront(config, name, self._shape, texts, stop, self._ask, meter)

    def _ask(self, wanted: Wanted) -> AsyncGenerator[Written | Full, None]:
        span = current()
        trace = span.traceparent if span else ""
        return _until_left(self._replicas.options(stream=True).write.remote(wanted, trace))

    # Calls of the controller, as those of a deployer

    async def config(self) -> DecoderConfig:
        return self._lead.config

    async def pinned(self) -> Plan | None:
        """The user's own plan, where no controller may replace it."""
        return None if self._lead.config.replan else self._lead.first

    async def plan(self) -> Plan:
        return self._lead.plan()

    async def counted(self) -> dict[str, Observed]:
        return {replica_name(): self._front.meter.observed(self._shape.num_blocks)}

    async def apply(self, plan: Plan) -> Moved | Undone:
        return await self._lead.apply(plan)

    async def _states(self) -> list[ReplicaState]:
        return await ask_all(self._replicas, "state")

    async def _versions(self) -> list[int]:
        return [state.version for state in await self._states()]

    async def _stats(self) -> dict[str, Any]:
        """The sum over all replicas that answer; while there is none, of the first that does."""
        states = await self._states() or [await self._replicas.state.remote()]
        return summed(states, self._shape.num_blocks, self._lead.following.max_residents, self._lead.ramps)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_decoder_api(self._front, self._key, self._stats, self._tracing, self._beside)

    @asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """Serve gRPC; at the end, say that the plan need not be remembered."""
        async with serving(self._front, self._key, self._stats, self._tracing):
            yield
        await asyncio.to_thread(self._lead.end)


async def _until_left(groups: Any) -> AsyncGenerator[Written | Full, None]:
    """What a replica writes; it is told when nobody listens any more."""
    try:
        async for group in groups:
            yield group
    except (asyncio.CancelledError, GeneratorExit):
        groups.cancel()
        raise


def build(config: DecoderConfig) -> Application:
    """What `import_path: deployments.decoding.app:build` in a Serve file makes of its `args:`."""
    first, config = read_plan(Path(config.plan)) if config.plan else None, config.planned()
    decoder = serve.deployment(
        name=DECODER,
        num_replicas=config.replicas,
        max_ongoing_requests=4 * (config.max_residents + config.max_waiting),  # its own queue refuses with a reason
        ray_actor_options=config.replica_options(),
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=logging_config(config.log_format),
    )(DecoderReplica)
    front = serve.deployment(
        name=FRONT,
        max_ongoing_requests=config.most_asked,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=logging_config(config.log_format),
    )(serve.ingress()(DecoderIngress))
    return front.bind(config, decoder.bind(config), first)
