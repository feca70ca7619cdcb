"""Texts over gRPC, by the Open Inference Protocol: ModelInfer returns a whole text, ModelStreamInfer its pieces.

A request has one text, `text_input`. The other fields of an OpenAI completion are parameters of the same names, or JSON
in the tensor `sampling_parameters`, as in Triton's own servers of texts. So fields are checked as over HTTP.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from isobatch.deployments.decoding.front import DecoderFront, TextPiece, ends_at, until
from isobatch.deployments.decoding.openai_requests import CompletionRequest, request_of
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.front import grpc_server
from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_NAMED
from isobatch.deployments.front.calls import Call
from isobatch.deployments.front.headers import RequestHeaders
from isobatch.deployments.front.open_inference.messages import message
from isobatch.deployments.front.open_inference.protocol import DescribedModel
from isobatch.deployments.front.open_inference.schemas import BYTES
from isobatch.deployments.front.open_inference.tensors import from_bytes, from_contents
from isobatch.deployments.tracing import span_of_request

MAX_STREAM_REQUESTS = 64  # requests of one stream that are answered at the same time
MOST_FIELDS = 8 * MOST_NAMED  # of one request
_INPUTS = {"text_input": (BYTES, [1]), "sampling_parameters": (BYTES, [1]), "stream": ("BOOL", [1])}
_OUTPUTS = {"text_output": (BYTES, [1]), "exit_block": ("INT64", [-1]), "finish_reason": (BYTES, [1])}
_FINAL = "triton_final_response"  # the parameter by which clients of Triton know the last of several responses


def serving(front: DecoderFront) -> AbstractAsyncContextManager[None]:
    """Serve this network over gRPC during the context."""
    return grpc_server.serve(front, lambda _: _TextCalls(front).methods())


@dataclass(frozen=True)
class _InferRequest:
    """One request: the message, the text to write, and whether it comes in pieces."""

    message: Any
    text: TextRequest
    stops: Sequence[str]
    stream: bool


class _TextCalls:
    """The protocol's methods, for one decoder."""

    def __init__(self, front: DecoderFront) -> None:
        self._front = front
        # A request may have several responses.
        decoupled = {"model_transaction_policy": {"decoupled": True}}
        self._model = DescribedModel(front.name, _INPUTS, _OUTPUTS, ["model_configuration"], decoupled)

    def methods(self) -> grpc_server.Methods:
        return {
            **grpc_server.question_methods(self._front, self._model, MOST_FIELDS),
            "ModelInfer": self._whole,
            "ModelStreamInfer": self._streamed,
        }

    async def _whole(self, call: Call) -> bytes:
        async with self._counted(call) as (begun_s, full):
            request = grpc_server.read_message("ModelInferRequest", await call.request(), MOST_FIELDS)
            infer = await self._read(request, full, stream=False)
            if infer.stream:
                raise RefusedError(400, "stream = true: ModelStreamInfer gives a text piece by piece")
            text = await self._front.whole(infer.text, infer.stops, begun_s=begun_s)
            self._front.meter.answered(begun_s)
            return grpc_server.serialized(message("ModelInferResponse")(**self._fields(infer, text)))

    async def _streamed(self, call: Call) -> None:
        """Answer requests of one stream at the same time. After a refusal the stream continues."""
        response = message("ModelStreamInferResponse")
        # If its client does not read them, no more are written, and further requests are not read.
        responses: asyncio.Queue[grpc_server.Fields | None] = asyncio.Queue(MAX_STREAM_REQUESTS)
        places = asyncio.Semaphore(MAX_STREAM_REQUESTS)

        async def write_all() -> RefusedError | None:
            """Returns why the stream cannot be read to its end, if that is so."""
            unreadable = None
            async with asyncio.TaskGroup() as tasks:
                try:
                    while (sent := await call.message()) is not None:
                        await places.acquire()
                        task = tasks.create_task(self._write(sent, call, responses))
                        task.add_done_callback(lambda _: places.release())
                except RefusedError as refused:
                    self._front.meter.ended("refused")
                    unreadable = refused
            await responses.put(None)
            return unreadable

        writing = asyncio.create_task(write_all())
        try:
            while fields := await responses.get():
                await call.send(grpc_server.serialized(response(**fields)))
            if unreadable := await writing:
                raise unreadable
        finally:  # the client may have disconnected
            writing.cancel()

    async def _write(self, sent: bytes, call: Call, responses: "asyncio.Queue[grpc_server.Fields | None]") -> None:
        """Answer one request of a stream, with the pieces of its text or with the whole text."""
        request_id = ""
        try:
            async with self._counted(call) as (begun_s, full):
                request = grpc_server.read_message("ModelInferRequest", sent, MOST_FIELDS)
                request_id = request.id[:LONGEST_NAME]
                infer = await self._read(request, full, stream=True)
                text, depths = "", tuple[int, ...]()
                async with aclosing(self._front.write(infer.text, infer.stops, begun_s=begun_s)) as pieces:
                    async for piece in pieces:
                        text, depths = text + piece.text, depths + piece.depths
                        if infer.stream or piece.finish:
                            fields = self._fields(infer, TextPiece(text, depths, piece.finish))
                            await responses.put({"infer_response": fields})
                            text, depths = "", ()
                self._front.meter.answered(begun_s)
        except RefusedError as refused:
            await responses.put({"error_message": refused.sentence, "infer_response": {"id": request_id}})

    @asynccontextmanager
    async def _counted(self, call: Call) -> AsyncIterator[tuple[float, bool]]:
        """Count the outcome of a request, unless it is answered; every failure becomes a `RefusedError`. Yields the
        time, and whether no token may leave at a ramp. Each request of a stream has the whole time of the metadata."""
        front = self._front
        with span_of_request(front.tracing, "completion", call.headers), front.counted():
            about = RequestHeaders.of(call.headers)
            async with until(ends_at(about)):
                yield front.meter.clock(), about.full

    async def _read(self, request: Any, full: bool, stream: bool) -> _InferRequest:
        """The text that a request asks for; `stream`: whether it comes in pieces, if the request does not say it."""
        grpc_server.check_infer(self._model, request)
        # Triton's clients send parameters about empty responses, which this server never sends.
        parameters = [parameter for parameter in request.parameters if not parameter.key.startswith("triton_")]
        body = _tensors(request) | _checked({parameter.key: _value(parameter.value) for parameter in parameters})
        prompt = body.pop("text_input", None)
        if prompt is None:
            raise RefusedError(400, "the tensor text_input is missing")
        completion = request_of(CompletionRequest, {"stream": stream, "prompt": prompt} | body)
        self._front.check_model(completion.model)
        for field in ("n", "echo", "logprobs"):
            if (value := getattr(completion, field)) not in (None, CompletionRequest.model_fields[field].default):
                raise RefusedError(400, f"{field} = {shown(value)}: over gRPC it is not served, over HTTP it is")
        terms = completion.terms(self._front.defaults, full=full)
        text = self._front.request(await self._front.texts.prompt(prompt), terms)
        return _InferRequest(request, text, completion.stop, completion.stream)

    def _fields(self, infer: _InferRequest, piece: TextPiece) -> grpc_server.Fields:
        """A response with the text that is new since the last one."""
        values: dict[str, Any] = {
            "text_output": [piece.text],
            "exit_block": np.array(piece.depths, np.int64),
            "finish_reason": [piece.finish or ""],
        }
        last = {"key": _FINAL, "value": {"bool_param": piece.finish is not None}}
        return grpc_server.infer_fields(self._model, infer.message, values) | {"parameters": [last]}


