"""OpenAI's HTTP interface: completions and chats, whole or as server-sent events, and the model.

One field is an extension: every choice has `exit_blocks`, the block after which each token was known.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from deployments.decoding.front import DecoderFront
from deployments.decoding.openai_replies import (
    CHAT_SHAPE,
    COMPLETION_SHAPE,
    TextReply,
    choice_of,
    error_body,
    stream_events,
    whole_texts,
    with_first,
)
from deployments.decoding.openai_requests import ChatRequest, CompletionRequest, request_of
from deployments.decoding.openai_schemas import CHAT, COMPLETION, DecoderStats, ModelAbout, ModelList, route_options
from deployments.front.answers import RefusedError, shown
from deployments.front.bodies import body_of, json_in
from deployments.front.headers import OPEN_PATHS, path_below
from deployments.front.openapi import DocumentedApi, in_json, refusal_headers
from deployments.front.page import DOCS, EXPLAINING, explain
from deployments.front.schemas import Alive, Ready
from deployments.tracing import PARENT, Span, Tracing, current

Stats = Callable[[], Awaitable[dict[str, Any]]]
Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499  # the status in logs; the client has gone
_KINDS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


class _Api(DocumentedApi):
    """Checks the key, or without a key the origin of web pages, and gives traced requests a span."""

    tracing: Tracing | None = None
    open_paths = OPEN_PATHS | EXPLAINING | {"/"}

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await super()._handle(scope, receive, send)
        if refused := self.refusal(scope):
            return await _error(refused)(scope, receive, send)
        if self.tracing and (kind := _KINDS.get(path_below(scope))) and scope["method"] == "POST":
            headers = dict(scope["headers"])
            if self.tracing.takes(headers):
                with self.tracing.request(kind, headers) as span:
                    return await super()._handle(scope, receive, _with_traceparent(span, send))
        return await super()._handle(scope, receive, send)


def _with_traceparent(span: Span, send: Send) -> Send:
    """A `send` that adds the span of the request to the headers of its answer."""

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (PARENT.encode(), span.traceparent.encode())]}
        await send(message)

    return send_with_header


def create_decoder_api(
    front: DecoderFront,
    key: bytes | None,
    stats: Stats,
    tracing: Tracing | None = None,
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> FastAPI:
    """The HTTP application of a decoder. `beside` runs as long as it does."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with beside():
            yield
        if tracing:
            await asyncio.to_thread(tracing.close)

    api = _Api(title="isobatch", description=f"Early-exit decoding: {front.name}", lifespan=life)
    api.key, api.tracing = key, tracing
    api.allow(front.config.allowed_origins)
    writers = _Writers(front)
    about = _About(front, stats)
    api.add_exception_handler(RefusedError, writers.refused)
    api.add_exception_handler(HTTPException, _no_such_path)
    api.add_exception_handler(Exception, writers.failed)
    explain(api)
    api.add_api_route("/", _begin, methods=["GET"], include_in_schema=False)
    api.add_api_route("/v1/completions", writers.completion, methods=["POST"], **COMPLETION)
    api.add_api_route("/v1/chat/completions", writers.chat, methods=["POST"], **CHAT)
    for path, answer, options in (
        ("/v1/models", about.models, route_options(ModelList, 401, 500)),
        ("/v1/models/{name}", about.model, route_options(ModelAbout, 401, 404, 500)),
        ("/healthz", about.healthz, route_options(Alive)),
        ("/readyz", about.readyz, route_options(Ready, 500)),
        ("/stats", about.stats, route_options(DecoderStats, 401, 500)),
    ):
        api.add_api_route(path, answer, methods=["GET"], **options)
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
        body = request_of(CompletionRequest, await self._body(request))
        front.check_model(body.model)
        prompts = body.prompts
        if not 0 < len(prompts) <= front.config.max_prompts:
            raise RefusedError(400, f"prompt has {len(prompts)} texts: 1 to {front.config.max_prompts} are allowed")
        tokens = [front.texts.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        texts = [front.request(prompt, body.max_tokens, body.sampling) for prompt in tokens]
        return await self._answer(request, TextReply(COMPLETION_SHAPE, front.name, texts, body.stops, begun_s), body)

    async def chat(self, request: Request) -> Response:
        """Answer the last message of a conversation."""
        front, begun_s = self._front, self._front.meter.clock()
        body = request_of(ChatRequest, await self._body(request))
        front.check_model(body.model)
        prompt = front.texts.chat([{"role": message.role, "content": message.text} for message in body.messages])
        texts = [front.request(prompt, body.max_completion_tokens or body.max_tokens, body.sampling)]
        return await self._answer(request, TextReply(CHAT_SHAPE, front.name, texts, body.stops, begun_s), body)

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

    async def refused(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        self._front.meter.ended("refused")
        if span := current():
            span.failed(error)
        return _error(error)

    async def failed(self, _: Request, error: Exception) -> Response:
        self._front.meter.ended("failed")
        return _error(RefusedError(500, f"this server failed: {type(error).__name__}; its log says where"))


class _About:
    """Answers questions about the model and about the state of the server."""

    def __init__(self, front: DecoderFront, stats: Stats) -> None:
        self._front, self._stats = front, stats
        self._model = {"id": front.name, "object": "model", "created": int(time.time()), "owned_by": "isobatch"}

    async def models(self) -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [self._model]}

    async def model(self, name: str) -> dict[str, Any]:
        """The model of this name."""
        self._front.check_model(name)
        return self._model

    async def healthz(self) -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    async def readyz(self) -> dict[str, str]:
        """A replica answers."""
        await self._stats()
        return {"status": "ready", "model": self._front.name}

    async def stats(self) -> Response:
        """The counts since the start, and the present state."""
        about = {"schema_version": 1, "model": self._front.name, "requests": self._front.meter.requests}
        return in_json({**about, **await self._stats(), "workload": self._front.meter.workload()})


def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {shown(request.url.path)}: {error.detail}"
    hint = "POST /v1/completions and /v1/chat/completions answer, /docs explains"
    return _error(RefusedError(error.status_code, f"{sentence}; {hint}"))


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


def _error(refused: RefusedError) -> Response:
    return JSONResponse(error_body(refused), refused.status, refusal_headers(refused))
