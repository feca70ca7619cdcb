"""The parts of gRPC calls that are the same for every network: reading a message, answering once, and errors."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.bodies import ARRIVING
from isobatch.deployments.front.headers import FULL, STARTED
from isobatch.deployments.front.open_inference.messages import has_few_fields, message
from isobatch.deployments.tracing import PARENT

log = logging.getLogger(__name__)
Fields = dict[str, Any]

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


def unary(name: str, answer: Callable[[bytes, Any], Awaitable[Fields]]) -> grpc.RpcMethodHandler:
    """A method that returns one response: `answer` gets the request's bytes and context, and returns the fields."""
    response = message(f"{name}Response")

    async def handle(sent: bytes, context: Any) -> Any:
        async with aborting(context, name):
            return response(**await answer(sent, context))

    return grpc.unary_unary_rpc_method_handler(handle, None, response.SerializeToString)


_HEADERS = (STARTED, FULL, PARENT.encode())


def as_headers(metadata: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The metadata of a call as the headers of an HTTP request."""
    return {name: value.encode() for name in _HEADERS if (value := metadata.get(name.decode()))}


def read_message(name: str, sent: bytes, most_fields: int) -> Any:
    """The message in these bytes. One with too many fields is refused, since it would take much memory and time."""
    if not has_few_fields(sent, most_fields):
        raise RefusedError(400, f"this is not a {name}, or it has more than {most_fields} fields")
    try:
        return message(name).FromString(sent)
    except (DecodeError, ValueError) as error:
        raise RefusedError(400, f"this is not a {name}: {error}") from error


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
    """The message of a call, which arrives within the limits of an HTTP body."""
    with ARRIVING.body():
        async for sent in requests:
            return sent
    raise RefusedError(400, "the call holds no request")


async def abort(context: Any, refused: RefusedError) -> None:
    """Abort the call. A push-back is gRPC's Retry-After, which clients with a retry policy obey."""
    after_s = refused.retry_after_s
    metadata = (("grpc-retry-pushback-ms", str(round(1000 * after_s))),) if after_s else ()
    await context.abort(CODES.get(refused.status, grpc.StatusCode.INTERNAL), refused.sentence, metadata)
