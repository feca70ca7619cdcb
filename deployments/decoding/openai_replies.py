"""Answers in OpenAI's format: whole ones, and the events of a stream."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from isobatch.deployments.decoding.client_meter import RequestEnd
from isobatch.deployments.decoding.front import DecoderFront, TextPiece
from isobatch.deployments.decoding.sequences import Finish, TextRequest
from isobatch.deployments.front.answers import RefusedError

WholeText = tuple[str, list[int], Finish | None]  # beside the depth of each token
_DONE = b"data: [DONE]\n\n"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


@dataclass(frozen=True)
class ReplyShape:
    """The differences between the answers to completions and to chats."""

    kind: str
    id: str
    whole: str
    piece: str
    text: Callable[[str], dict[str, Any]]  # the fields of a whole text
    delta: Callable[[str], dict[str, Any]]  # the fields of a piece of a text
    opening: dict[str, Any] | None = None  # the fields of the first piece of each choice, before any text


COMPLETION_SHAPE = ReplyShape(
    "completion",
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    lambda text: {"text": text},
)
CHAT_SHAPE = ReplyShape(
    "chat",
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)


@dataclass
class TextReply:
    """An answer to one request, which may have several choices."""

    shape: ReplyShape
    model: str
    requests: list[TextRequest]
    stops: Sequence[str]
    begun_s: float
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    written: int = 0  # tokens

    def __post_init__(self) -> None:
        self.id = self.shape.id + uuid.uuid4().hex[:24]

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more,
        }  # fmt: skip

    @property
    def share(self) -> float:
        """The share of each choice in the request."""
        return 1 / len(self.requests)

    def usage(self) -> dict[str, int]:
        read = sum(each.given for each in self.requests)
        return {"prompt_tokens": read, "completion_tokens": self.written, "total_tokens": read + self.written}


async def whole_text(
    front: DecoderFront, request: TextRequest, stops: Sequence[str], share: float = 1.0, begun_s: float | None = None
) -> WholeText:
    text, finish = "", None
    depths: list[int] = []
    async with aclosing(front.write(request, stops, share, begun_s)) as written:
        async for piece in written:
            text, finish = text + piece.text, piece.finish
            depths += piece.depths
    return text, depths, finish


async def whole_texts(front: DecoderFront, reply: TextReply) -> list[WholeText]:
    """The texts of all choices. If one is refused or fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as writing:
            texts = (whole_text(front, request, reply.stops, reply.share, reply.begun_s) for request in reply.requests)
            tasks = [writing.create_task(text) for text in texts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def stream_events(front: DecoderFront, reply: TextReply, usage: bool) -> AsyncGenerator[bytes, None]:
    """The events of a stream; pieces of several texts come in the order in which they are written."""
    outcome: RequestEnd | None = "cancelled"  # None: counted by the handler that answers instead
    opening = reply.shape.opening
    try:
        async with aclosing(_pieces(front, reply)) as written:
            opened: set[int] = set()
            async for index, piece in written:
                if opening and index not in opened:
                    opened.add(index)
                    yield _event(reply.body(reply.shape.piece, [choice_of(index, opening, (), None)]))
                reply.written += len(piece.depths)
                choice = choice_of(index, reply.shape.delta(piece.text), piece.depths, piece.finish)
                yield _event(reply.body(reply.shape.piece, [choice]))
        if usage:
            yield _event(reply.body(reply.shape.piece, [], usage=reply.usage()))
        yield _DONE
        outcome = "answered"
    except RefusedError as refused:
        outcome = "refused" if reply.written else None
        if not reply.written:
            raise
        yield _event(error_body(refused))
    except Exception:
        outcome = "failed" if reply.written else None
        raise
    finally:
        if outcome == "answered":
            front.meter.answered(reply.begun_s)
        elif outcome:
            front.meter.ended(outcome)


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


async def with_first(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        yield first
        async for piece in pieces:
            yield piece


def choice_of(index: int, fields: Mapping[str, Any], depths: Sequence[int], finish: Finish | None) -> dict[str, Any]:
    reason = finish.value if finish else None
    return {"index": index, **fields, "logprobs": None, "finish_reason": reason, "exit_blocks": list(depths)}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(refused: RefusedError) -> dict[str, Any]:
    kind = _TYPES.get(refused.status, "invalid_request_error")
    return {"error": {"message": refused.sentence, "type": kind, "param": None, "code": None}}
