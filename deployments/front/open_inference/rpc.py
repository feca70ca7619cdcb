"""The protocol's gRPC methods for inference on a network that classifies."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.front import grpc_server
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_DIMENSIONS, MOST_NAMED
from isobatch.deployments.front.grpc_server import Methods
from isobatch.deployments.front.headers import (
    CLIENT,
    DEADLINE_HEADER,
    STARTED,
    TIMEOUT,
    deadline_s,
    timeout_s_by,
    waited_s_by,
)
from isobatch.deployments.front.open_inference import protocol
from isobatch.deployments.front.open_inference.calls import Fields, aborting, as_headers, first, read_message
from isobatch.deployments.front.open_inference.messages import message
from isobatch.deployments.front.open_inference.methods import Questions, check_infer, infer_fields, outputs_of
from isobatch.deployments.front.open_inference.places import Places
from isobatch.deployments.front.open_inference.protocol import DescribedModel, check, model_of
from isobatch.deployments.front.open_inference.requests import BYTES, InputTensor, checked, dtype_of
from isobatch.deployments.front.open_inference.tensors import MOST_TEXTS, from_bytes, rows, timeout_s
from isobatch.deployments.front.service import Content, Format, IncomingRequest, Service

# Requests of one stream that run at once.
_MOST_RUNNING = 64
# A refused request keeps its place for this time, since refusing is work, too.
PUSH_BACK_S = 0.05


@dataclass(frozen=True)
class Call:
    """The facts of a call besides its message."""

    metadata: Mapping[str, Any]
    left_s: float | None  # how long its client still waits


def serving(service: Service) -> AbstractAsyncContextManager[None]:
    """Serve this network over gRPC during the context."""
    return grpc_server.serving(service, partial(methods, service))


def methods(service: Service, most_of_streams: Callable[[], int]) -> Methods:
    model, most_fields = model_of(service), _most_fields(service)

    async def statistics(request: Any) -> Fields:
        """A request without a name asks for all models; there is only one."""
        check(model, request.name or model.name, request.version)
        return await protocol.statistics(service)

    places = Places(most_of_streams, service.config.slo_ms / 1e3, time.monotonic)
    return {
        **Questions(service, model, most_fields).methods(ModelStatistics=statistics),
        "ModelInfer": _inferred(service, model),
        "ModelStreamInfer": _streamed(service, model, places),
    }


def _call(context: Any) -> Call:
    """The facts of a call. gRPC counts its timeout from here on, so the time that it spent in HAProxy is subtracted."""
    metadata, left_s = dict(context.invocation_metadata() or ()), context.time_remaining()
    timeout_s = timeout_s_by(metadata.get(TIMEOUT))
    if left_s is not None and timeout_s is not None:
        left_s = min(left_s, timeout_s - waited_s_by(as_headers(metadata).get(STARTED)))
    return Call(metadata, left_s)


def _inferred(service: Service, model: DescribedModel) -> grpc.RpcMethodHandler:
    response, most_fields = message("ModelInferResponse"), _most_fields(service)

    async def handle(requests: AsyncIterator[bytes], context: Any) -> Any:
        async with aborting(context, "ModelInfer"):
            call = _call(context)
            with service.counted("grpc", as_headers(call.metadata)):
                sent = await first(requests)
                incoming = _register(service, len(sent), call)
                return await service.answer(
                    incoming,
                    lambda: _content(service, model, read_message("ModelInferRequest", sent, most_fields), response),
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


def _streamed(service: Service, model: DescribedModel, places: Places) -> grpc.RpcMethodHandler:
    """Requests of one stream run together; replies keep their order. A refusal is a reply, and the stream goes on."""
    response, most_fields = message("ModelStreamInferResponse"), _most_fields(service)

    async def answer_to(sent: bytes, call: Call) -> Any:
        request_id = ""
        try:
            with service.counted("grpc", as_headers(call.metadata)):
                incoming = _register(service, len(sent), call)
                request = read_message("ModelInferRequest", sent, most_fields)
                request_id = request.id[:LONGEST_NAME]
                answer = await service.answer(
                    incoming, lambda: _content(service, model, request, message("ModelInferResponse"))
                )
                return response(infer_response=answer)
        except RefusedError as refused:
            if refused.status in (503, 504):
                await asyncio.sleep(PUSH_BACK_S)
            return response(error_message=refused.sentence, infer_response={"id": request_id})

    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        client = str(dict(context.invocation_metadata())[CLIENT])  # its address, as HAProxy says
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


def _content(service: Service, model: DescribedModel, request: Any, response: Callable[..., Format]) -> Content[Format]:
    """The content of an inference request; `response` creates a message from the fields of its answer."""
    check_infer(model, request)

    def written(answers: list[Answer]) -> Format:
        values = protocol.columns(service, answers, outputs_of(model, request))
        return response(**infer_fields(model, request, values))

    timeouts_us = (parameter.value.int64_param for parameter in request.parameters if parameter.key == "timeout")
    return Content(service.encoded_each(_values(service, request)), written, timeout_s(next(timeouts_us, 0)))


def _values(service: Service, request: Any) -> Any:
    if len(request.inputs) != 1 or len(request.raw_input_contents) > 1:
        raise RefusedError(400, "'inputs' must be one tensor, whose first dimension is the number of inputs")
    (sent,), raw = request.inputs, request.raw_input_contents
    shape = list(sent.shape[: MOST_DIMENSIONS + 1])
    tensor = checked(InputTensor, {"name": sent.name, "datatype": sent.datatype, "shape": shape})

    def load(kind: str, count: int) -> NDArray[Any]:
        texts = not service.reads_pictures
        return from_bytes(raw[0], kind, count, texts) if raw else _contents(sent.contents, kind, count, texts)

    return rows(tensor, service.sizes, load)


_FIELDS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64"}


def _contents(contents: Any, kind: str, count: int, texts: bool) -> NDArray[Any]:
    """The values from the field for their kind: small integers are sent as 32 bits, and FP16 is only sent raw."""
    if kind == "FP16":
        raise ValueError("FP16 travels in raw_input_contents only")
    field = "bytes" if kind == BYTES else _FIELDS.get(kind) or ("uint" if kind.startswith("U") else "int")
    values = getattr(contents, f"{field}_contents")
    if len(values) != count:
        raise ValueError(f"{field}_contents holds {len(values)} values")
    if kind == BYTES:
        return np.array([text.decode() for text in values] if texts else list(values), dtype=object)
    return np.array(values, dtype=dtype_of(kind))
