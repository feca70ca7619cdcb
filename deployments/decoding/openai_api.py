"""OpenAI's HTTP interface: completions and chats, whole or as server-sent events, and the model.

One field is an extension: every choice has `exit_blocks`, the block after which each token was known.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from isobatch.deployments.decoding import openai_answers
from isobatch.deployments.decoding.front import DecoderFront, TextPiece, ends_at, until
from isobatch.deployments.decoding.grpc_texts import serving
from isobatch.deployments.decoding.openai_requests import ChatRequest, CompletionRequest, StreamOptions, request_of
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.decoding.texts import UNFINISHED, GrowingText, TextTokens
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.api import Api, api_of
from isobatch.deployments.front.bodies import body_of, json_in
from isobatch.deployments.front.headers import RequestHeaders, headers_in, path_below
from isobatch.deployments.front.openapi import BY_GUARD
from isobatch.deployments.front.page import DOCS
from isobatch.deployments.tracing import PARENT, Tracing, span_of_request

_DONE = b"data: [DONE]\n\n"
NO_TEXT = TextPiece("", ())
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class ReplyShape:
    """The differences between completions and chats, and between their answers."""

    request: type[CompletionRequest] | type[ChatRequest]
    id: str
    whole: str
    piece: str
    text: Callable[[str], dict[str, Any]]  # the fields of a whole text
    delta: Callable[[str], dict[str, Any]]  # the fields of a piece of a text
    logprobs: "Callable[[TextReply, int, TextPiece], dict[str, Any]]"  # those of a piece, by the number of its choice
    opening: dict[str, Any] | None = None  # the fields of the first piece of each choice, before any text


def _name_of(token: int, text: str) -> str:
    """The name of a token in log probabilities: its text, or its number if it is only a part of a character."""
    return f"token_id:{token}" if UNFINISHED in text else text


def _completion_logprobs(reply: "TextReply", index: int, piece: TextPiece) -> dict[str, Any]:
    def name(token: int) -> str:
        return _name_of(token, reply.words.token_text(token))

    return {
        "tokens": list(map(name, piece.tokens)),
        "token_logprobs": [each.logprob for each in piece.logprobs],
        "top_logprobs": [
            {name(other): logprob for other, logprob in (*each.best, (token, each.logprob))}
            for token, each in zip(piece.tokens, piece.logprobs, strict=True)
        ],
        "text_offset": reply.offsets(index, piece.tokens),
        "blocks": [each.block for each in piece.logprobs],
    }


def _chat_logprobs(reply: "TextReply", index: int, piece: TextPiece) -> dict[str, Any]:
    def token_fields(token: int, logprob: float) -> dict[str, Any]:
        text = reply.words.token_text(token)
        known = None if UNFINISHED in text else list(text.encode())
        return {"token": _name_of(token, text), "logprob": logprob, "bytes": known}

    content = [
        {
            **token_fields(token, each.logprob),
            "top_logprobs": [token_fields(*other) for other in each.best],
            "block": each.block,
        }
        for token, each in zip(piece.tokens, piece.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


COMPLETION_SHAPE = ReplyShape(
    CompletionRequest,
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    lambda text: {"text": text},
    _completion_logprobs,
)
CHAT_SHAPE = ReplyShape(
    ChatRequest,
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"content": text} if text else {}},
    _chat_logprobs,
    {"delta": {"role": "assistant", "content": ""}},
)


@dataclass
class TextReply:
    """An answer to one request, which may have several choices: `copies` for each prompt.

    `echoes`: the beginnings of their texts. `silent`: tokens without text. `ends_at`: the client's deadline, by the
    event loop's clock.
    """

    shape: ReplyShape
    model: str
    words: TextTokens
    requests: list[TextRequest]
    stops: Sequence[str]
    begun_s: float
    copies: int = 1
    echoes: Sequence[str] = ()
    silent: Collection[int] = ()
    ends_at: float | None = None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    written: int = 0  # tokens
    # The characters of the texts so far and the texts, by choice, where log probabilities need them.
    _characters: Counter[int] = field(default_factory=Counter)
    _texts: dict[int, GrowingText] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.shape.id + uuid.uuid4().hex[:24]

    def opening(self, index: int) -> dict[str, Any] | None:
        """The fields of the first piece of a choice, before any text."""
        return self.shape.delta(self.echoes[index]) if self.echoes else self.shape.opening

    def whole(self, index: int, piece: TextPiece) -> dict[str, Any]:
        echo = self.echoes[index] if self.echoes else ""
        return self.choice(index, self.shape.text(echo + piece.text), piece)

    def answer(self, pieces: Sequence[TextPiece]) -> Response:
        """The whole answer, with these texts of its choices."""
        choices = [self.whole(index, piece) for index, piece in enumerate(pieces)]
        return JSONResponse(self.body(self.shape.whole, choices, usage=self.usage()))

    def choice(self, index: int, fields: Mapping[str, Any], piece: TextPiece = NO_TEXT) -> dict[str, Any]:
        return {
            "index": index,
            **fields,
            "logprobs": self.shape.logprobs(self, index, piece) if piece.logprobs else None,
            "finish_reason": piece.finish.value if piece.finish else None,
            "exit_blocks": list(piece.depths),
        }

    def offsets(self, index: int, tokens: Sequence[int]) -> list[int]:
        """The number of characters before each new token of a choice."""
        if index not in self._texts:
            self._texts[index] = self.words.growing_text((), self.silent, after=self.requests[index].prompt)
        sizes = (len(self._texts[index].add([token])[0]) for token in tokens)
        *offsets, self._characters[index] = accumulate(sizes, initial=self._characters[index])
        return offsets

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more,
        }  # fmt: skip

    @property
    def share(self) -> float:
        return 1 / len(self.requests)

    def usage(self) -> dict[str, int]:
        read = sum(each.given for each in self.requests[:: self.copies])
        return {"prompt_tokens": read, "completion_tokens": self.written, "total_tokens": read + self.written}


async def whole_texts(front: DecoderFront, reply: TextReply) -> list[TextPiece]:
    """The texts of all choices. If one is refused or fails, the others are cancelled."""
    try:
        async with until(reply.ends_at), asyncio.TaskGroup() as writing:
            texts = (front.whole(request, reply.stops, reply.share, reply.begun_s) for request in reply.requests)
            tasks = [writing.create_task(text) for text in texts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def stream_events(front: DecoderFront, reply: TextReply, options: StreamOptions) -> AsyncGenerator[bytes, None]:
    """The events of a stream; pieces of several texts come in the order in which they are written. If the last event
    counts tokens, the others have a `usage`, too: without a value, as with OpenAI, or with the counts so far."""
    usage = options.include_usage

    def usage_so_far() -> dict[str, Any]:
        return {"usage": reply.usage() if options.continuous_usage_stats else None} if usage else {}

    try:
        with front.counted():
            async with aclosing(_pieces(front, reply)) as written:
                opened: set[int] = set()
                async for index, piece in written:
                    if index not in opened and (opening := reply.opening(index)):
                        yield _event(reply.body(reply.shape.piece, [reply.choice(index, opening)], **usage_so_far()))
                    opened.add(index)
                    reply.written += len(piece.depths)
                    choice = reply.choice(index, reply.shape.delta(piece.text), piece)
                    yield _event(reply.body(reply.shape.piece, [choice], **usage_so_far()))
            if usage:
                yield _event(reply.body(reply.shape.piece, [], usage=reply.usage()))
        front.meter.answered(reply.begun_s)  # now: a client may go as soon as it has the last event
        yield _DONE
    except RefusedError as refused:
        if not reply.written:
            raise
        yield _event(error_body(refused))


async def _pieces(front: DecoderFront, reply: TextReply) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """The pieces of all choices, each with the number of its choice."""
    news: asyncio.Queue[tuple[int, TextPiece | BaseException | None]] = asyncio.Queue()

    async def write(index: int, request: TextRequest) -> None:
        try:
            async with aclosing(front.write(request, reply.stops, reply.share, reply.begun_s)) as written:
                async for piece in written:
                    news.put_nowait((index, piece))
        except Exception as error:
            news.put_nowait((index, error))
        news.put_nowait((index, None))

    tasks = [asyncio.create_task(write(index, request)) for index, request in enumerate(reply.requests)]
    try:
        left = len(tasks)
        while left:
            async with until(reply.ends_at):
                index, piece = await news.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(refused: RefusedError) -> dict[str, Any]:
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.sentence, "type": kind, "param": None, "code": None}}


_KINDS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


class _Api(Api):
    """Gives traced requests a span, which lasts until the last event of a stream."""

    stats = openai_answers.DecoderStats
    hint = "POST /v1/completions and /v1/chat/completions answer"
    documented = staticmethod(openai_answers.route_options)
    error = staticmethod(error_body)
    tracing: Tracing | None = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _KINDS.get(path_below(scope)) if scope["method"] == "POST" else None
        with span_of_request(self.tracing, kind, headers_in(scope)) if kind else nullcontext() as span:

            async def send_with_span(message: Message) -> None:
                """Add the span of the request to the headers of its answer."""
                assert span, "This is a bug: the request is not traced."
                if message["type"] == "http.response.start":
                    parent = PARENT.encode(), span.traceparent.encode()
                    message = {**message, "headers": [*message["headers"], parent]}
                await send(message)

            await super()._answer(scope, receive, send_with_span if span else send)


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
    api.add_api_route("/v1/completions", writers.completion, methods=["POST"], **openai_answers.COMPLETION)
    api.add_api_route("/v1/chat/completions", writers.chat, methods=["POST"], **openai_answers.CHAT)
    model = {"id": front.name, "object": "model", "created": int(time.time()), "owned_by": "isobatch"}

    @api.get("/v1/models", **openai_answers.route_options(openai_answers.ModelList, *BY_GUARD, 500))
    async def models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [model]}

    @api.get("/v1/models/{name}", **openai_answers.route_options(openai_answers.ModelAbout, *BY_GUARD, 404, 500))
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
        return await self._answered(request, COMPLETION_SHAPE)

    async def chat(self, request: Request) -> Response:
        """Answer the last message of a conversation."""
        return await self._answered(request, CHAT_SHAPE)

    async def _answered(self, request: Request, shape: ReplyShape) -> Response:
        front = self._front
        with front.counted():
            reply, body = await self._read(request, shape)
            if not body.stream:
                return await self._whole(reply)
        events = stream_events(front, reply, body.stream_options or StreamOptions())
        first = await anext(events)  # a refusal comes before the status is sent

        async def with_first() -> AsyncGenerator[bytes, None]:
            async with aclosing(events):
                yield first
                async for event in events:
                    yield event

        return StreamingResponse(with_first(), media_type="text/event-stream")

    async def _read(self, request: Request, shape: ReplyShape) -> tuple[TextReply, CompletionRequest | ChatRequest]:
        """The request, and its answer before anything is written."""
        front, begun_s, headers = self._front, self._front.meter.clock(), headers_in(request.scope)
        about = RequestHeaders.of(headers)
        deadline = ends_at(about)
        content = await body_of(headers, request.receive, front.config.max_body_bytes)
        body = request_of(shape.request, json_in(content))
        front.check_model(body.model)
        prompts = await self._prompts(body)
        if (count := len(prompts) * body.n) > front.config.max_prompts:
            raise RefusedError(400, f"n = {body.n}: {count} texts in all: {front.config.max_prompts} are allowed")
        texts = [
            front.request(prompt, body.terms(front.defaults, number, about.full))
            for prompt in prompts for number in range(body.n)
        ]  # fmt: skip
        echoed = body.prompt if isinstance(body, CompletionRequest) and body.echo else ()
        echoes = [
            text
            for prompt in echoed
            for text in [prompt if isinstance(prompt, str) else front.texts.text_of(prompt)] * body.n
        ]  # fmt: skip
        reply = TextReply(
            shape, front.name, front.texts, texts, body.stop, begun_s, body.n, echoes, front.stop, deadline
        )  # fmt: skip
        return reply, body

    async def _whole(self, reply: TextReply) -> Response:
        texts = await whole_texts(self._front, reply)
        reply.written = sum(len(piece.depths) for piece in texts)
        if any(piece.logprobs for piece in texts):  # a long answer: meanwhile this thread works for other requests
            answer = await asyncio.to_thread(reply.answer, texts)
        else:
            answer = reply.answer(texts)
        self._front.meter.answered(reply.begun_s)
        return answer

    async def _prompts(self, body: CompletionRequest | ChatRequest) -> list[tuple[int, ...]]:
        texts, most = self._front.texts, self._front.config.max_prompts
        if isinstance(body, ChatRequest):
            return [await texts.chat([message.fields for message in body.messages])]
        if not 0 < len(body.prompt) <= most:
            raise RefusedError(400, f"prompt has {len(body.prompt)} texts: 1 to {most} are allowed")
        return [await texts.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
