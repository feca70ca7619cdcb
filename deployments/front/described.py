"""What OpenAPI says of the front: the shape of every answer, and which statuses a path may have.

Answers are not made from these classes, which would cost each of them time: tests hold every answer against them.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from deployments.front.answers import Step
from deployments.front.cors import AllowedPages
from deployments.front.headers import DEADLINE_HEADER, LONGEST_MS
from deployments.front.messages import Usage
from deployments.tasks import CLASSIFICATION, TOKENS
from profiles.agreement import Agreement

STATS_VERSION = 1  # of what `/stats` says: it grows when a field changes its meaning or goes; new fields leave it
PROBLEMS = {
    400: "The body is not what was asked for.",
    401: "A key is asked for, and was not shown.",
    403: "A web page of another server asked for this.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large, as it comes or decompressed.",
    415: "The body is compressed in a way that is not known.",
    422: "The inputs do not fit the network.",
    500: "The network, or this server, failed.",
    503: "The deadline cannot be met with what is waiting, a part of the network has no replica, or the server stops; "
    "try again later.",
    504: "The deadline passed before the answer was known.",
}
READING = (400, 401, 403, 408, 413, 415, 422, 500, 503, 504)  # what may become of a request with inputs
_AN_INPUT = (
    "One input (a text, or an image as nested lists), or a list. "
    "Where words are answered, a text may be given as a list of its words."
)
_LONGEST_EXAMPLE = 2000  # characters
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until it may go better.", "schema": {"type": "integer"}}}


class Described(BaseModel):
    """Nothing is told that is not described."""

    model_config = ConfigDict(extra="forbid")


class OnTheWay(Described):
    """What happened to an input on the way."""

    exit_block: int = Field(description="The block after which the input left, from 0.")
    queued_ms: float = Field(description="Time spent waiting for batches to form.")
    computed_ms: float = Field(description="Time in launches, until it left.")
    splits: list[Step] = Field(description="The same for each launch it took part in.")
    truncated: bool = Field(False, description="The text is longer than the network reads: its end was cut off.")
    level: int | None = Field(None, description="Of a cascade: the level that answered, from 0.")
    degraded: bool = Field(False, description="There was no time for the next level, which would have answered.")


class Output(OnTheWay):
    """One input's label, and what happened to it on the way."""

    label: int = Field(description="The class that was chosen, from 0.")
    name: str = Field(description="What the checkpoint calls that class.")
    score: float = Field(description="Its probability.")


class Token(Described):
    """A word of a text, and its label."""

    label: int = Field(description="The class that was chosen, from 0.")
    name: str = Field(description="What the checkpoint calls that class.")
    score: float = Field(description="Its probability.")
    word: str
    start: int = Field(description="Its first character in the text, from 0. A list of words is joined by blanks.")
    end: int = Field(description="Behind its last character.")


class Entity(Described):
    """Neighbouring words of one kind, as transformers' pipeline gives them (`aggregation_strategy="first"`)."""

    entity_group: str = Field(description="The kind, without B- and I-.")
    score: float = Field(description="The mean probability of its words' labels.")
    word: str
    start: int
    end: int


class WordsOutput(OnTheWay):
    """The labels of a text's words, and what happened to it on the way."""

    tokens: list[Token] = Field(description="Every word, by the first of its tokens.")
    entities: list[Entity] = Field(description="Those that are something other than O.")


class PredictionsBase(Described):
    model: str
    virtual: bool = Field(False, description="Nothing was computed: devices only took the time that they would.")


class Predictions(PredictionsBase):
    outputs: list[Output] = Field(description="In the order of the inputs.")


class WordPredictions(PredictionsBase):
    outputs: list[WordsOutput] = Field(description="In the order of the inputs.")


PREDICTIONS: Mapping[str, type[PredictionsBase]] = {CLASSIFICATION.name: Predictions, TOKENS.name: WordPredictions}


class ErrorBody(Described):
    error: str = Field(description="One sentence that names the value.")


class Alive(Described):
    status: Literal["ok"]


class Ready(Described):
    status: Literal["ready"]
    model: str


class RequestOutcomes(Described):
    """Requests by what became of them."""

    answered: int
    refused: int
    failed: int
    abandoned: int = Field(description="The client went away.")


class SplitStats(Described):
    """One split of the plan that runs now; launches are counted since the start, of all plans that began there."""

    blocks: tuple[int, int] = Field(description="The first, and the one behind the last.")
    batch: int = Field(description="Inputs of a full launch.")
    room: int = Field(description="What a full launch weighs: tokens where the plan counts them, else inputs.")
    ramps: list[int] = Field(description="The open ones, by their blocks.")
    group: str
    replicas: int
    launches: int
    fill: float = Field(description="How full launches were, of 1.")
    waiting: int = Field(description="Inputs that wait before it now.")


class AuditStats(Described):
    ended: int
    disagreed: int
    agreement: Agreement | None
    promised: float | None = Field(description="The share of answers that should be the full network's.")
    verdict: Literal["kept", "broken", "not watched"] | None = Field(description="What audits tell of that.")


class LevelStats(Described):
    """One level of a cascade."""

    blocks: tuple[int, int]
    answered: int
    degraded: int = Field(description="Answered here as there was no time for the next level.")
    share: float | None


