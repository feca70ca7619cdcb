"""The fields of OpenAI's requests that are served. Other fields are refused by name, in one sentence."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from deployments.decoding.sequences import Sampling
from deployments.front.answers import RefusedError, shown
from profiles.errors import first_wrong

TokenNumber = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
_NEUTRAL = "Accepted only with a value that changes nothing."
_WITH_DEFAULTS = ("temperature", "top_p", "stream", "include_usage", "include_obfuscation")  # null stands for these


class _RequestFields(BaseModel):
    """Fields with a default may be null, as with OpenAI: some clients send null for fields that are not set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator(*_WITH_DEFAULTS, mode="before", check_fields=False)
    @classmethod
    def _default_for_null(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[str(info.field_name)].default if value is None else value


class StreamOptions(_RequestFields):
    include_usage: bool = Field(False, description="Whether the counts of tokens come as the last piece.")
    include_obfuscation: bool = Field(False, description="Ignored: pieces are as long as they are.")


class _Generation(_RequestFields):
    """The fields that completions and chats share."""

    model: str | None = Field(None, description="The name of the model; none: the served one.")
    temperature: float = Field(0.0, ge=0, le=2, description="0: the most probable token, each time.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Only the most probable tokens that have this probability together."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed, the same text; none: 0.")
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(None, description="Where the text ends.")
    stream: bool = Field(False, description="Whether the text comes piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")
    n: Literal[1, None] = Field(None, description="One text for each prompt.")
    presence_penalty: Literal[0, None] = Field(None, description=_NEUTRAL)
    frequency_penalty: Literal[0, None] = Field(None, description=_NEUTRAL)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(None, description=_NEUTRAL)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.seed or 0)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenNumber] | list[list[TokenNumber]] = Field(description="Texts, or their tokens.")
    max_tokens: int | None = Field(16, ge=1, description="The most tokens that are written.")
    best_of: Literal[1, None] = Field(None, description=_NEUTRAL)
    echo: Literal[False, None] = Field(None, description=_NEUTRAL)
    logprobs: None = Field(None, description=_NEUTRAL)
    suffix: None = Field(None, description=_NEUTRAL)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, description="As max_completion_tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The most tokens that are written.")
    logprobs: Literal[False, None] = Field(None, description=_NEUTRAL)


AnyRequest = TypeVar("AnyRequest", bound=_Generation)


def request_of(kind: type[AnyRequest], body: object) -> AnyRequest:
    """The request; raises a `RefusedError` about the first value that is wrong."""
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body must be a JSON object, got {shown(body)}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RefusedError(400, _sentence(kind, error, body)) from error


def _sentence(kind: type[BaseModel], error: ValidationError, body: Mapping[str, Any]) -> str:
    wrong = first_wrong(error)
    field = str(wrong.place).split(".")[0]
    if wrong.kind == "extra_forbidden":
        return f"{wrong.place} is not served; there are: {', '.join(kind.model_fields)}"
    if wrong.kind == "missing":
        return f"{wrong.place} is missing"
    return f"{field} = {shown(body.get(field))}: {wrong.reason}"
