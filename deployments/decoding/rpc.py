"""Texts over gRPC, by the Open Inference Protocol: ModelInfer gives a whole text, ModelStreamInfer what comes.

A request has one text, `text_input`. What else OpenAI's interface knows of a completion stands in the request's
parameters, by the same names, or as JSON in the tensor `sampling_parameters`, as Triton's own servers of texts have it.
So what is allowed, and what is said of the rest, is as over HTTP.
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
from deployments.decoding.replies import whole_of
from deployments.decoding.requests import CompletionRequest, request_of
from deployments.decoding.sequences import Wanted
from deployments.front.answers import RefusedError, shown
from deployments.front.bodies import LONGEST_NAME, MOST_NAMED
from deployments.front.open_inference.calls import OF_CALLS, OF_CONNECTIONS, Handlers, as_headers, decoded, told_to
from deployments.front.open_inference.messages import message
from deployments.front.open_inference.protocol import VERSION
from deployments.front.open_inference.requests import BYTES
from deployments.front.open_inference.tensors import check_outputs, described, from_bytes, to_bytes
from deployments.tracing import Tracing

log = logging.getLogger(__name__)
AT_ONCE = 64  # requests of one stream
MOST_FIELDS = 8 * MOST_NAMED  # of one request
_INPUTS = {"text_input": BYTES, "sampling_parameters": BYTES, "stream": "BOOL"}
_OUTPUTS = {"text_output": BYTES, "exit_block": "INT64", "finish_reason": BYTES}
_FINAL = "triton_final_response"  # the parameter by which clients of Triton know the last of several responses

Fields = dict[str, Any]


@asynccontextmanager
async def serving(
    front: DecoderFront, key: bytes | None, stats: Callable[[], Awaitable[Any]], tracing: Tracing | None = None
) -> AsyncIterator[None]:
    """Serve until the block ends, and what was let in then is written. Nothing is served where no port was given."""
    config = front.config
    if config.grpc_port is None:
        yield
        return
    options = [("grpc.max_receive_message_length", config.max_body_bytes), *OF_CALLS, *OF_CONNECTIONS]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=config.most_asked)
    server.add_generic_rpc_handlers((Handlers(key, _TextCalls(front, stats, tracing).methods()),))
    host = f"[{config.grpc_host}]" if ":" in config.grpc_host else config.grpc_host
    server.add_insecure_port(f"{host}:{config.grpc_port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(config.drain_s)


@dataclass(frozen=True)
class _Asked:
    """One request: what is to be written, and how it is told."""

    id: str
    wanted: Wanted
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
        found = {name: self._unary(name, answer) for name, answer in answers.items()}
        streamed = message("ModelStreamInferResponse").SerializeToString
        return found | {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._streamed, None, streamed)}

    def _unary(self, name: str, answer: Callable[[Any, Any], Awaitable[Fields]]) -> grpc.RpcMethodHandler:
        response = message(f"{name}Response")

        async def handle(sent: bytes, context: Any) -> Any:
            async with told_to(context, name):
                return response(**await answer(sent, context))

        return grpc.unary_unary_rpc_method_handler(handle, None, response.SerializeToString)

    async def _live(self, _: bytes, __: Any) -> Fields:
        return {"live": True}

    async def _ready(self, _: bytes, __: Any) -> Fields:
        """A replica answers."""
        await self._stats()
        return {"ready": True}

    async def _model_ready(self, sent: bytes, context: Any) -> Fields:
        """As Triton says it: what is not there is not ready."""
        try:
            self._check("ModelReady", sent)
        except RefusedError:
            return {"ready": False}
        return await self._ready(sent, context)

    async def _server(self, _: bytes, __: Any) -> Fields:
        return {"name": "isobatch", "version": VERSION, "extensions": ["model_configuration"]}

    async def _metadata(self, sent: bytes, _: Any) -> Fields:
        self._check("ModelMetadata", sent)
        tensors = [
            [
                {"name": name, "datatype": kind, "shape": [-1 if name == "exit_block" else 1]}
                for name, kind in each.items()
            ]
            for each in (_INPUTS, _OUTPUTS)
        ]
        about = {"name": self._front.name, "versions": [VERSION], "platform": "isobatch"}
        return about | {"inputs": tensors[0], "outputs": tensors[1]}

    async def _configuration(self, sent: bytes, _: Any) -> Fields:
        """As much of Triton's as its tools ask for: a request may have several responses."""
        self._check("ModelConfig", sent)
        inputs, outputs = ([{"name": name} for name in each] for each in (_INPUTS, _OUTPUTS))
        about = {"name": self._front.name, "platform": "isobatch", "input": inputs, "output": outputs}
        return {"config": about | {"model_transaction_policy": {"decoupled": True}}}

    def _check(self, name: str, sent: bytes) -> None:
        request = decoded(f"{name}Request", sent, MOST_FIELDS)
        self._check_model(request.name, request.version)

    def _check_model(self, name: str, version: str) -> None:
        self._front.check_model(name)
        if (version or VERSION) != VERSION:
            raise RefusedError(404, f"{self._front.name} has no version {shown(version)}: this is {VERSION}")

    async def _whole(self, sent: bytes, context: Any) -> Fields:
        with self._counted(context) as begun_s:
            asked = self._asked(sent)
            if asked.stream:
                raise RefusedError(400, "stream = true: ModelStreamInfer gives a text piece by piece")
            text, depths, finish = await whole_of(self._front, asked.wanted, asked.stops)
            self._front.meter.answered(begun_s)
            return self._fields(asked, TextPiece(text, tuple(depths), finish))

    async def _streamed(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Requests of one stream are answered at the same time. A refusal is a response, and the stream goes on."""
        response = message("ModelStreamInferResponse")
        news: asyncio.Queue[Fields | None] = asyncio.Queue()
        places = asyncio.Semaphore(AT_ONCE)

        async def one(sent: bytes) -> None:
            try:
                await self._write(sent, context, news)
            finally:
                places.release()

        async def begin() -> None:
            async with asyncio.TaskGroup() as all_of_them:
                async for sent in requests:
                    await places.acquire()
                    all_of_them.create_task(one(sent))
            await news.put(None)

        writing = asyncio.create_task(begin())
        try:
            while fields := await news.get():
                yield response(**fields)
        finally:  # the client may have gone: nobody waits for the rest
            writing.cancel()

    async def _write(self, sent: bytes, context: Any, news: "asyncio.Queue[Fields | None]") -> None:
        """Have one text written, and tell it: piece by piece, or as one."""
        told = ""
        try:
            with self._counted(context) as begun_s:
                request = decoded("ModelInferRequest", sent, MOST_FIELDS)
                told = request.id[:LONGEST_NAME]
                asked = self._read(request, stream=True)
                text, depths = "", tuple[int, ...]()
                async with aclosing(self._front.write(asked.wanted, asked.stops)) as pieces:
                    async for piece in pieces:
                        text, depths = text + piece.text, depths + piece.depths
                        if asked.stream or piece.finish:
                            await news.put(
                                {"infer_response": self._fields(asked, TextPiece(text, depths, piece.finish))}
                            )
                            text, depths = "", ()
                self._front.meter.answered(begun_s)
        except RefusedError as refused:
            await news.put({"error_message": refused.sentence, "infer_response": {"id": told}})

    @contextmanager
    def _counted(self, context: Any) -> Iterator[float]:
        """Count how the request inside ends, unless it is answered; every failure comes out as a `RefusedError`."""
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

    def _asked(self, sent: bytes) -> _Asked:
        return self._read(decoded("ModelInferRequest", sent, MOST_FIELDS), stream=False)

    def _read(self, request: Any, stream: bool) -> _Asked:
        """What a request asks for; `stream`: whether it comes in pieces, if the request does not say."""
        self._check_model(request.model_name, request.model_version)
        if len(request.id) > LONGEST_NAME or len(request.outputs) > MOST_NAMED:
            raise RefusedError(400, f"an id has {LONGEST_NAME} characters at most, and a request {MOST_NAMED} outputs")
        tensors = _tensors(request)
        body = tensors | {each.key: _value(each.value) for each in request.parameters if not _is_tritons(each.key)}
        if "prompt" not in body:
            raise RefusedError(400, "the tensor text_input is missing")
        asked = request_of(CompletionRequest, {"stream": stream} | body)
        if not isinstance(asked.prompt, str):
            raise RefusedError(400, "prompt is given as text_input")
        outputs = [each.name for each in request.outputs] or list(_OUTPUTS)
        check_outputs(outputs, _OUTPUTS)
        wanted = self._front.wanted(self._front.texts.prompt(asked.prompt), asked.max_tokens, asked.sampling)
        return _Asked(request.id, wanted, asked.stops, asked.stream, outputs)

    def _fields(self, asked: _Asked, piece: TextPiece) -> Fields:
        """A response: what was written since the last one."""
        values: dict[str, Any] = {
            "text_output": [piece.text],
            "exit_block": np.array(piece.depths, np.int64),
            "finish_reason": [piece.finish or ""],
        }
        return {
            "model_name": self._front.name,
            "model_version": VERSION,
            "id": asked.id,
            "parameters": [{"key": _FINAL, "value": {"bool_param": piece.finish is not None}}],
            "outputs": [described(name, values[name]) for name in asked.outputs],
            "raw_output_contents": [to_bytes(values[name]) for name in asked.outputs],
        }


def _is_tritons(name: str) -> bool:
    """What Triton's clients say of empty responses, which do not come here."""
    return name.startswith("triton_")


def _value(parameter: Any) -> Any:
    """Whichever field is set; none differs from the 0 that it may stand for."""
    kinds = ("int64", "double", "string", "uint64", "bool")
    return next((value for kind in kinds if (value := getattr(parameter, f"{kind}_param"))), 0)


def _tensors(request: Any) -> Fields:
    """What the tensors say, as fields of a completion."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise RefusedError(400, f"raw_input_contents has {len(raw)} tensors, and inputs {len(request.inputs)}")
    body: Fields = {}
    for place, tensor in enumerate(request.inputs):
        if (kind := _INPUTS.get(tensor.name)) is None:
            raise RefusedError(400, f"there is no input {shown(tensor.name)}; there are: {', '.join(_INPUTS)}")
        if tensor.datatype != kind or list(tensor.shape) not in ([1], [1, 1]):
            told = f"{shown(tensor.datatype)} of shape {shown(list(tensor.shape))}"
            raise RefusedError(400, f"tensor {tensor.name} is {kind} of shape [1], got {told}")
        value = _one(tensor, kind, raw[place] if raw else None)
        body |= {"prompt": value} if tensor.name == "text_input" else _further(tensor.name, value)
    return body


def _one(tensor: Any, kind: str, raw: bytes | None) -> Any:
    """The one value of a tensor."""
    try:
        if raw is None:
            (value,) = tensor.contents.bytes_contents if kind == BYTES else tensor.contents.bool_contents
            return value.decode() if kind == BYTES else value
        (found,) = from_bytes(raw, kind, 1)
        return found if kind == BYTES else bool(found)
    except (ValueError, struct.error) as error:
        raise RefusedError(400, f"tensor {tensor.name} does not hold one {kind}: {error}") from error


def _further(name: str, value: Any) -> Mapping[str, Any]:
    if name == "stream":
        return {"stream": value}
    try:
        told = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise RefusedError(400, f"sampling_parameters must be a JSON object, got {shown(told)}")
    return told
