"""The gRPC server of a front, for every network: its key, its limits, errors, and the methods about the server.

A HAProxy before it (`grpc_proxy`) turns calls into HTTP/1.1 (`calls`). Serve has a gRPC proxy, but its replicas would
listen on every interface, and would not know the clients' deadlines.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import DecodeError

from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.api import GuardedNetwork
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_NAMED
from isobatch.deployments.front.calls import Call, CallConnection, Method
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.open_inference import protocol
from isobatch.deployments.front.open_inference.messages import SERVICE, has_few_fields, message
from isobatch.deployments.front.open_inference.protocol import DescribedModel
from isobatch.deployments.front.open_inference.tensors import Values, described, to_bytes
from isobatch.deployments.front.proxy import MOST
from isobatch.deployments.ray_settings import haproxy_program
from isobatch.profiles.errors import UserError

Fields = dict[str, Any]
Methods = Mapping[str, Method]
Answering = Callable[[Any], Awaitable[Fields]]  # the fields of the response to a message

# Methods for load balancers, which need no key.
_OPEN = {f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")}


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
async def serve(
    served: GuardedNetwork, methods: Callable[[Callable[[], int]], Methods], slo_ms: float | None = None
) -> AsyncIterator[None]:
    """Serve during this context, and answer all admitted requests at its end. Without a port, there is no server.

    `methods` gets a function that returns how many requests of streams may be in the front at once. `slo_ms`: the
    deadline of inferences without one of their own; None: they have none.
    """
    if served.config.grpc_port is None:
        yield
        return
    config, program = served.config, haproxy_program()
    if program is None:
        raise UserError("grpc_port: HAProxy is missing: reinstall ray[serve], which contains it")
    proxy = GrpcProxy(program, config.grpc_host, served.config.grpc_port, config.drain_s, served.burden, slo_ms)
    served.proxies.watch(proxy.limit)
    answering = {f"/{SERVICE}/{name}": method for name, method in methods(lambda: proxy.limit.value).items()}

    def connection() -> CallConnection:
        return CallConnection(answering, served.key, _OPEN, config.max_body_bytes)

    server = await asyncio.get_running_loop().create_unix_server(connection, proxy.socket, backlog=MOST)
    try:
        await asyncio.to_thread(proxy.open)
        yield
    finally:
        await asyncio.to_thread(proxy.drain)
        server.close()
        await asyncio.to_thread(proxy.close)


def read_message(name: str, sent: bytes, most_fields: int) -> Any:
    """The message in these bytes. One with too many fields is refused, since it would take much memory and time."""
    if not has_few_fields(sent, most_fields):
        raise RefusedError(400, f"this is not a {name}, or it has more than {most_fields} fields")
    try:
        return message(name).FromString(sent)
    except (DecodeError, ValueError) as error:
        raise RefusedError(400, f"this is not a {name}: {error}") from error


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


def _unary(name: str, answer: Answering, most_fields: int) -> Method:
    response = message(f"{name}Response")

    async def handle(call: Call) -> bytes:
        request = read_message(f"{name}Request", await call.request(), most_fields)
        return serialized(response(**await answer(request)))

    return handle


def serialized(response: Any) -> bytes:
    result: bytes = response.SerializeToString()
    return result


def check_infer(model: DescribedModel, request: Any) -> None:
    """Raise `RefusedError` for an inference on another model, and for too much in the request."""
    protocol.check(model, request.model_name, request.model_version)
    if len(request.id) > LONGEST_NAME or len(request.outputs) > MOST_NAMED:
        raise RefusedError(400, f"an id may have {LONGEST_NAME} characters, and a request {MOST_NAMED} outputs")
    protocol.check_outputs(model, outputs_of(model, request), best_of(request))


def outputs_of(model: DescribedModel, request: Any) -> list[str]:
    """The outputs that a request names, or the usual ones."""
    return [output.name for output in request.outputs] or model.usual_outputs


def best_of(request: Any) -> dict[str, int]:
    """By output, how many of its best labels a request wants as texts."""
    counts = [
        (each.name, integer_in(each.parameters, "classification", "a number of labels")) for each in request.outputs
    ]
    return {name: count for name, count in counts if count is not None}


def integer_in(parameters: Any, name: str, unit: str) -> int | None:
    """The parameter of this name; None: there is none. Raises `RefusedError` for one of another type."""
    values = [each.value for each in parameters if each.key == name]
    for field, value in (sent for each in values for sent in each.ListFields()):
        if field.name != "int64_param":
            reason = f"must be an int64_param, {unit}, not the {field.name} {shown(value)}"
            raise RefusedError(400, f"parameters.{name} {reason}")
    number: int | None = values[0].int64_param if values else None
    return number


def infer_fields(model: DescribedModel, request: Any, values: Mapping[str, Values]) -> Fields:
    names = outputs_of(model, request)
    return {
        "model_name": model.name,
        "model_version": protocol.VERSION,
        "id": request.id,
        "outputs": [described(name, values[name]) for name in names],
        "raw_output_contents": [to_bytes(values[name]) for name in names],
    }
