"""Texts over gRPC, by the Open Inference Protocol: ModelInfer returns a whole text, ModelStreamInfer its pieces.

A request has one text, `text_input`. The other fields of an OpenAI completion are parameters of the same names, or JSON
in the tensor `sampling_parameters`, as in Triton's own servers of texts. So fields are checked as over HTTP.
"""

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from deployments.decoding.front import DecoderFront, TextPiece
from deployments.decoding.openai_replies import whole_text
from deployments.decoding.openai_requests import CompletionRequest, request_of
from deployments.decoding.sequences import TextRequest
from deployments.front.answers import RefusedError, shown
from deployments.front.bodies import LONGEST_NAME, MOST_NAMED
from deployments.front.open_inference.calls import OF_CONNECTIONS, address_of, as_headers, decoded, server_of, unary
from deployments.front.open_inference.messages import message
from deployments.front.open_inference.protocol import VERSION
from deployments.front.open_inference.requests import BYTES
from deployments.front.open_inference.tensors import check_outputs, described, from_bytes, to_bytes
from deployments.tracing import Tracing

log = logging.getLogger(__name__)
MAX_STREAM_REQUESTS = 64  # requests of one stream that are answered at the same time
MOST_FIELDS = 8 * MOST_NAMED  # of one request
_INPUTS = {"text_input": BYTES, "sampling_parameters": BYTES, "stream": "BOOL"}
_OUTPUTS = {"text_output": BYTES, "exit_block": "INT64", "finish_reason": BYTES}
_FINAL = "triton_final_response"  # the parameter by which clients of Triton know the last of several responses

Fields = dict[str, Any]


@asynccontextmanager
async def serving(
    front: DecoderFront, key: bytes | None, stats: Callable[[], Awaitable[Any]], tracing: Tracing | None = None
) -> AsyncIterator[None]:
    """Serve until the `with` block ends, then finish the admitted texts. Without a port, do nothing."""
    config = front.config
    if config.grpc_port is None:
        yield
        return
    address, methods = address_of(config.grpc_host, config.grpc_port), _TextCalls(front, stats, tracing).methods()
    server = server_of(key, methods, address, config.max_body_bytes, config.max_requests, OF_CONNECTIONS)
    await server.start()
    try:
        yield
    finally:
        await server.stop(config.drain_s)


@dataclass(frozen=True)
class _InferRequest:
    """One request: the text to write, and the outputs of its responses."""

    id: str
    text: TextRequest
    stops: Sequence[str]
    stream: bool
    outputs: Sequence[str]


