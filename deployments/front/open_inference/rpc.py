"""The protocol over gRPC: a separate server in the front, so that standard clients need no metadata for routing.

A HAProxy of the front stands before it (`grpc_proxy`), if the platform has one.

Serve has a gRPC proxy, but its replicas would listen on every interface, and would not know the clients' deadlines
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
    aborting,
    address_of,
    as_headers,
    decoded,
    first,
    server_of,
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

# Requests of one stream that run at once.
_MOST_RUNNING = 64
# A refused request keeps its place for this time, since refusing is work, too.
PUSH_BACK_S = 0.05
_BEHIND_PROXY = [("grpc.max_concurrent_streams", grpc_proxy.CALLS_TO_FRONT)]


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[None]:
    """Serve during this context, and answer all admitted requests at its end. Without a port, there is no server."""
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
        log.warning("there is no HAProxy for gRPC on this platform: refused calls take processor time of the front")
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
    """The facts of a call. gRPC counts its timeout from here on, so the time that it spent in HAProxy is subtracted."""
    metadata, left_s = dict(context.invocation_metadata() or ()), context.time_remaining()
    timeout_s = timeout_s_by(metadata.get(TIMEOUT))
    if left_s is not None and timeout_s is not None:
        left_s = min(left_s, timeout_s - waited_s_by(as_headers(metadata).get(STARTED)))
    return Call(metadata, left_s)


def _client(context: Any) -> str:
    """The client's address: from HAProxy's metadata, or from gRPC itself."""
    protocol, _, address = str(context.peer()).partition(":")
    return str(dict(context.invocation_metadata())[CLIENT]) if protocol == "unix" else address.rpartition(":")[0]


def _unary(service: Service, name: str, answer: Answering) -> grpc.RpcMethodHandler:
    most_fields = _most_fields(service)
    return unary(
        name,
        lambda sent, context: answer(service, decoded(f"{name}Request", sent, most_fields), _call(context)),
    )


def _inferred(service: Service) -> grpc.RpcMethodHandler:
    response, most_fields = message("ModelInferResponse"), _most_fields(service)

    async def handle(requests: AsyncIterator[bytes], context: Any) -> Any:
        async with aborting(context, "ModelInfer"):
            call = _call(context)
            with service.counted("grpc", as_headers(call.metadata)):
                sent = await first(requests)
                incoming = _register(service, len(sent), call)
                return await service.answer(
                    incoming, lambda: content(service, decoded("ModelInferRequest", sent, most_fields), response)
                )

    return grpc.stream_unary_rpc_method_handler(handle, None, response.SerializeToString)


def _register(service: Service, size: int, call: Call) -> IncomingRequest:
    """The deadline in the metadata counts from the call's arrival; gRPC's own timeout counts from now."""
    within_s = deadline_s(call.metadata.get(DEADLINE_HEADER))
    return service.register("grpc", size, as_headers(call.metadata), within_s, call.left_s)


def _most_fields(service: Service) -> int:
    """The most fields of a request: each text is one, and an input has at most two; other fields are few."""
    return MOST_TEXTS * service.config.most_inputs + 8 * MOST_NAMED


def _is_answer(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and not done.exception() and not done.result().error_message


def _streamed(service: Service, places: Places) -> grpc.RpcMethodHandler:
    """Requests of one stream run together; replies keep their order. A refusal is a reply, and the stream goes on."""
    response, most_fields = message("ModelStreamInferResponse"), _most_fields(service)

    async def answer_to(sent: bytes, call: Call) -> Any:
        request_id = ""
        try:
            with service.counted("grpc", as_headers(call.metadata)):
                incoming = _register(service, len(sent), call)
                request = decoded("ModelInferRequest", sent, most_fields)
                request_id = request.id[:LONGEST_NAME]
                answer = await service.answer(
                    incoming, lambda: content(service, request, message("ModelInferResponse"))
                )
                return response(infer_response=answer)
        except RefusedError as refused:
            if refused.status in (503, 504):
                await asyncio.sleep(PUSH_BACK_S)
            return response(error_message=refused.sentence, infer_response={"id": request_id})

    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        client = _client(context)
        begun: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_MOST_RUNNING)

        async def begin() -> None:
            try:
                async for sent in requests:
                    await places.take(client)
                    task = asyncio.create_task(answer_to(sent, _call(context)))
                    task.add_done_callback(lambda done: places.leave(client, _is_answer(done)))
                    await begun.put(task)
            finally:
                await begun.put(None)

        reading = asyncio.create_task(begin())
        try:
            while reply := await begun.get():
                yield await reply
        finally:  # if the client has gone, the other replies are not needed
            reading.cancel()
            while not begun.empty():
                if reply := begun.get_nowait():
                    reply.cancel()

    return grpc.stream_stream_rpc_method_handler(handle, None, response.SerializeToString)
