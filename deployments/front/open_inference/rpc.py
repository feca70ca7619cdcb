"""The protocol over gRPC: a server of its own inside the front, so that stock clients need no metadata to be routed.

Before it stands a HAProxy of the front's own (`grpc_proxy`), where there is one for this platform.

Serve has a gRPC proxy, but its replicas would listen on every interface, and never learn how long a client waits
(docs/overload.md).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from deployments.front import grpc_proxy
from deployments.front.answers import RefusedError
from deployments.front.bodies import LONGEST_NAME, MOST_NAMED
from deployments.front.grpc_proxy import GrpcProxy
from deployments.front.headers import CLIENT, DEADLINE_HEADER, STARTED, TIMEOUT, deadline_s, timeout_s_by, waited_s_by
from deployments.front.open_inference.calls import (
    OF_CONNECTIONS,
    address_of,
    as_headers,
    decoded,
    first,
    server_of,
    told_to,
    unary,
)
from deployments.front.open_inference.messages import message
from deployments.front.open_inference.methods import METHODS, Answering, Call, content
from deployments.front.open_inference.places import Places
from deployments.front.open_inference.tensors import MOST_TEXTS
from deployments.front.proxy import MOST
from deployments.front.service import IncomingRequest, Service
from deployments.ray_settings import haproxy_program

log = logging.getLogger(__name__)

_AT_ONCE = 64  # requests of one stream
PUSH_BACK_S = 0.05  # a request that there was no time for keeps its place for so long: to refuse is work, too
_BEHIND_PROXY = [("grpc.max_concurrent_streams", grpc_proxy.CALLS_TO_FRONT)]


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[None]:
    """Serve until the block ends, and what was admitted then is answered. Nothing is served where no port was given."""
    config = service.config
    if config.grpc_port is None:
        yield
        return
    proxy = _proxy(service)
    server = _server(service, proxy)
    await server.start()
    try:
        if proxy:
            await asyncio.to_thread(proxy.open)
        yield
    finally:
        if proxy:
            await asyncio.to_thread(proxy.drain)
        await server.stop(None if proxy else config.drain_s)
        if proxy:
            await asyncio.to_thread(proxy.close)


def _proxy(service: Service) -> GrpcProxy | None:
    config, program = service.config, haproxy_program()
    if program is None:
        log.warning("there is no HAProxy here to stand before gRPC: calls that are refused cost the front its time")
        return None
    proxy = GrpcProxy(program, config.grpc_host, config.grpc_port or 0, config.drain_s, service.burden)
    service.watch(proxy)
    return proxy


def _server(service: Service, proxy: GrpcProxy | None) -> Any:
    config = service.config
    methods = {name: _unary(service, name, answer) for name, answer in METHODS.items()}
    places = Places((lambda: proxy.places) if proxy else (lambda: MOST), config.slo_ms / 1e3, time.monotonic)
    methods |= {"ModelInfer": _inferred(service), "ModelStreamInfer": _streamed(service, places)}
    address = f"unix:{proxy.socket}" if proxy else address_of(config.grpc_host, config.grpc_port)
    max_calls = 2 * config.most_inside + grpc_proxy.STREAMS
    options = _BEHIND_PROXY if proxy else OF_CONNECTIONS
    return server_of(service.key, methods, address, config.max_body_bytes, max_calls, options)


def _call(context: Any) -> Call:
    """gRPC counts the time of a client from when it had the call, and HAProxy may have had it long before."""
    metadata, left_s = dict(context.invocation_metadata() or ()), context.time_remaining()
    timeout_s = timeout_s_by(metadata.get(TIMEOUT))
    if left_s is not None and timeout_s is not None:
        left_s = min(left_s, timeout_s - waited_s_by(as_headers(metadata).get(STARTED)))
    return Call(metadata, left_s)


def _client(context: Any) -> str:
    """The address of whoever asks: as HAProxy tells it over its socket, or as gRPC saw it itself."""
    protocol, _, place = str(context.peer()).partition(":")
    return str(dict(context.invocation_metadata())[CLIENT]) if protocol == "unix" else place.rpartition(":")[0]


def _unary(service: Service, name: str, answer: Answering) -> grpc.RpcMethodHandler:
    most_fields = _most_fields(service)
    return unary(
        name,
        lambda sent, context: answer(service, decoded(f"{name}Request", sent, most_fields), _call(context)),
    )


def _inferred(service: Service) -> grpc.RpcMethodHandler:
    response, most_fields = message("ModelInferResponse"), _most_fields(service)

    async def handle(requests: AsyncIterator[bytes], context: Any) -> Any:
        async with told_to(context, "ModelInfer"):
            call = _call(context)
            with service.counted("grpc", as_headers(call.metadata)):
                sent = await first(requests)
                visit = _visit(service, len(sent), call)
                return await service.answer(
                    visit, lambda: content(service, decoded("ModelInferRequest", sent, most_fields), response)
                )

    return grpc.stream_unary_rpc_method_handler(handle, None, response.SerializeToString)


def _visit(service: Service, size: int, call: Call) -> IncomingRequest:
    """What the metadata say of its deadline counts from when it came; what gRPC itself says, from now."""
    within_s = deadline_s(call.metadata.get(DEADLINE_HEADER))
    return service.visit("grpc", size, as_headers(call.metadata), within_s, call.left_s)


def _most_fields(service: Service) -> int:
    """Each text is a field, and an input has two at most; of all other fields there are few."""
    return MOST_TEXTS * service.config.most_inputs + 8 * MOST_NAMED


def _is_answer(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and not done.exception() and not done.result().error_message


def _streamed(service: Service, places: Places) -> grpc.RpcMethodHandler:
    """Requests of one stream run together; replies keep their order. A refusal is a reply, and the stream goes on."""
    response, most_fields = message("ModelStreamInferResponse"), _most_fields(service)

    async def one(sent: bytes, call: Call) -> Any:
        told = ""
        try:
            with service.counted("grpc", as_headers(call.metadata)):
                visit = _visit(service, len(sent), call)
                request = decoded("ModelInferRequest", sent, most_fields)
                told = request.id[:LONGEST_NAME]
                answer = await service.answer(visit, lambda: content(service, request, message("ModelInferResponse")))
                return response(infer_response=answer)
        except RefusedError as refused:
            if refused.status in (503, 504):
                await asyncio.sleep(PUSH_BACK_S)
            return response(error_message=refused.sentence, infer_response={"id": told})

    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        client = _client(context)
        begun: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_AT_ONCE)

        async def begin() -> None:
            try:
                async for sent in requests:
                    await places.take(client)
                    task = asyncio.create_task(one(sent, _call(context)))
                    task.add_done_callback(lambda done: places.leave(client, _is_answer(done)))
                    await begun.put(task)
            finally:
                await begun.put(None)

        reading = asyncio.create_task(begin())
        try:
            while reply := await begun.get():
                yield await reply
        finally:  # the client may have gone: nobody waits for the rest
            reading.cancel()
            while not begun.empty():
                if reply := begun.get_nowait():
                    reply.cancel()

    return grpc.stream_stream_rpc_method_handler(handle, None, response.SerializeToString)
