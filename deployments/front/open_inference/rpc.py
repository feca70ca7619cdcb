"""The protocol over gRPC: a server of its own inside the front, so that stock clients need no metadata to be routed.

Before it stands a HAProxy of the front's own (`grpc_proxy`), where there is one for this platform.

Serve has a gRPC proxy, but its replicas would listen on every interface, and never learn how long a client waits
(docs/serving.md has the figures).
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from deployments.front import grpc_proxy
from deployments.front.answers import RefusedError
from deployments.front.bodies import LONGEST_NAME, MOST_NAMED, READ_WITHIN_S
from deployments.front.grpc_proxy import GrpcProxy
from deployments.front.headers import (
    DEADLINE_HEADER,
    FULL,
    NO_KEY,
    STARTED,
    TIMEOUT,
    deadline_s,
    is_shown,
    timeout_s_by,
    waited_s_by,
)
from deployments.front.open_inference.messages import SERVICE, has_few_fields, message
from deployments.front.open_inference.methods import METHODS, Answering, Call, content
from deployments.front.open_inference.tensors import MOST_TEXTS
from deployments.front.proxy import REQUEST_S
from deployments.front.service import Service, Visit
from deployments.ray_settings import haproxy_program
from deployments.tracing import PARENT
from profiles.errors import UserError

log = logging.getLogger(__name__)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_OPEN = ("ServerLive", "ServerReady")  # for load balancers, as over HTTP
_AT_ONCE = 64  # requests of one stream
# Limits of a call, and limits of clients' connections, which HAProxy keeps where one stands before the server.
_OF_CALLS = [
    ("grpc.absolute_max_metadata_size", 16_384),  # bytes, of one call
    # gRPC would also count calls that are answered and not yet forgotten, and refuse one in forty of a client that
    # keeps to the limit below.
    ("grpc.http.overload_protection", 0),
]
_OF_CONNECTIONS = [
    ("grpc.so_reuseport", 1),  # the replicas of a front share the port
    ("grpc.max_allowed_incoming_connections", grpc_proxy.CONNECTIONS),
    ("grpc.max_concurrent_streams", grpc_proxy.CALLS),
    ("grpc.server_handshake_timeout_ms", 1000 * REQUEST_S),  # a connection that says nothing
    ("grpc.max_connection_idle_ms", 1000 * grpc_proxy.IDLE_S),
    ("grpc.keepalive_time_ms", 60_000),  # is anybody still there?
]
_BEHIND_PROXY = [("grpc.max_concurrent_streams", grpc_proxy.CALLS_TO_FRONT)]


def check_port(host: str, port: int) -> None:
    """One sentence where nothing can listen there. Other replicas of this front may: they share the port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = f"port {port} of {host} cannot be used ({error.strerror})"
        raise UserError(f"grpc_port: {reason}: stop what listens there, or choose another") from error


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
    return GrpcProxy(program, config.grpc_host, config.grpc_port or 0, config.drain_s, service.burden)


def _server(service: Service, proxy: GrpcProxy | None) -> Any:
    config = service.config
    options = [("grpc.max_receive_message_length", config.max_body_bytes), *_OF_CALLS]
    options += _BEHIND_PROXY if proxy else _OF_CONNECTIONS
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * config.most_inside)
    server.add_generic_rpc_handlers((_Handlers(service),))
    host = f"[{config.grpc_host}]" if ":" in config.grpc_host else config.grpc_host
    server.add_insecure_port(f"unix:{proxy.socket}" if proxy else f"{host}:{config.grpc_port}")
    return server


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """Finds the method of a call by its name. A caller without the key is refused before its message is read."""

    def __init__(self, service: Service) -> None:
        self._key = service.key
        self._methods = {f"/{SERVICE}/{name}": _unary(service, name, answer) for name, answer in METHODS.items()}
        self._methods[f"/{SERVICE}/ModelInfer"] = _inferred(service)
        self._methods[f"/{SERVICE}/ModelStreamInfer"] = _streamed(service)
        self._open = {f"/{SERVICE}/{name}" for name in _OPEN}

    def service(self, asked: Any) -> grpc.RpcMethodHandler | None:
        if self._key and asked.method not in self._open and not _is_shown(self._key, asked.invocation_metadata):
            return _REFUSED
        return self._methods.get(asked.method)