class _TextCalls:
    """The protocol's methods, for one decoder."""

    def __init__(
        self, front: DecoderFront, stats: Callable[[], Awaitable[Any]], tracing: Tracing | None = None
    ) -> None:
        self._front, self._stats, self._tracing = front, stats, tracing

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        answers = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelConfig": self._configuration,
            "ModelInfer": self._whole,
        }
        serialize = message("ModelStreamInferResponse").SerializeToString
        methods = {name: unary(name, answer) for name, answer in answers.items()}
        return methods | {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._streamed, None, serialize)}

    async def _live(self, _: bytes, __: Any) -> Fields:
        return {"live": True}

    async def _ready(self, _: bytes, __: Any) -> Fields:
        """A replica answers."""
        await self._stats()
        return {"ready": True}

    async def _model_ready(self, sent: bytes, context: Any) -> Fields:
        """As with Triton, a model that does not exist is not ready."""
        try:
            self._check("ModelReady", sent)
        except RefusedError:
            return {"ready": False}
        return await self._ready(sent, context)

    async def _server(self, _: bytes, __: Any) -> Fields:
        return {"name": "isobatch", "version": VERSION, "extensions": ["model_configuration"]}

    async def _metadata(self, sent: bytes, _: Any) -> Fields:
        self._check("ModelMetadata", sent)
        inputs, outputs = (
            [
                {"name": name, "datatype": kind, "shape": [-1 if name == "exit_block" else 1]}
                for name, kind in kinds.items()
            ]
            for kinds in (_INPUTS, _OUTPUTS)
        )
        model = {"name": self._front.name, "versions": [VERSION], "platform": "isobatch"}
        return model | {"inputs": inputs, "outputs": outputs}

    async def _configuration(self, sent: bytes, _: Any) -> Fields:
        """The part of Triton's configuration that its tools need: a request may have several responses."""
        self._check("ModelConfig", sent)
        inputs, outputs = ([{"name": name} for name in names] for names in (_INPUTS, _OUTPUTS))
        model = {"name": self._front.name, "platform": "isobatch", "input": inputs, "output": outputs}
        return {"config": model | {"model_transaction_policy": {"decoupled": True}}}

    def _check(self, name: str, sent: bytes) -> None:
        request = decoded(f"{name}Request", sent, MOST_FIELDS)
        self._check_model(request.name, request.version)

    def _check_model(self, name: str, version: str) -> None:
        self._front.check_model(name)
        if (version or VERSION) != VERSION:
            raise RefusedError(404, f"{self._front.name} has no version {shown(version)}: this is {VERSION}")

    async def _whole(self, sent: bytes, context: Any) -> Fields:
        with self._counted(context) as begun_s:
            infer = self._read(decoded("ModelInferRequest", sent, MOST_FIELDS), stream=False)
            if infer.stream:
                raise RefusedError(400, "stream = true: ModelStreamInfer gives a text piece by piece")
            text, depths, finish = await whole_text(self._front, infer.text, infer.stops)
            self._front.meter.answered(begun_s)
            return self._fields(infer, TextPiece(text, tuple(depths), finish))

    async def _streamed(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Answer requests of one stream at the same time. After a refusal the stream goes on."""
        response = message("ModelStreamInferResponse")
        responses: asyncio.Queue[Fields | None] = asyncio.Queue()
        places = asyncio.Semaphore(MAX_STREAM_REQUESTS)

        async def write(sent: bytes) -> None:
            try:
                await self._write(sent, context, responses)
            finally:
                places.release()

        async def write_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                async for sent in requests:
                    await places.acquire()
                    tasks.create_task(write(sent))
            await responses.put(None)

        writing = asyncio.create_task(write_all())
        try:
            while fields := await responses.get():
                yield response(**fields)
        finally:  # the client may have disconnected
            writing.cancel()

    async def _write(self, sent: bytes, context: Any, responses: "asyncio.Queue[Fields | None]") -> None:
        """Answer one request of a stream, with the pieces of its text or with the whole text."""
        request_id = ""
        try:
            with self._counted(context) as begun_s:
                request = decoded("ModelInferRequest", sent, MOST_FIELDS)
                request_id = request.id[:LONGEST_NAME]
                infer = self._read(request, stream=True)
                text, depths = "", tuple[int, ...]()
                async with aclosing(self._front.write(infer.text, infer.stops)) as pieces:
                    async for piece in pieces:
                        text, depths = text + piece.text, depths + piece.depths
                        if infer.stream or piece.finish:
                            fields = self._fields(infer, TextPiece(text, depths, piece.finish))
                            await responses.put({"infer_response": fields})
                            text, depths = "", ()
                self._front.meter.answered(begun_s)
        except RefusedError as refused:
            await responses.put({"error_message": refused.sentence, "infer_response": {"id": request_id}})

    @contextmanager
    def _counted(self, context: Any) -> Iterator[float]:
        """Count the outcome of a request, unless it is answered; every failure becomes a `RefusedError`."""
        meter = self._front.meter
        headers = as_headers(dict(context.invocation_metadata() or ()))
        traced = self._tracing and self._tracing.takes(headers)
        try:
            with self._tracing.request("completion", headers) if self._tracing and traced else nullcontext():
                yield meter.clock()
        except RefusedError:
            meter.ended("refused")
            raise
        except asyncio.CancelledError:
            meter.ended("cancelled")
            raise
        except Exception as error:
            meter.ended("failed")
            log.exception("a text could not be written")
            raise RefusedError(500, f"this server failed: {type(error).__name__}; its log says where") from error

    def _read(self, request: Any, stream: bool) -> _InferRequest:
        """The text that a request asks for; `stream`: whether it comes in pieces, if the request does not say it."""
        self._check_model(request.model_name, request.model_version)
        if len(request.id) > LONGEST_NAME or len(request.outputs) > MOST_NAMED:
            raise RefusedError(400, f"an id has {LONGEST_NAME} characters at most, and a request {MOST_NAMED} outputs")
        # Triton's clients send parameters about empty responses, which this server never sends.
        parameters = [parameter for parameter in request.parameters if not parameter.key.startswith("triton_")]
        body = _tensors(request) | {parameter.key: _value(parameter.value) for parameter in parameters}
        if "prompt" not in body:
            raise RefusedError(400, "the tensor text_input is missing")
        completion = request_of(CompletionRequest, {"stream": stream} | body)
        if not isinstance(completion.prompt, str):
            raise RefusedError(400, "prompt is given as text_input")
        outputs = [output.name for output in request.outputs] or list(_OUTPUTS)
        check_outputs(outputs, _OUTPUTS)
        prompt = self._front.texts.prompt(completion.prompt)
        text = self._front.request(prompt, completion.max_tokens, completion.sampling)
        return _InferRequest(request.id, text, completion.stops, completion.stream, outputs)

    def _fields(self, infer: _InferRequest, piece: TextPiece) -> Fields:
        """A response with the text that is new since the last one."""
        values: dict[str, Any] = {
            "text_output": [piece.text],
            "exit_block": np.array(piece.depths, np.int64),
            "finish_reason": [piece.finish or ""],
        }
        return {
            "model_name": self._front.name,
            "model_version": VERSION,
            "id": infer.id,
            "parameters": [{"key": _FINAL, "value": {"bool_param": piece.finish is not None}}],
            "outputs": [described(name, values[name]) for name in infer.outputs],
            "raw_output_contents": [to_bytes(values[name]) for name in infer.outputs],
        }


def _value(parameter: Any) -> Any:
    """The field that is set; if all are empty, 0, which stands for the empty value of any of them."""
    kinds = ("int64", "double", "string", "uint64", "bool")
    return next((value for kind in kinds if (value := getattr(parameter, f"{kind}_param"))), 0)


def _tensors(request: Any) -> Fields:
    """The values of the tensors, as fields of a completion."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise RefusedError(400, f"raw_input_contents has {len(raw)} tensors, and inputs {len(request.inputs)}")
    body: Fields = {}
    for place, tensor in enumerate(request.inputs):
        if (kind := _INPUTS.get(tensor.name)) is None:
            raise RefusedError(400, f"there is no input {shown(tensor.name)}; there are: {', '.join(_INPUTS)}")
        if tensor.datatype != kind or list(tensor.shape) not in ([1], [1, 1]):
            got = f"{shown(tensor.datatype)} of shape {shown(list(tensor.shape))}"
            raise RefusedError(400, f"tensor {tensor.name} is {kind} of shape [1], got {got}")
        value = _single_value(tensor, kind, raw[place] if raw else None)
        if tensor.name == "sampling_parameters":
            body |= _json_object(value)
        else:
            body["prompt" if tensor.name == "text_input" else "stream"] = value
    return body


def _single_value(tensor: Any, kind: str, raw: bytes | None) -> Any:
    """The one value of a tensor."""
    try:
        if raw is None:
            (value,) = tensor.contents.bytes_contents if kind == BYTES else tensor.contents.bool_contents
            return value.decode() if kind == BYTES else value
        (value,) = from_bytes(raw, kind, 1)
        return value if kind == BYTES else bool(value)
    except (ValueError, struct.error) as error:
        raise RefusedError(400, f"tensor {tensor.name} does not hold one {kind}: {error}") from error


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise RefusedError(400, f"sampling_parameters must be a JSON object, got {shown(parameters)}")
    return parameters
