"""The fields of OpenAI's requests that are served. Other fields are refused by name, in one sentence."""

from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from secrets import randbits
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from isobatch.deployments.decoding.grammars import grammar_of
from isobatch.deployments.decoding.ramp_rules import LEAST_REPETITION, GenerationDefaults
from isobatch.deployments.decoding.sequences import Sampling, TextTerms
from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.profiles.errors import first_wrong

_NEUTRAL = "Accepted only with a value that changes nothing."
_EXPERIMENTAL = "Experimental: "
_OF_THE_FILE = "none: as generation_config.json says, or "
_PROMPT = "a prompt is a text, a list of texts, a list of tokens (numbers from 0), or a list of such lists"
MOST_STOPS = 4
MOST_ALTERNATIVES = 20  # tokens whose log probabilities are returned beside the chosen one's
MOST_BIASED = 1024  # tokens
# null stands for the default of these fields
_WITH_DEFAULTS = (
    "stream", "include_usage", "continuous_usage_stats", "include_obfuscation", "min_tokens", "ignore_eos", "n",
    "presence_penalty", "frequency_penalty", "logit_bias", "echo",
)  # fmt: skip


def _not_a_bool(value: object) -> object:
    """Refuse true and false, which Python takes for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _listed(value: object) -> object:
    if not (value is None or isinstance(value, str | list)):
        raise ValueError("must be a text, or a list of texts")
    return [value] if isinstance(value, str) else value or []


def _few(value: object) -> object:
    """Refuse too many tokens before they are read: an error for each would take gigabytes."""
    if isinstance(value, dict) and len(value) > MOST_BIASED:
        raise ValueError(f"has {len(value)} tokens: {MOST_BIASED} are allowed")
    return value


def _parts(value: object) -> object:
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise ValueError('must be a text, or a list of {"type": "text", "text": ...}: nothing else is read')
    return parts


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a request, one by one. Types are compared in one pass, as a body may hold a million tokens."""
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else {object}
    if isinstance(value, list) and kinds <= {str}:
        return value
    lists = value if kinds == {list} else [value]
    if kinds - {int, list} or any(set(map(type, each)) - {int} or min(each, default=0) < 0 for each in lists):
        raise ValueError(_PROMPT)
    return [tuple(each) for each in lists]