def _is_shown(key: bytes, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return is_shown(key, [(name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)])


async def _refuse(requests: Any, context: Any) -> None:
    await _abort(context, RefusedError(401, NO_KEY))


_REFUSED = grpc.stream_unary_rpc_method_handler(_refuse)


def _call(context: Any) -> Call:
    """gRPC counts the time of a client from when it had the call, and HAProxy may have had it long before."""
    metadata, left_s = dict(context.invocation_metadata() or ()), context.time_remaining()
    timeout_s = timeout_s_by(metadata.get(TIMEOUT))
    if left_s is not None and timeout_s is not None:
        left_s = min(left_s, timeout_s - waited_s_by(_as_headers(metadata).get(STARTED)))
    return Call(metadata, left_s)


_KNOWN = (STARTED, FULL, PARENT.encode())


def _as_headers(metadata: Mapping[str, Any]) -> dict[bytes, bytes]:
    """What a request would say of itself over HTTP."""
    return {name: told.encode() for name in _KNOWN if (told := metadata.get(name.decode()))}


def _decoded(name: str, sent: bytes, most_fields: int) -> Any:
    """Decode a message; refuse one that has so many fields that making them would take much memory and time."""
    if not has_few_fields(sent, most_fields):
        raise RefusedError(400, f"this is no {name}, or one of more than {most_fields} fields")
    try:
        return message(name).FromString(sent)
    except (DecodeError, ValueError) as error:
        raise RefusedError(400, f"this is no {name}: {error}") from error


def _unary(service: Service, name: str, answer: Answering) -> grpc.RpcMethodHandler:
    response, most_fields = message(f"{name}Response"), _most_fields(service)

    async def handle(sent: bytes, context: Any) -> Any:
        async with _told(context, name):
            request = _decoded(f"{name}Request", sent, most_fields)
            return response(**await answer(service, request, _call(context)))

    return grpc.unary_unary_rpc_method_handler(handle, None, response.SerializeToString)


@asynccontextmanager
async def _told(context: Any, name: str) -> AsyncIterator[None]:
    """Whatever goes wrong inside is told to the client, as gRPC says it."""
    try:
        yield
    except RefusedError as refused:
        await _abort(context, refused)
    except Exception as error:
        log.exception("%s could not be answered", name)
        await _abort(context, RefusedError(500, f"{name} failed: {type(error).__name__}"))


def _inferred(service: Service) -> grpc.RpcMethodHandler:
    response, most_fields = message("ModelInferResponse"), _most_fields(service)

    async def handle(requests: AsyncIterator[bytes], context: Any) -> Any:
        async with _told(context, "ModelInfer"):
            call = _call(context)
            with service.counted("grpc", _as_headers(call.metadata)):
                sent = await _first(requests)
                visit = _visit(service, len(sent), call)
                return await service.answer(
                    visit, lambda: content(service, _decoded("ModelInferRequest", sent, most_fields), response)
                )

    return grpc.stream_unary_rpc_method_handler(handle, None, response.SerializeToString)


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    """The message of a call, which has a place in the proxy while it comes: not for longer than over HTTP."""
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            async for sent in requests:
                return sent
    except TimeoutError:
        raise RefusedError(408, f"the request was not here after {READ_WITHIN_S:g} s") from None
    raise RefusedError(400, "the call holds no request")


def _visit(service: Service, size: int, call: Call) -> Visit:
    """What the metadata say of its deadline counts from when it came; what gRPC itself says, from now."""
    within_s = deadline_s(call.metadata.get(DEADLINE_HEADER))
    return service.visit("grpc", size, _as_headers(call.metadata), within_s, call.left_s)


def _most_fields(service: Service) -> int:
    """Each text is a field, and an input has two at most; of all other fields there are few."""
    return MOST_TEXTS * service.config.max_inputs + 8 * MOST_NAMED


async def _abort(context: Any, refused: RefusedError) -> None:
    """gRPC's own word for Retry-After is a push-back, which clients with a retry policy obey."""
    after_s = refused.retry_after_s
    metadata = (("grpc-retry-pushback-ms", str(round(1000 * after_s))),) if after_s else ()
    await context.abort(_CODES.get(refused.status, grpc.StatusCode.INTERNAL), refused.sentence, metadata)


def _streamed(service: Service) -> grpc.RpcMethodHandler:
    """Requests of one stream run together; replies keep their order. A refusal is a reply, and the stream goes on."""
    response, most_fields = message("ModelStreamInferResponse"), _most_fields(service)

    async def one(sent: bytes, call: Call) -> Any:
        told = ""
        try:
            with service.counted("grpc", _as_headers(call.metadata)):
                visit = _visit(service, len(sent), call)
                request = _decoded("ModelInferRequest", sent, most_fields)
                told = request.id[:LONGEST_NAME]
                answer = await service.answer(visit, lambda: content(service, request, message("ModelInferResponse")))
                return response(infer_response=answer)
        except RefusedError as refused:
            return response(error_message=refused.sentence, infer_response={"id": told})

    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        call = _call(context)
        begun: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_AT_ONCE)

        async def begin() -> None:
            try:
                async for sent in requests:
                    await begun.put(asyncio.create_task(one(sent, call)))
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
