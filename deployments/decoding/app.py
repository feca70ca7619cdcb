"""The Serve application of a decoder: a front, and replicas that decode.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to turn `args:` into a
DecoderConfig.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import (
    context_of,
    decoder_shape,
    grammars_of,
    in_its_precision,
    language_of,
    load_tokenizer,
    stop_tokens,
)
from isobatch.deployments.decoding.front import DecoderFront
from isobatch.deployments.decoding.loop import HANGS_S, TokenInbox
from isobatch.deployments.decoding.openai_api import create_decoder_api
from isobatch.deployments.decoding.ramp_rules import GenerationDefaults, generation_defaults, rules_of
from isobatch.deployments.decoding.replica import DECODER, DecoderReplica, PlanSwitch, ReplicaState
from isobatch.deployments.decoding.replica_group import ReplicaGroup, summed, written_by_any
from isobatch.deployments.decoding.scheduler import SHORTEST_RETRY_S, NewTokens
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.deployer.steps import FRONT, Moved, Undone
from isobatch.deployments.front.api import limit_http
from isobatch.deployments.front.grpc_server import check_port
from isobatch.deployments.front.headers import key_in
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.metrics import TEXT_FRONT, MetricSeries
from isobatch.deployments.models.loading import resolve_dtype
from isobatch.deployments.ray_facts import (
    ask_all,
    drained_s,
    free_resources,
    labelled,
    nodes,
    replica_name,
    wire_of,
)
from isobatch.deployments.resources import declared, first_fit
from isobatch.deployments.serve_process import join_serves_log, process_options
from isobatch.deployments.sources import local, name_of
from isobatch.deployments.tracing import current, tracing_here
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.optimizer.text_plans import emptiest_first


class DecoderIngress:
    """The front in Serve."""

    def __init__(
        self, config: DecoderConfig, first: Plan | None, origin: str, counts: Mapping[str, int], *replicas: Any
    ) -> None:
        join_serves_log()
        folder = config.folder
        self._shape = decoder_shape(folder)
        if config.grpc_port:
            check_port(config.grpc_host, config.grpc_port)
        self._first, self._inbox, self._wire = first, TokenInbox(), wire_of(config)
        patience_s, language = max(config.ttft_ms / 1e3, SHORTEST_RETRY_S), language_of(folder)
        self._groups = [
            ReplicaGroup(kind, handle, self._inbox, patience_s, count, language)
            for (kind, count), handle in zip(counts.items(), replicas, strict=True)
        ]
        series = MetricSeries(TEXT_FRONT, serve.metrics)
        meter = ClientMeter(series, time.perf_counter, config.ttft_ms / 1e3, config.tpot_ms / 1e3, time.time())
        context = context_of(self._shape, config, resolve_dtype(config.dtype).itemsize)
        words, stop = load_tokenizer(folder), stop_tokens(folder)
        rules = rules_of(folder, self._shape.num_blocks)
        self._lead = PlanSwitch(config, first, origin, rules, self._shape.num_blocks, self._versions)
        name = config.name or name_of(config.model)
        key, tracing = key_in(config.api_key_variable), tracing_here(time.perf_counter)
        self._front = DecoderFront(
            config, name, self._shape, TextTokens(words, context), stop, self._write_tokens, meter, self._summed, key,
            tracing, generation_defaults(folder) or GenerationDefaults(), grammars_of(folder, words).obstacle,
        )  # fmt: skip

    def _write_tokens(self, request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        span, shares = current(), self._lead.shares
        texts = [group.writing for group in self._groups]
        order = emptiest_first(texts, [shares.get(group.kind, 1.0) for group in self._groups])
        return written_by_any((self._groups[place] for place in order), request, span.traceparent if span else "")

    # Called by the controller, with the names of a deployer's methods, and `first` by isobatch deploy

    async def config(self) -> DecoderConfig:
        return self._lead.config

    async def pinned(self) -> Plan | None:
        """The plan of the user's file, if no controller may replace it."""
        return None if self._lead.config.replan else self._first

    async def plan(self) -> Plan:
        return self._lead.plan()

    async def first(self) -> Plan | None:
        """The plan of the user's file, as it was at the start."""
        return self._first

    async def counted(self) -> dict[str, Observed]:
        return {replica_name(): self._front.meter.observed(self._shape.num_blocks)}

    async def apply(self, plan: Plan) -> Moved | Undone:
        return await self._lead.apply(plan)

    async def _states(self) -> list[ReplicaState]:
        answers = await asyncio.gather(*(ask_all(each.replicas, "state") for each in self._groups))
        return [state for group in answers for state in group]

    async def _versions(self) -> list[int]:
        return [state.version for state in await self._states()]

    async def _summed(self) -> dict[str, Any]:
        """The sum over all replicas that answer."""
        return summed(await self._states(), self._shape.num_blocks, self._lead.ramps)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_decoder_api(self._front, self._beside)

    @asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """Let HAProxy refuse requests beyond a limit; at the end, forget the plan, and send the remaining spans."""
        limit_http(self._front)
        await self._inbox.open(self._wire)
        yield
        self._inbox.close()
        if self._front.tracing:
            await asyncio.to_thread(self._front.tracing.close)
        await asyncio.to_thread(self._lead.end)


def build(config: DecoderConfig) -> Application:
    """The application of a Serve file with `import_path: isobatch.deployments.decoding.app:build`, by its `args:`."""
    first = read_plan(local(config.plan)) if config.plan else None
    pipelines = {kind: in_its_precision(each) for kind, each in config.per_kind().items()}
    leading = next(iter(pipelines.values()))
    origin = sha256("".join(each.model_dump_json() for each in pipelines.values()).encode()).hexdigest()
    kinds = list(pipelines) if len(pipelines) > 1 else [""]  # a single kind of device need not be named
    needs = [each for _, count, replica in config.replica_groups() for each in [replica] * count]
    has_room = all(first_fit(needs, free_resources()))
    decoders = [
        _decoders(each, name, kind, has_room).bind(each, origin, name)
        for name, (kind, each) in zip(kinds, pipelines.items(), strict=True)
    ]
    front = serve.deployment(
        name=FRONT,
        max_surge_percent=100,  # a front needs no device, so a new one always has room beside the old one
        max_ongoing_requests=sum(each.max_requests for each in pipelines.values()),
        ray_actor_options={"num_cpus": 0},
        **process_options(config.log_format, config.drain_s),
    )(serve.ingress()(DecoderIngress))
    counts = {name: each.replicas for name, each in zip(kinds, pipelines.values(), strict=True)}
    return front.bind(leading, first, origin, counts, *decoders)


def _decoders(config: DecoderConfig, name: str, kind: str, has_room: bool) -> Any:
    """The deployment of the replicas of one pipeline; `kind`: of its devices; `name`: the same, if there are several
    kinds. `has_room`: new replicas start beside those that they replace."""
    options = config.replica_options(kind, labelled() if kind else False)
    if kind:
        options |= {"resources": declared(kind, nodes())}
    # It ends after the fronts, whose texts it has. Serve replaces it after three checks without an answer.
    process = process_options(config.log_format, drained_s(config.drain_s)) | {"health_check_timeout_s": HANGS_S / 3}
    return serve.deployment(
        name=f"{DECODER}-{name}" if name else DECODER,
        num_replicas=config.replicas,
        max_surge_percent=100 * has_room,
        max_ongoing_requests=4
        * (config.max_residents + config.max_waiting),  # more than a replica admits, which refuses with a reason
        ray_actor_options=options,
        **process,
    )(DecoderReplica)