class TokenStats(Described):
    """The same in tokens, where the plan counts them."""

    length: int = Field(description="Of the inputs that the plan is made of.")
    arrived: int
    per_input: float | None
    answered: int
    survival: list[float]


class StatsBody(Described):
    """The counts of all fronts together, since the start. `plan` and `splits` are of now."""

    schema_version: Literal[1]
    model: str
    plan: str | None = Field(description="In words; none: all runs in one process.")
    slo_ms: float = Field(description="An answer's deadline, unless its request says otherwise.")
    promise: str = Field(description="What exits lose at most, in words.")
    agreement: str = Field(description="How often answers are the full network's, in words.")
    requests: RequestOutcomes
    latency_ms: dict[Literal["p50", "p95", "p99"], float] = Field(
        description="Of the latest 2,000 answers of each front; empty before the first."
    )
    inside: int = Field(description="Inputs that were admitted and have no answer yet.")
    waiting: int = Field(description="Those of them that are in no launch.")
    splits: list[SplitStats]
    exits: dict[str, int] = Field(description="Inputs by the block after which they left.")
    survival: list[float] = Field(description="The share of inputs that entered each block; empty before the first.")
    observations: int = Field(description="Times that a controller has asked; 0: none steers this application.")
    audits: AuditStats
    survivor_bytes: dict[Literal["by_value", "held"], int] = Field(
        description="Hidden states that came back to the front, or were held where they were."
    )
    fronts: list[Usage]
    levels: list[LevelStats] | None = Field(None, description="Of a cascade.")
    tokens: TokenStats | None = Field(None, description="Where the plan counts tokens.")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses, as FastAPI takes them; each with one sentence in JSON."""
    told: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        told[status] = {"model": ErrorBody, "description": PROBLEMS[status]}
        if status == 503:
            told[status]["headers"] = _RETRY_AFTER
    return told


def told(model: type[BaseModel], *statuses: int) -> dict[str, Any]:
    """What a route's decorator is given: this answer, or one of these problems."""
    return {"response_model": None, "responses": {200: {"model": model, "description": "OK"}, **problems(*statuses)}}


def in_json(body: Any) -> Response:
    """What is asked every second, as bytes at once: FastAPI would first copy it, value by value.

    >>> in_json({"exits": {0: 3}, "p99": float("nan")}).body
    b'{"exits":{"0":3},"p99":null}'
    """
    return Response(msgspec.json.encode(body, enc_hook=float), media_type="application/json")  # float: numpy's


def examples(**by_name: Any) -> dict[str, Any]:
    """Bodies of requests that this server answers, by a name for people."""
    return {name.replace("_", " "): {"value": body} for name, body in by_name.items()}


def schema_of(part: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema with each `$ref` replaced by what it names, since OpenAPI looks for these elsewhere."""
    schema = part.model_json_schema()
    aside = schema.pop("$defs", {})

    def whole(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return whole(aside[node["$ref"].rpartition("/")[2]])
            return {name: whole(value) for name, value in node.items()}
        return [whole(each) for each in node] if isinstance(node, list) else node

    found: dict[str, Any] = whole(schema)
    return found


def fits(example: Any | None) -> bool:
    """Whether an example is one for people: a photograph is not."""
    return example is not None and len(str(example)) <= _LONGEST_EXAMPLE


def predict_body(example: Any | None) -> dict[str, Any]:
    """What POST /predict takes; `example`: an input of the network that is served, if one is known."""
    schema = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {"inputs": {"description": _AN_INPUT}},
    }
    content: dict[str, Any] = {"schema": schema}
    if fits(example):
        content["examples"] = examples(one_input={"inputs": example}, several={"inputs": [example, example]})
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


WITH_INPUTS: dict[str, Any] = {
    "parameters": [
        {
            "name": "-".join(part.capitalize() for part in DEADLINE_HEADER.split("-")),
            "in": "header",
            "required": False,
            "description": "Milliseconds until the answer is of no use to the client; without: as the server has it.",
            "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_MS},
            "example": 60_000,
        },
        {
            "name": "X-Full",
            "in": "header",
            "required": False,
            "description": "1: no input may leave at a ramp.",
            "schema": {"type": "string", "enum": ["0", "1"]},
            "example": "1",
        },
    ]
}


class DescribedApi(FastAPI):
    """FastAPI without pages that load scripts from elsewhere, and without statuses that it only believes in."""

    key: bytes | None = None
    pages: tuple[str, ...] = ()  # of other servers, that may ask
    _entrance: AllowedPages | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(docs_url=None, redoc_url=None, **options)

    def allow(self, pages: tuple[str, ...]) -> None:
        self.pages, self._entrance = pages, AllowedPages(self._inside, pages) if pages else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entrance or self._inside)(scope, receive, send)

    async def _inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = _mended(super().openapi(), asks_key=bool(self.key))
        return self.openapi_schema


def _mended(document: dict[str, Any], asks_key: bool) -> dict[str, Any]:
    """Without the 422 that FastAPI adds wherever a path has parameters, and with the key, where one is asked for."""
    for operation in (each for path in document["paths"].values() for each in path.values()):
        schema = operation["responses"].get("422", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("$ref", "").endswith("HTTPValidationError"):
            del operation["responses"]["422"]
    parts = document.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        parts.get("schemas", {}).pop(unused, None)
    if asks_key:
        parts["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document
