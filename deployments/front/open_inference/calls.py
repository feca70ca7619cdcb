"""The parts that all gRPC services share: the key, the limits of calls, and errors."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from deployments.front import grpc_proxy
from deployments.front.answers import RefusedError
from deployments.front.bodies import READ_WITHIN_S
from deployments.front.headers import FULL, NO_KEY, STARTED, is_shown
from deployments.front.open_inference.messages import SERVICE, has_few_fields, message
from deployments.front.proxy import REQUEST_S
from deployments.tracing import PARENT
from profiles.errors import UserError

log = logging.getLogger(__name__)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Methods for load balancers, which need no key.
_OPEN = ("ServerLive", "ServerReady")
# Limits of each call.
OF_CALLS = [
    ("grpc.absolute_max_metadata_size", 16_384),  # bytes, of one call
    # With its protection, gRPC also counts calls that have just been answered, and refuses one in forty calls of a
    # client that keeps to the limit below.
    ("grpc.http.overload_protection", 0),
]
# Limits of clients' connections; with a HAProxy before the server, HAProxy applies them.
OF_CONNECTIONS = [
    ("grpc.so_reuseport", 1),  # the replicas of a front share the port
    ("grpc.max_allowed_incoming_connections", grpc_proxy.CONNECTIONS),
    ("grpc.max_concurrent_streams", grpc_proxy.CALLS),
    ("grpc.server_handshake_timeout_ms", 1000 * REQUEST_S),  # for connections without a request
    ("grpc.max_connection_idle_ms", 1000 * grpc_proxy.IDLE_S),
    ("grpc.keepalive_time_ms", 60_000),  # detects clients that have gone
]


def check_port(host: str, port: int) -> None:
    """Raise `UserError` if the server cannot listen there. Replicas of this front share the port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = f"port {port} of {host} cannot be used ({error.strerror})"
        raise UserError(f"grpc_port: {reason}: stop what listens there, or choose another") from error


def server_of(
    key: bytes | None, methods: Mapping[str, Any], address: str, max_body_bytes: int, max_calls: int,
    options: list[tuple[str, int]],
) -> Any:  # fmt: skip
    """A server of these methods at an address, with further options; it is not started yet."""
    options = [("grpc.max_receive_message_length", max_body_bytes), *OF_CALLS, *options]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_calls)
    server.add_generic_rpc_handlers((Handlers(key, methods),))
    server.add_insecure_port(address)
    return server


def address_of(host: str, port: int | None) -> str:
    """
    >>> address_of("::1", 8001), address_of("127.0.0.1", 8001)
    ('[::1]:8001', '127.0.0.1:8001')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unary(name: str, answer: Callable[[bytes, Any], Awaitable[dict[str, Any]]]) -> grpc.RpcMethodHandler:
    """A method that returns one response: `answer` gets the request's bytes and context, and returns the fields."""
    response = message(f"{name}Response")

    async def handle(sent: bytes, context: Any) -> Any:
        async with aborting(context, name):
            return response(**await answer(sent, context))

    return grpc.unary_unary_rpc_method_handler(handle, None, response.SerializeToString)


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """Finds the method of a call by its name. A call without the key is refused before its message is read."""

    def __init__(self, key: bytes | None, methods: Mapping[str, Any]) -> None:
        self._key = key
        self._methods = {f"/{SERVICE}/{name}": method for name, method in methods.items()}
        self._open = {f"/{SERVICE}/{name}" for name in _OPEN}

    def service(self, call: Any) -> grpc.RpcMethodHandler | None:
        if self._key and call.method not in self._open and not _is_shown(self._key, call.invocation_metadata):
            return _REFUSED
        return self._methods.get(call.method)


def _is_shown(key: bytes, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return is_shown(key, [(name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)])


async def _refuse(requests: Any, context: Any) -> None:
    await abort(context, RefusedError(401, NO_KEY))


_REFUSED = grpc.stream_unary_rpc_method_handler(_refuse)
_HEADERS = (STARTED, FULL, PARENT.encode())


def as_headers(metadata: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The metadata of a call as the headers of an HTTP request."""
    return {name: value.encode() for name in _HEADERS if (value := metadata.get(name.decode()))}


def decoded(name: str, sent: bytes, most_fields: int) -> Any:
    """Decode a message. One with too many fields is refused, since it would take much memory and time."""
    if not has_few_fields(sent, most_fields):
        raise RefusedError(400, f"this is no {name}, or it has more than {most_fields} fields")
    try:
        return message(name).FromString(sent)
    except (DecodeError, ValueError) as error:
        raise RefusedError(400, f"this is no {name}: {error}") from error


@asynccontextmanager
async def aborting(context: Any, name: str) -> AsyncIterator[None]:
    """Abort the call with a gRPC status if the code in this context raises an exception."""
    try:
        yield
    except RefusedError as refused:
        await abort(context, refused)
    except Exception as error:
        log.exception("%s could not be answered", name)
        await abort(context, RefusedError(500, f"{name} failed: {type(error).__name__}"))


async def first(requests: AsyncIterator[bytes]) -> bytes:
    """The message of a call, within the time of an HTTP body: it holds a place in the proxy meanwhile."""
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            async for sent in requests:
                return sent
    except TimeoutError:
        raise RefusedError(408, f"the request did not arrive within {READ_WITHIN_S:g} s") from None
    raise RefusedError(400, "the call holds no request")


async def abort(context: Any, refused: RefusedError) -> None:
    """Abort the call. A push-back is gRPC's Retry-After, which clients with a retry policy obey."""
    after_s = refused.retry_after_s
    metadata = (("grpc-retry-pushback-ms", str(round(1000 * after_s))),) if after_s else ()
    await context.abort(CODES.get(refused.status, grpc.StatusCode.INTERNAL), refused.sentence, metadata)
