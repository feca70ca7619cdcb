"""The shape of every response of the front, for the OpenAPI document.

Responses are not built from these classes, which would slow each of them down: tests validate every response instead.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from isobatch.deployments.front.answers import Step
from isobatch.deployments.front.messages import Usage
from isobatch.deployments.map_tasks import KEYPOINTS, PIXELS
from isobatch.deployments.named import CanaryTerms
from isobatch.deployments.tasks import CLASSIFICATION, LABELS, REGRESSION, SCORING, TOKENS
from isobatch.profiles.agreement import Agreement

# The version of `/stats`: it grows when a field changes its meaning or is removed, but not with new fields.
STATS_VERSION = 2


class Schema(BaseModel):
    """The base of all responses. Undeclared fields are errors."""

    model_config = ConfigDict(extra="forbid")


class ExitFacts(Schema):
    """Where an input left, and how long it took."""

    exit_block: int = Field(description="The block after which the input left, from 0.")
    queued_ms: float = Field(description="Time in queues.")
    computed_ms: float = Field(description="Time in launches, until the input left.")
    splits: list[Step] = Field(description="The same for each launch that the input took part in.")
    truncated: bool = Field(False, description="The text was longer than the network reads, so its end was cut off.")
    level: int | None = Field(None, description="The level of the cascade that answered, from 0.")


class LabelScore(Schema):
    """A label and its probability."""

    label: int = Field(description="The class, from 0.")
    name: str = Field(description="The name of that class in the checkpoint.")
    score: float = Field(description="The probability of that class, by the ramp or the head that answered.")


class ChosenLabel(LabelScore):
    """The chosen label, and further ones where they are listed."""

    scores: list[LabelScore] | None = Field(None, description="The most probable labels, the best first.")


class Output(ExitFacts, ChosenLabel):
    """One input's label, where it left, and how long it took."""


class LabelsOutput(ExitFacts):
    """One input's labels, where it left, and how long it took."""

    labels: list[LabelScore] = Field(description="Those with a probability above 0.5, the most probable first.")
    scores: list[LabelScore] | None = Field(None, description="The most probable labels, the best first.")


class Token(ChosenLabel):
    """A word of a text, and its label."""

    word: str
    start: int = Field(description="The position of the first character, from 0. A list of words is joined by blanks.")
    end: int = Field(description="The position behind the word's last character.")


class Entity(Schema):
    """Neighbouring words of one kind, as transformers' pipeline gives them (`aggregation_strategy="first"`)."""

    entity_group: str = Field(description="The label without B- and I-.")
    score: float = Field(description="The mean probability of the words' labels.")
    word: str
    start: int
    end: int


class WordsOutput(ExitFacts):
    """The labels of a text's words, where the text left, and how long it took."""

    tokens: list[Token] = Field(description="Every word, labelled by its first token.")
    entities: list[Entity] = Field(description="The words with a label other than O.")


class LabelShare(Schema):
    """A label that occurs in a map."""

    label: int = Field(description="The class, from 0.")
    name: str = Field(description="The name of that class in the checkpoint.")
    share: float = Field(description="The share of the map's pixels that have it.")


class MapOutput(ExitFacts):
    """The label of each pixel of a picture, where the picture left, and how long it took."""

    height: int = Field(description="Of the map.")
    width: int = Field(description="Of the map.")
    runs: list[tuple[int, int]] | None = Field(None, description="Label and number of pixels in a row, line by line.")
    png: str | None = Field(None, description="A PNG in base64, whose pixels are labels.")
    array: list[list[int]] | None = Field(None, description="The labels of each line.")
    labels: list[LabelShare] = Field(description="Those that occur, the most frequent first.")
    score: float = Field(description="The mean probability of the pixels' labels.")
    scores: list[LabelScore] | None = Field(None, description="The labels with the largest mean probability.")


class Point(LabelScore):
    """A point of a picture. Its label is its number, its score the largest number of its heat map."""

    x: float = Field(description="In pixels of the picture, from the left.")
    y: float = Field(description="In pixels of the picture, from the top.")
    cell: int = Field(description="The cell of the heat map with the largest number, line by line.")


class PointsOutput(ExitFacts):
    """The points of a picture, where the picture left, and how long it took."""

    points: list[Point] = Field(description="In the order of the network.")
    scores: list[LabelScore] | None = Field(None, description="The surest points, the best first.")


class PredictionsBase(Schema):
    model: str
    virtual: bool = Field(False, description="Nothing was computed: virtual devices only took the time of real ones.")


