"""The answers of OpenAI's interface and of `/stats`, as they are documented."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from isobatch.deployments.decoding.client_meter import RequestEnd
from isobatch.deployments.decoding.openai_requests import ChatRequest, CompletionRequest
from isobatch.deployments.demo.sums import prompt_of
from isobatch.deployments.front.openapi import PROBLEMS, documented, examples, json_body, schema_of
from isobatch.deployments.front.schemas import Schema

_FINISH = Literal["stop", "length"]
_PROBLEMS = {status: PROBLEMS[status] for status in (400, 401, 403, 404, 408, 413, 415, 504)} | {
    429: "There is no place for another sequence; try again later.",
    422: "The network's numbers are too large for this text.",
    500: "A replica, or this server, failed.",
    503: "There are too many requests now, or no replica is running; try again later.",
}


class ErrorAbout(Schema):
    message: str = Field(description="One sentence that names the value.")
    type: str
    param: None
    code: None


class DecoderError(Schema):
    error: ErrorAbout


class TokenUsage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Schema):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] = Field(
        description="Those of the most probable tokens and of the chosen one; a part of a character as token_id:N."
    )
    text_offset: list[int] = Field(
        description="The characters before each token; one of several tokens counts after its last token."
    )
    blocks: list[int] = Field(description="The block after which the log probabilities of each token were read.")


class TopLogprob(Schema):
    token: str
    logprob: float
    bytes: list[int] | None = Field(description="In UTF-8; null: a part of a character, whose bytes are not known.")


class ChatToken(TopLogprob):
    top_logprobs: list[TopLogprob]
    block: int = Field(description="The block after which the log probabilities were read.")


class ChatLogprobs(Schema):
    content: list[ChatToken]
    refusal: None


class _Choice(Schema):
    index: int
    finish_reason: _FINISH | None
    exit_blocks: list[int] = Field(description="For each token the block after which it was known.")


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class _Answer(Schema):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    usage: TokenUsage


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelAbout(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["isobatch"]


class ModelList(Schema):
    object: Literal["list"]
    data: list[ModelAbout]


class DecoderSplit(Schema):
    split: int
    launches: int
    fill: float


class DecoderStats(Schema):
    """The counts since the start, and the present state."""

    version: str = Field(description="Of isobatch.")
    schema_version: Literal[2]
    model: str
    requests: dict[RequestEnd, int]
    replicas: int = Field(description="The replicas that answered; all that follows is the sum over them.")
    ramps: list[int] = Field(description="Blocks after which tokens may be known.")
    exits: dict[str, int] = Field(description="Tokens by the block after which they were known.")
    residents: int
    waiting: int
    pages: dict[Literal["free", "of"], int]
    prefix_hits: float
    preempted: int
    tokens_per_s: float
    splits: list[DecoderSplit]


def route_options(model: type[BaseModel], *statuses: int) -> dict[str, Any]:
    """The options of a route: its answer, and the problems that it may answer with."""
    return documented(model, *statuses, error=DecoderError, about=_PROBLEMS)


def _writing(request: type[BaseModel], answer: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    options = route_options(answer, *_PROBLEMS)
    options["responses"][200]["content"] = {
        "text/event-stream": {"schema": {"type": "string", "description": "With `stream`: events, as OpenAI's."}}
    }
    shown = examples(a_text=example, a_stream={**example, "stream": True})
    return {**options, "openapi_extra": json_body(schema_of(request), shown)}


COMPLETION = _writing(CompletionRequest, Completion, {"prompt": prompt_of(47, 85), "max_tokens": 24})
CHAT = _writing(
    ChatRequest, ChatCompletion, {"messages": [{"role": "user", "content": prompt_of(47, 85)}], "max_tokens": 24}
)