def _value(parameter: Any) -> Any:
    """The field that is set; if all are empty, 0, which stands for the empty value of any of them."""
    kinds = ("int64", "double", "string", "uint64", "bool")
    return next((value for kind in kinds if (value := getattr(parameter, f"{kind}_param"))), 0)


def _tensors(request: Any) -> grpc_server.Fields:
    """The values of the tensors, as fields of a completion."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise RefusedError(400, f"raw_input_contents has {len(raw)} tensors, and inputs {len(request.inputs)}")
    body: grpc_server.Fields = {}
    for place, tensor in enumerate(request.inputs):
        if tensor.name not in _INPUTS:
            raise RefusedError(400, f"there is no input {shown(tensor.name)}; there are: {', '.join(_INPUTS)}")
        kind, _ = _INPUTS[tensor.name]
        if tensor.datatype != kind or list(tensor.shape) not in ([1], [1, 1]):
            got = f"{shown(tensor.datatype)} of shape {shown(list(tensor.shape))}"
            raise RefusedError(400, f"tensor {tensor.name} is {kind} of shape [1], got {got}")
        value = _single_value(tensor, kind, raw[place] if raw else None)
        if tensor.name == "sampling_parameters":
            body |= _checked(_json_object(value))
        else:
            body[tensor.name] = value
    return body


def _single_value(tensor: Any, kind: str, raw: bytes | None) -> Any:
    try:
        (value,) = from_contents(tensor.contents, kind, 1) if raw is None else from_bytes(raw, kind, 1)
        return value if kind == BYTES else bool(value)
    except (ValueError, struct.error) as error:
        raise RefusedError(400, f"tensor {tensor.name} does not hold one {kind}: {error}") from error


def _checked(fields: grpc_server.Fields) -> grpc_server.Fields:
    """The same parameters: none of them is the text, which would stand in for the tensor."""
    for name in ("prompt", "text_input"):
        if name in fields:
            raise RefusedError(400, f"{name} is not a parameter: it is given as the tensor text_input")
    return fields


def _json_object(text: str) -> grpc_server.Fields:
    try:
        parameters = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise RefusedError(400, f"sampling_parameters must be a JSON object, got {shown(parameters)}")
    return parameters
