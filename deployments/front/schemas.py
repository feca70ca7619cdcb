"""The shape of every answer of the front, as OpenAPI tells it.

Answers are not made from these classes, which would cost each of them time: tests hold every answer against them.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.front.answers import Step
from deployments.front.messages import Usage
from deployments.tasks import CLASSIFICATION, TOKENS
from profiles.agreement import Agreement

STATS_VERSION = 1  # of what `/stats` says: it grows when a field changes its meaning or goes; new fields leave it


class Schema(BaseModel):
    """Every field of an answer is declared here: an undeclared one is refused."""

    model_config = ConfigDict(extra="forbid")


class OnTheWay(Schema):
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


class Token(Schema):
    """A word of a text, and its label."""

    label: int = Field(description="The class that was chosen, from 0.")
    name: str = Field(description="What the checkpoint calls that class.")
    score: float = Field(description="Its probability.")
    word: str
    start: int = Field(description="Its first character in the text, from 0. A list of words is joined by blanks.")
    end: int = Field(description="Behind its last character.")


class Entity(Schema):
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


class PredictionsBase(Schema):
    model: str
    virtual: bool = Field(False, description="Nothing was computed: devices only took the time that they would.")


class Predictions(PredictionsBase):
    outputs: list[Output] = Field(description="In the order of the inputs.")


class WordPredictions(PredictionsBase):
    outputs: list[WordsOutput] = Field(description="In the order of the inputs.")


PREDICTIONS: Mapping[str, type[PredictionsBase]] = {CLASSIFICATION.name: Predictions, TOKENS.name: WordPredictions}


class ErrorBody(Schema):
    error: str = Field(description="One sentence that names the value.")


class Alive(Schema):
    status: Literal["ok"]


class Ready(Schema):
    status: Literal["ready"]
    model: str


class RequestOutcomes(Schema):
    """Requests by what became of them."""

    answered: int
    refused: int
    failed: int
    abandoned: int = Field(description="The client went away.")


class SplitStats(Schema):
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


class ReplicaStats(Schema):
    """A replica that has computed in the last ten seconds."""

    replica: str
    kind: str = Field(description="Of its device; empty: all runs in one process.")
    busy: float = Field(description="The share of these seconds in which it computed launches, of all fronts.")


class AuditStats(Schema):
    ended: int
    disagreed: int
    agreement: Agreement | None = Field(description="Since the start, of answers that a ramp might have given.")
    lately: Agreement | None = Field(description="Of the last ten minutes, since thresholds changed.")
    promised: float | None = Field(description="The share of answers that should be the full network's.")
    verdict: Literal["kept", "broken", "not watched"] | None = Field(
        description="What audits tell of that now. A promise that broke counts as broken for ten minutes."
    )


class LevelStats(Schema):
    """One level of a cascade."""

    blocks: tuple[int, int]
    answered: int
    degraded: int = Field(description="Answered here as there was no time for the next level.")
    share: float | None


class TokenStats(Schema):
    """The same in tokens, where the plan counts them."""

    length: int = Field(description="Of the inputs that the plan is made of.")
    arrived: int
    per_input: float | None
    answered: int
    survival: list[float]


class StatsBody(Schema):
    """The counts of all fronts together, since the start. `plan` and `splits` are of now."""

    schema_version: Literal[1]
    model: str
    plan: str | None = Field(description="In words; none: all runs in one process.")
    slo_ms: float = Field(description="An answer's deadline, unless its request says otherwise.")
    promise: str = Field(description="What exits lose at most, in words.")
    agreement: str = Field(description="How often answers are the full network's, lately and since the start.")
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
    replicas: list[ReplicaStats]
    fronts: list[Usage]
    levels: list[LevelStats] | None = Field(None, description="Of a cascade.")
    tokens: TokenStats | None = Field(None, description="Where the plan counts tokens.")