Number = Annotated[float, BeforeValidator(_not_a_bool)]
Count = Annotated[int, BeforeValidator(_not_a_bool)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Alternatives = Annotated[Count, Field(ge=0, le=MOST_ALTERNATIVES)]
Biases = Annotated[
    dict[Annotated[int, Field(ge=0)], Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MOST_BIASED),
    BeforeValidator(_few),
]
Nothing = Annotated[list[Any], Field(max_length=0)] | None
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=MOST_STOPS),
    BeforeValidator(_listed, json_schema_input_type=str | list[str] | None),
]
Prompts = Annotated[
    list[str | tuple[int, ...]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class _RequestFields(BaseModel):
    """Fields with a default may be null, as with OpenAI, and so may fields that are not served: some clients send null
    for fields that are not set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_unset(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        served = {field.alias or name for name, field in cls.model_fields.items()}
        others = (name for name, value in fields.items() if value is not None and name not in served)
        named = served.union(islice(others, 1))  # of others one, as an error for each of millions would take gigabytes
        return {name: value for name, value in fields.items() if name in named}

    @field_validator(*_WITH_DEFAULTS, mode="before", check_fields=False)
    @classmethod
    def _default_for_null(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[str(info.field_name)].default if value is None else value


class StreamOptions(_RequestFields):
    include_usage: bool = Field(False, description="Whether the counts of tokens come as the last piece.")
    continuous_usage_stats: bool = Field(
        False, description=f"{_EXPERIMENTAL}whether each piece has the counts so far, if the last one has them."
    )
    include_obfuscation: bool = Field(False, description="Ignored: pieces are as long as they are.")


class PlainText(_RequestFields):
    type: Literal["text"]

    @property
    def grammar(self) -> str:
        return ""


class JsonText(_RequestFields):
    """Any JSON object."""

    type: Literal["json_object"]

    @cached_property
    def grammar(self) -> str:
        return grammar_of({"type": "object"})


class NamedSchema(_RequestFields):
    name: str = Field("", description="Ignored.")
    description: str | None = Field(None, description="Ignored.")
    strict: bool | None = Field(None, description="Ignored: the text always follows the schema.")
    content: dict[str, Any] = Field(alias="schema", description="A JSON Schema.")


class SchemaText(_RequestFields):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @cached_property
    def grammar(self) -> str:
        return grammar_of(self.json_schema.content)


AnyFormat = PlainText | JsonText | SchemaText | None
FORMATS = ("text", "json_object", "json_schema")


class _Generation(_RequestFields):
    """The fields that completions and chats share."""

    model: str | None = Field(None, description="The name of the model; none: the served one.")
    max_tokens: Count | None = None
    min_tokens: Count = Field(0, ge=0, description="Fewer tokens do not end the text, unless max_tokens is reached.")
    ignore_eos: bool = Field(False, description="Whether the text goes on after a token that would end it.")
    temperature: Number | None = Field(
        None, ge=0, le=2, description=f"0: the most probable token, each time; {_OF_THE_FILE}0."
    )
    top_p: Number | None = Field(
        None,
        gt=0,
        le=1,
        description=f"Only the most probable tokens that have this probability together; {_OF_THE_FILE}1.",
    )
    top_k: Count | None = Field(
        None, ge=-1, description=f"Only this number of most probable tokens; 0 or -1: all; {_OF_THE_FILE}all."
    )
    seed: Count | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="The same seed, the same text; none: another one each time."
    )
    stop: Stops = Field([], description=f"The text ends before this text, or one of up to {MOST_STOPS}.")
    stream: bool = Field(False, description="Whether the text comes piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")
    n: Count = Field(1, ge=1, description=f"{_EXPERIMENTAL}texts for each prompt, each drawn with another seed.")
    min_p: Number | None = Field(
        None,
        ge=0,
        le=1,
        description=f"{_EXPERIMENTAL}only tokens with this share of the first one's probability; {_OF_THE_FILE}0.",
    )
    presence_penalty: Penalty = Field(0, description=f"{_EXPERIMENTAL}taken from the logits of tokens in the text.")
    frequency_penalty: Penalty = Field(
        0, description=f"{_EXPERIMENTAL}the same, for each time that a token is in the text."
    )
    repetition_penalty: Number | None = Field(
        None,
        ge=LEAST_REPETITION,
        le=100,
        description=f"{_EXPERIMENTAL}divides the logits of tokens in the prompt or the text, or multiplies them where "
        f"they are negative; {_OF_THE_FILE}1.",
    )
    logit_bias: Biases = Field({}, description=f"{_EXPERIMENTAL}added to the logits of tokens, by their numbers.")
    response_format: AnyFormat = Field(
        None, discriminator="type", description=f"{_EXPERIMENTAL}plain text, any JSON object, or JSON by a schema."
    )
    store: Literal[False, None] = Field(None, description=_NEUTRAL)
    metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    service_tier: Literal["auto", "default", None] = Field(None, description=_NEUTRAL)

    def terms(self, defaults: GenerationDefaults, number: int = 0, full: bool = False) -> TextTerms:
        """The terms of one of the texts for a prompt, by its number. Without a seed, each is drawn with another one.
        `full`: no token leaves at a ramp."""
        sampling = Sampling(
            defaults.drawn_at if self.temperature is None else self.temperature,
            self.top_p or defaults.top_p or 1.0,
            randbits(63) if self.seed is None else self.seed + number,
            max(0, (defaults.top_k or 0) if self.top_k is None else self.top_k),
            (defaults.min_p or 0.0) if self.min_p is None else self.min_p,
            tuple(self.logit_bias.items()),
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty or defaults.repetition_penalty or 1.0,
            self._alternatives,
            self.response_format.grammar if self.response_format else "",
        )
        most, usual = self._limits
        return TextTerms(most, sampling, self.min_tokens, self.ignore_eos, usual, full)

    @field_validator("response_format", mode="before")
    @classmethod
    def _of_known_type(cls, value: object) -> object:
        if not (value is None or (isinstance(value, dict) and value.get("type") in FORMATS)):
            raise ValueError(f"must be an object whose type is one of: {', '.join(FORMATS)}")
        return value

    @field_validator("response_format")
    @classmethod
    def _with_grammar(cls, value: AnyFormat) -> AnyFormat:
        if value:
            _ = value.grammar  # compiled here, once, or refused
        return value

    @property
    def _limits(self) -> tuple[int | None, int | None]:
        """The most tokens that the client allows, and those where it says nothing, if there is room for them; None: no
        such limit."""
        raise NotImplementedError

    @property
    def _alternatives(self) -> int | None:
        """The most probable tokens whose log probabilities are returned; None: no log probabilities are."""
        raise NotImplementedError


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: Prompts = Field(description="Texts, or their tokens.")
    max_tokens: Count | None = Field(16, ge=1, description="The most tokens that are written.")
    best_of: Count | None = Field(None, description="As n: all texts that are written are returned.")
    echo: bool = Field(False, description=f"{_EXPERIMENTAL}whether the text begins with the prompt.")
    logprobs: Alternatives | None = Field(
        None, description=f"{_EXPERIMENTAL}log probabilities of the tokens, and of this number of most probable ones."
    )
    suffix: None = Field(None, description=_NEUTRAL)

    @property
    def _limits(self) -> tuple[int | None, int | None]:
        return (self.max_tokens, None) if "max_tokens" in self.model_fields_set else (None, self.max_tokens)

    @field_validator("best_of")
    @classmethod
    def _all_returned(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n"):
            raise ValueError("must be as n, since all texts that are written are returned")
        return value

    @field_validator("logprobs")
    @classmethod
    def _of_new_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("echo"):
            raise ValueError("with echo, they would be missing for the tokens of the prompt: ask for one of both")
        return value

    @property
    def _alternatives(self) -> int | None:
        return self.logprobs


class TextPart(_RequestFields):
    type: Literal["text"]
    text: str


class ChatMessage(_RequestFields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    name: str | None = None
    refusal: None = Field(None, description=_NEUTRAL)
    audio: None = Field(None, description=_NEUTRAL)
    function_call: None = Field(None, description=_NEUTRAL)
    tool_calls: Nothing = Field(None, description=_NEUTRAL)
    annotations: Nothing = Field(None, description=_NEUTRAL)

    @property
    def fields(self) -> dict[str, str]:
        """The message as a chat template reads it."""
        text = "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1024)
    max_tokens: Count | None = Field(None, ge=1, description="As max_completion_tokens.")
    max_completion_tokens: Count | None = Field(None, ge=1, description="The most tokens that are written.")
    logprobs: bool | None = Field(None, description=f"{_EXPERIMENTAL}whether log probabilities of the tokens come.")
    top_logprobs: Alternatives | None = Field(
        None, description=f"{_EXPERIMENTAL}also those of this number of most probable tokens."
    )
    tools: Nothing = Field(None, description=_NEUTRAL)
    tool_choice: Literal["none", None] = Field(None, description=_NEUTRAL)
    parallel_tool_calls: bool | None = Field(None, description="Ignored.")

    @property
    def _limits(self) -> tuple[int | None, int | None]:
        return self.max_completion_tokens or self.max_tokens, None

    @property
    def _alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("logprobs must be true, too")
        return value


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
    place = _place_in(body, wrong.place)
    if wrong.kind == "extra_forbidden":
        there_are = f"; there are: {', '.join(kind.model_fields)}" if wrong.place in body else ""
        return f"{place} is not served{there_are}"
    if wrong.kind == "missing":
        return f"{'.'.join(filter(None, (place, wrong.place.split('.')[-1])))} is missing"
    reason = "must be empty or left out: it is not served" if "at most 0 items" in wrong.reason else wrong.reason
    return f"{place} = {shown(wrong.value)}: {reason}"


def _place_in(body: Any, place: str) -> str:
    """The part of a place that the body has: pydantic also names the alternative that it tried.

    >>> _place_in({"messages": [{"content": 5}]}, "messages.0.content.str")
    'messages.0.content'
    """
    parts = []
    for part in [place] if place in body else place.split("."):
        if isinstance(body, list) and part.isdigit():
            body = body[int(part)]
        elif isinstance(body, Mapping) and part in body:
            body = body[part]
        else:
            continue
        parts.append(part)
    return ".".join(parts)