PREDICTIONS: Mapping[str, type[PredictionsBase]] = {
    task.name: create_model(
        name, __base__=PredictionsBase, outputs=(outputs, Field(description="In the order of the inputs."))
    )
    for task, name, outputs in (
        (CLASSIFICATION, "Predictions", list[Output]),
        (LABELS, "LabelPredictions", list[LabelsOutput]),
        (TOKENS, "WordPredictions", list[WordsOutput]),
        (PIXELS, "MapPredictions", list[MapOutput]),
        (KEYPOINTS, "PointPredictions", list[PointsOutput]),
        (SCORING, "Predictions", list[Output]),
        (REGRESSION, "Predictions", list[Output]),
    )
}


class ErrorBody(Schema):
    error: str = Field(description="One sentence that names the wrong value.")


class Alive(Schema):
    status: Literal["ok"]


class Ready(Schema):
    status: Literal["ready"]
    model: str


class SplitStats(Schema):
    """One split of the present plan. Launches are counted since the start, for all plans with the same first block."""

    blocks: tuple[int, int] = Field(description="The first block, and the one behind the last.")
    batch: int = Field(description="The number of inputs of a full launch.")
    room: int = Field(description="The size of a full launch: in tokens where the plan counts them, else in inputs.")
    ramps: list[int] = Field(description="The open ramps, by their blocks.")
    group: str
    replicas: int
    launches: int
    fill: float = Field(description="The mean share of a launch's room that was used.")
    waiting: int = Field(description="Inputs that wait for this split now.")


class ReplicaStats(Schema):
    """A replica that has computed in the last ten seconds."""

    replica: str
    kind: str = Field(description="The kind of its device; empty: everything runs in one process.")
    busy: float = Field(description="The share of these seconds in which it computed launches of any front.")


class AuditStats(Schema):
    ended: int
    disagreed: int
    agreement: Agreement | None = Field(description="Since the start, over answers that a ramp might have given.")
    lately: Agreement | None = Field(description="In the last ten minutes, or since thresholds changed.")
    promised: float | None = Field(description="The promised share of answers that are the full network's.")
    verdict: Literal["kept", "broken", "not watched"] | None = Field(
        description="Whether audits confirm the promise. It counts as broken for ten minutes after it broke."
    )


class LevelStats(Schema):
    """One level of a cascade."""

    blocks: tuple[int, int]
    answered: int
    share: float | None


class TokenStats(Schema):
    """The counts in tokens, where the plan counts them."""

    length: int = Field(description="The tokens of an input in the plan.")
    arrived: int
    per_input: float | None
    answered: int
    survival: list[float]


class CanaryStats(CanaryTerms):
    """The application that computes a share of requests too, and the requests that both have computed."""

    kept: float = Field(
        description="Requests, each by the share of its inputs that the canary answered in time with the same labels."
    )
    missed: float
    withdrawn_by: int = Field(description="Fronts that send it no requests any more, as it missed too many.")


class StatsBody(Schema):
    """The counts of all fronts together, since the start. `plan` and `splits` describe the present plan."""

    version: str = Field(description="Of isobatch.")
    schema_version: Literal[2]
    model: str
    plan: str | None = Field(description="The plan in words; null: everything runs in one process.")
    slo_ms: float = Field(description="The deadline of a request that sets none itself.")
    promise: str = Field(description="The most that early exits may lose, in words.")
    agreement: str = Field(description="How often answers are the full network's, recently and since the start.")
    requests: dict[Literal["answered", "refused", "failed", "abandoned"], int] = Field(
        description="Requests by outcome; refused includes malformed ones; abandoned: the client disconnected."
    )
    latency_ms: dict[Literal["p50", "p95", "p99"], float] = Field(
        description="Percentiles of the latest 2,000 answers of each front; empty before the first."
    )
    inside: int = Field(description="Admitted inputs that have no answer yet.")
    waiting: int = Field(description="Admitted inputs that are in no launch.")
    splits: list[SplitStats]
    exits: dict[str, int] = Field(description="The number of inputs by the block after which they left.")
    survival: list[float] = Field(description="The share of inputs that entered each block; empty at first.")
    observations: int = Field(description="How often a controller has read the counts; 0: there is none.")
    audits: AuditStats
    survivor_bytes: dict[Literal["by_value", "held"], int] = Field(
        description="Bytes of hidden states that came back to the front, or stayed on their replica."
    )
    replicas: list[ReplicaStats]
    fronts: list[Usage]
    levels: list[LevelStats] | None = Field(None, description="The levels of a cascade.")
    canary: CanaryStats | None = None
    tokens: TokenStats | None = Field(None, description="The counts in tokens, where the plan counts them.")
