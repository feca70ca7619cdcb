"""The protocol over gRPC: a server of its own inside the front, so that stock clients need no metadata to be routed.

Serve has a gRPC proxy, but its replicas would listen on every interface, and never learn how long a client waits
(docs/serving.md has the figures).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from deployments.front.answers import RefusedError
from deployments.front.keys import UNKNOWN, is_shown
from deployments.front.open_inference.messages import SERVICE, message
from deployments.front.open_inference.methods import METHODS, Call, Method, infer
from deployments.front.service import Service
from profiles.errors import UserError

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_OPEN = ("ServerLive", "ServerReady")  # for load balancers, as over HTTP
_AT_ONCE = 64  # requests of one stream


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
    options = [
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.so_reuseport", 1),  # the replicas of a front share the port
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _handlers(service)),))
    host = f"[{config.grpc_host}]" if ":" in config.grpc_host else config.grpc_host
    server.add_insecure_port(f"{host}:{config.grpc_port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(config.drain_s)


def _handlers(service: Service) -> dict[str, grpc.RpcMethodHandler]:
    stream = grpc.stream_stream_rpc_method_handler(
        _streamed(service),
        message("ModelInferRequest").FromString,
        message("ModelStreamInferResponse").SerializeToString,
    )
    return {name: _unary(service, name, answer) for name, answer in METHODS.items()} | {"ModelStreamInfer": stream}


def _call(context: Any) -> Call:
    return Call(dict(context.invocation_metadata() or ()), context.time_remaining())


def _check_key(key: bytes | None, call: Call) -> None:
    shown = [(name.encode(), value.encode()) for name, value in call.metadata.items() if isinstance(value, str)]
    if key and not is_shown(key, shown):
        raise RefusedError(401, UNKNOWN)


def _unary(service: Service, name: str, answer: Method) -> grpc.RpcMethodHandler:
    response = message(f"{name}Response")

    async def handle(request: Any, context: Any) -> Any:
        try:
            call = _call(context)
            if name not in _OPEN:
                _check_key(service.key, call)
            return response(**await answer(service, request, call))
        except RefusedError as refused:
            return await _abort(context, refused)

    return grpc.unary_unary_rpc_method_handler(handle, message(f"{name}Request").FromString, response.SerializeToString)


async def _abort(context: Any, refused: RefusedError) -> None:
    """gRPC's own word for Retry-After is a push-back, which clients with a retry policy obey."""
    after_s = refused.retry_after_s
    metadata = (("grpc-retry-pushback-ms", str(1000 * after_s)),) if after_s else ()
    await context.abort(_CODES.get(refused.status, grpc.StatusCode.INTERNAL), refused.sentence, metadata)


def _streamed(service: Service) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """Requests of one stream run together; replies keep their order. A refusal is a reply, and the stream goes on."""
    response = message("ModelStreamInferResponse")

    async def one(request: Any, call: Call) -> Any:
        try:
            return response(infer_response=await infer(service, request, call))
        except RefusedError as refused:
            return response(error_message=refused.sentence, infer_response={"id": request.id})

    async def handle(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        call = _call(context)
        try:
            _check_key(service.key, call)
        except RefusedError as refused:
            await _abort(context, refused)
        begun: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_AT_ONCE)

        async def begin() -> None:
            try:
                async for request in requests:
                    await begun.put(asyncio.create_task(one(request, call)))
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

    return handle
