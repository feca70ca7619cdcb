"""The gRPC server of a front, for every network: its key, its limits, errors, and the methods about the server.

A HAProxy stands before it (`grpc_proxy`). Serve has a gRPC proxy, but its replicas would listen on every interface, and
would not know the clients' deadlines (docs/overload.md).
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from isobatch.deployments.front import grpc_proxy
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.api import GuardedNetwork
from isobatch.deployments.front.bodies import ARRIVING, LONGEST_NAME, MOST_NAMED
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.headers import DEADLINE, FULL, NO_KEY, STARTED, is_shown
from isobatch.deployments.front.open_inference import protocol
from isobatch.deployments.front.open_inference.messages import SERVICE, has_few_fields, message
from isobatch.deployments.front.open_inference.protocol import DescribedModel
from isobatch.deployments.front.open_inference.tensors import Values, check_outputs, described, to_bytes
from isobatch.deployments.ray_settings import haproxy_program
from isobatch.deployments.tracing import PARENT
from isobatch.profiles.errors import UserError

log = logging.getLogger(__name__)
Fields = dict[str, Any]
Methods = Mapping[str, grpc.RpcMethodHandler]
Answering = Callable[[Any], Awaitable[Fields]]  # the fields of the response to a message

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
_HEADERS = (DEADLINE, STARTED, FULL, PARENT.encode())
# Methods for load balancers, which need no key.
_OPEN = {f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")}
_OPTIONS = [
    ("grpc.absolute_max_metadata_size", 16_384),  # bytes, of one call
    # With its protection, gRPC also counts calls that have just been answered, and refuses one in forty calls of a
    # client that keeps to the limit below.
    ("grpc.http.overload_protection", 0),
    ("grpc.max_concurrent_streams", grpc_proxy.CALLS_TO_FRONT),  # HAProxy limits the connections of clients
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


@asynccontextmanager
async def serve(served: GuardedNetwork, methods: Callable[[Callable[[], int]], Methods]) -> AsyncIterator[None]:
    """Serve during this context, and answer all admitted requests at its end. Without a port, there is no server.

    `methods` gets a function that returns how many requests of streams may be in the front at once.
    """
    if served.config.grpc_port is None:
        yield
        return
    config, program = served.config, haproxy_program()
    if program is None:
        raise UserError("grpc_port: HAProxy is missing: reinstall ray[serve], which contains it")
    proxy = GrpcProxy(program, config.grpc_host, served.config.grpc_port, config.drain_s, served.burden)
    served.proxies.watch(proxy.limit)
    options = [("grpc.max_receive_message_length", config.max_body_bytes), *_OPTIONS]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=served.most_calls + grpc_proxy.STREAMS)
    server.add_generic_rpc_handlers((_Handlers(served.key, methods(lambda: proxy.limit.value)),))
    server.add_insecure_port(f"unix:{proxy.socket}")
    await server.start()
    try:
        await asyncio.to_thread(proxy.open)
        yield
    finally:
        await asyncio.to_thread(proxy.drain)
        await server.stop(None)
        await asyncio.to_thread(proxy.close)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """Finds the method of a call by its name. A call without the key is refused before its message is read."""

    def __init__(self, key: bytes | None, methods: Methods) -> None:
        self._key = key
        self._methods = {f"/{SERVICE}/{name}": method for name, method in methods.items()}

    def service(self, call: Any) -> grpc.RpcMethodHandler | None:
        if self._key and call.method not in _OPEN:
            texts = ((name, value) for name, value in call.invocation_metadata if isinstance(value, str))
            if not is_shown(self._key, [(name.encode(), value.encode()) for name, value in texts]):
                return _REFUSED
        return self._methods.get(call.method)


async def _refuse(requests: Any, context: Any) -> None:
    await abort(context, RefusedError(401, NO_KEY))


_REFUSED = grpc.stream_unary_rpc_method_handler(_refuse)


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


async def first(requests: AsyncIterator[bytes]) -> bytes:
    """The message of a call, which arrives within the limits of an HTTP body."""
    with ARRIVING.body() as arriving:
        arriving.came(0)  # a message comes whole, so a client that sends none is slow from the start
        async for sent in requests:
            return sent
    raise RefusedError(400, "the call holds no request")


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


async def abort(context: Any, refused: RefusedError) -> None:
    """Abort the call. A push-back is gRPC's Retry-After, which clients with a retry policy obey."""
    after_s = refused.retry_after_s
    metadata = (("grpc-retry-pushback-ms", str(round(1000 * after_s))),) if after_s else ()
    await context.abort(CODES.get(refused.status, grpc.StatusCode.INTERNAL), refused.sentence, metadata)


def question_methods(served: GuardedNetwork, model: DescribedModel, most_fields: int, **others: Answering) -> Methods:
    """The methods about the server and its model, and `others`. A request of more than `most_fields` is refused."""

    async def live(_: Any) -> Fields:
        return {"live": True}

    async def ready(_: Any) -> Fields:
        return {"ready": not await served.missing()}

    async def server(_: Any) -> Fields:
        return protocol.server(model)

    async def model_ready(request: Any) -> Fields:
        """Like Triton: an unknown model is not ready."""
        known = (request.name, request.version or protocol.VERSION) == (model.name, protocol.VERSION)
        return await ready(request) if known else {"ready": False}

    async def metadata(request: Any) -> Fields:
        protocol.check(model, request.name, request.version)
        return protocol.metadata(model)

    async def configuration(request: Any) -> Fields:
        protocol.check(model, request.name, request.version)
        content = protocol.configuration(model)
        parameters = [{"key": key, "value": value} for key, value in content.get("parameters", {}).items()]
        return {"config": content | {"parameters": parameters}}

    answers: dict[str, Answering] = {
        "ServerLive": live,
        "ServerReady": ready,
        "ServerMetadata": server,
        "ModelReady": model_ready,
        "ModelMetadata": metadata,
        "ModelConfig": configuration,
    }
    return {name: _unary(name, answer, most_fields) for name, answer in (answers | others).items()}


def _unary(name: str, answer: Answering, most_fields: int) -> grpc.RpcMethodHandler:
    response = message(f"{name}Response")

    async def handle(sent: bytes, context: Any) -> Any:
        async with aborting(context, name):
            return response(**await answer(read_message(f"{name}Request", sent, most_fields)))

    return grpc.unary_unary_rpc_method_handler(handle, None, response.SerializeToString)


def check_infer(model: DescribedModel, request: Any) -> None:
    """Raise `RefusedError` for an inference on another model, and for too much in the request."""
    protocol.check(model, request.model_name, request.model_version)
    if len(request.id) > LONGEST_NAME or len(request.outputs) > MOST_NAMED:
        raise RefusedError(400, f"an id may have {LONGEST_NAME} characters, and a request {MOST_NAMED} outputs")
    check_outputs([output.name for output in request.outputs], model.outputs)


def outputs_of(model: DescribedModel, request: Any) -> list[str]:
    """The outputs that a request names, or the usual ones."""
    return [output.name for output in request.outputs] or model.usual_outputs


def infer_fields(model: DescribedModel, request: Any, values: Mapping[str, Values]) -> Fields:
    """The fields of a response."""
    names = outputs_of(model, request)
    return {
        "model_name": model.name,
        "model_version": protocol.VERSION,
        "id": request.id,
        "outputs": [described(name, values[name]) for name in names],
        "raw_output_contents": [to_bytes(values[name]) for name in names],
    }
