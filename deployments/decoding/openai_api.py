"""OpenAI's HTTP interface: completions and chats, whole or as server-sent events, and the model.

One field is an extension: every choice has `exit_blocks`, the block after which each token was known.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from isobatch.deployments.decoding.front import DecoderFront
from isobatch.deployments.decoding.grpc_texts import serving
from isobatch.deployments.decoding.openai_replies import (
    CHAT_SHAPE,
    COMPLETION_SHAPE,
    TextReply,
    choice_of,
    error_body,
    stream_events,
    whole_texts,
    with_first,
)
from isobatch.deployments.decoding.openai_requests import ChatRequest, CompletionRequest, request_of
from isobatch.deployments.decoding.openai_schemas import (
    CHAT,
    COMPLETION,
    DecoderStats,
    ModelAbout,
    ModelList,
    route_options,
)
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.api import Api, api_of
from isobatch.deployments.front.bodies import body_of, json_in
from isobatch.deployments.front.headers import path_below
from isobatch.deployments.front.page import DOCS
from isobatch.deployments.tracing import PARENT, Span, Tracing, span_of_request

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499  # the status in logs; the client has gone
_KINDS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


class _Api(Api):
    """Gives traced requests a span, which lasts until the last event of a stream."""

    stats = DecoderStats
    hint = "POST /v1/completions and /v1/chat/completions answer"
    documented = staticmethod(route_options)
    error = staticmethod(error_body)
    tracing: Tracing | None = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _KINDS.get(path_below(scope)) if scope["method"] == "POST" else None
        with span_of_request(self.tracing, kind, dict(scope["headers"])) if kind else nullcontext() as span:
            await super()._answer(scope, receive, _with_traceparent(span, send) if span else send)


def _with_traceparent(span: Span, send: Send) -> Send:
    """A `send` that adds the span of the request to the headers of its answer."""

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (PARENT.encode(), span.traceparent.encode())]}
        await send(message)

    return send_with_header


def create_decoder_api(
    front: DecoderFront, beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
) -> Api:
    """The HTTP application of a decoder. `beside` runs as long as it does."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        async with beside(), serving(front):
            yield

    api = api_of(front, "Early-exit decoding", life, _Api)
    api.tracing = front.tracing
    writers = _Writers(front)
    api.add_api_route("/", _begin, methods=["GET"], include_in_schema=False)
    api.add_api_route("/v1/completions", writers.completion, methods=["POST"], **COMPLETION)
    api.add_api_route("/v1/chat/completions", writers.chat, methods=["POST"], **CHAT)
    model = {"id": front.name, "object": "model", "created": int(time.time()), "owned_by": "isobatch"}

    @api.get("/v1/models", **route_options(ModelList, 401, 500))
    async def models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [model]}

    @api.get("/v1/models/{name}", **route_options(ModelAbout, 401, 404, 500))
    async def model_named(name: str) -> dict[str, Any]:
        """The model of this name."""
        front.check_model(name)
        return model

    return api


async def _begin(request: Request) -> Response:
    """Redirect a browser to the page that explains the interface."""
    return RedirectResponse(request.scope.get("root_path", "") + DOCS)


class _Writers:
    """Answers requests for texts, and counts them by their outcome."""

    def __init__(self, front: DecoderFront) -> None:
        self._front = front

    async def completion(self, request: Request) -> Response:
        """Continue a text, or several texts."""
        front, begun_s = self._front, self._front.meter.clock()
        with front.counted():
            body = request_of(CompletionRequest, await self._body(request))
            front.check_model(body.model)
            prompts = body.prompt
            if not 0 < len(prompts) <= front.config.max_prompts:
                raise RefusedError(400, f"prompt has {len(prompts)} texts: 1 to {front.config.max_prompts} are allowed")
            tokens = [await front.texts.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
            texts = [front.request(prompt, body.terms(front.defaults)) for prompt in tokens]
            reply = TextReply(COMPLETION_SHAPE, front.name, texts, body.stop, begun_s)
            return await self._answer(request, reply, body)

    async def chat(self, request: Request) -> Response:
        """Answer the last message of a conversation."""
        front, begun_s = self._front, self._front.meter.clock()
        with front.counted():
            body = request_of(ChatRequest, await self._body(request))
            front.check_model(body.model)
            prompt = await front.texts.chat(
                [{"role": message.role, "content": message.text} for message in body.messages]
            )
            texts = [front.request(prompt, body.terms(front.defaults))]
            reply = TextReply(CHAT_SHAPE, front.name, texts, body.stop, begun_s)
            return await self._answer(request, reply, body)

    async def _body(self, request: Request) -> object:
        headers = dict(request.headers.raw)
        return json_in(await body_of(headers, request.receive, self._front.config.max_body_bytes))

    async def _answer(self, request: Request, reply: TextReply, body: CompletionRequest | ChatRequest) -> Response:
        if body.stream:
            events = stream_events(self._front, reply, body.wants_usage)
            first = await anext(events)  # a refusal comes before the status is sent
            return StreamingResponse(with_first(first, events), media_type="text/event-stream")
        if (texts := await _unless_gone(request, whole_texts(self._front, reply))) is None:
            self._front.meter.ended("cancelled")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply.written = sum(len(depths) for _, depths, _ in texts)
        self._front.meter.answered(reply.begun_s)
        choices = [
            choice_of(index, reply.shape.text(text), depths, finish)
            for index, (text, depths, finish) in enumerate(texts)
        ]
        return JSONResponse(reply.body(reply.shape.whole, choices, usage=reply.usage()))


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `answer`; None if the client disconnects before, which cancels the work."""
    work, leaving = asyncio.create_task(answer), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        leaving.cancel()
        work.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
