"""The protocol's gRPC methods: the fields of each response, and the content of an inference request."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.front.answers import Answer, RefusedError
from deployments.front.bodies import LONGEST_NAME, MOST_DIMENSIONS, MOST_NAMED
from deployments.front.open_inference import protocol
from deployments.front.open_inference.protocol import check
from deployments.front.open_inference.requests import BYTES, InputTensor, checked, dtype_of
from deployments.front.open_inference.tensors import check_outputs, described, from_bytes, rows, timeout_s, to_bytes
from deployments.front.service import Content, Format, Service


@dataclass(frozen=True)
class Call:
    """The facts of a call besides its message."""

    metadata: Mapping[str, Any]
    left_s: float | None  # how long its client still waits


Answering = Callable[[Service, Any, Call], Awaitable[dict[str, Any]]]


async def _live(service: Service, request: Any, call: Call) -> dict[str, Any]:
    return {"live": True}


async def _ready(service: Service, request: Any, call: Call) -> dict[str, Any]:
    return {"ready": not await service.missing()}


async def _model_ready(service: Service, request: Any, call: Call) -> dict[str, Any]:
    """Like Triton: an unknown model is not ready."""
    try:
        check(service, request.name, request.version)
    except RefusedError:
        return {"ready": False}
    return await _ready(service, request, call)


async def _server(service: Service, request: Any, call: Call) -> dict[str, Any]:
    return protocol.server()


async def _metadata(service: Service, request: Any, call: Call) -> dict[str, Any]:
    check(service, request.name, request.version)
    return protocol.metadata(service)


async def _configuration(service: Service, request: Any, call: Call) -> dict[str, Any]:
    check(service, request.name, request.version)
    configuration = protocol.configuration(service)
    parameters = [{"key": key, "value": value} for key, value in configuration["parameters"].items()]
    return {"config": configuration | {"parameters": parameters}}


async def _statistics(service: Service, request: Any, call: Call) -> dict[str, Any]:
    """A request without a name asks for all models; there is only one."""
    check(service, request.name or service.name, request.version)
    return await protocol.statistics(service)


def content(service: Service, request: Any, response: Callable[..., Format]) -> Content[Format]:
    """The content of an inference request; `response` creates a message from the fields of its answer."""
    check(service, request.model_name, request.model_version)
    if len(request.id) > LONGEST_NAME or len(request.outputs) > MOST_NAMED:
        raise RefusedError(400, f"an id may have {LONGEST_NAME} characters, and a request {MOST_NAMED} outputs")

    def written(answers: list[Answer]) -> Format:
        outputs = protocol.columns(service, answers)
        requested = [output.name for output in request.outputs] or list(outputs)
        check_outputs(requested, outputs)
        return response(
            model_name=service.name,
            model_version=protocol.VERSION,
            id=request.id,
            outputs=[described(name, outputs[name]) for name in requested],
            raw_output_contents=[to_bytes(outputs[name]) for name in requested],
        )

    timeouts_us = (parameter.value.int64_param for parameter in request.parameters if parameter.key == "timeout")
    return Content(service.encoded_each(_values(service, request)), written, timeout_s(next(timeouts_us, 0)))


def _values(service: Service, request: Any) -> Any:
    if len(request.inputs) != 1 or len(request.raw_input_contents) > 1:
        raise RefusedError(400, "'inputs' must be one tensor, whose first dimension is the number of inputs")
    (sent,), raw = request.inputs, request.raw_input_contents
    shape = list(sent.shape[: MOST_DIMENSIONS + 1])
    tensor = checked(InputTensor, {"name": sent.name, "datatype": sent.datatype, "shape": shape})

    def load(kind: str, count: int) -> NDArray[Any]:
        return from_bytes(raw[0], kind, count) if raw else _contents(sent.contents, kind, count)

    return rows(tensor, service.sizes, load)


_FIELDS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64"}


def _contents(contents: Any, kind: str, count: int) -> NDArray[Any]:
    """The values from the field for their kind: small integers are sent as 32 bits, and FP16 is only sent raw."""
    if kind == "FP16":
        raise ValueError("FP16 travels in raw_input_contents only")
    field = "bytes" if kind == BYTES else _FIELDS.get(kind) or ("uint" if kind.startswith("U") else "int")
    values = getattr(contents, f"{field}_contents")
    if len(values) != count:
        raise ValueError(f"{field}_contents holds {len(values)} values")
    if kind == BYTES:
        return np.array([text.decode() for text in values], dtype=object)
    return np.array(values, dtype=dtype_of(kind))


METHODS: dict[str, Answering] = {
    "ServerLive": _live,
    "ServerReady": _ready,
    "ServerMetadata": _server,
    "ModelReady": _model_ready,
    "ModelMetadata": _metadata,
    "ModelConfig": _configuration,
    "ModelStatistics": _statistics,
}
