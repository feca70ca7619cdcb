"""The planner's answer: which blocks run together, on which devices, and at what batch size."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError

from isobatch.profiles.devices import MOST_DEVICES
from isobatch.profiles.errors import UserError, check_numbers, first_wrong, json_in, read_text
from isobatch.profiles.latency import MOST_BATCH

SCHEMA_VERSION = 1
Thresholds = tuple[tuple[int, float], ...]  # pairs of a block and the threshold of the ramp after it
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)  # a misspelt field in a file is an error
# Strict, to refuse true and false here: `check_numbers` does not find the field by its name in older files.
Number = Annotated[float, Field(strict=True)]


@dataclass(frozen=True)
class Split:
    """Blocks `start .. stop - 1`, which run as one on batches of `batch_size` inputs.

    `ramps` are the active ramps, by the block they follow. The one after `stop - 1` lets inputs leave before the next
    split; the others let the batch shrink on its way through this one.
    """

    start: int
    stop: int
    batch_size: int
    ramps: tuple[int, ...] = ()

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"split {self.start}..{self.stop}: it must start at 0 or later and stop after its start")
        if not 1 <= self.batch_size <= MOST_BATCH:
            split = f"split {self.start}..{self.stop}"
            raise ValueError(f"{split}: batch_size = {self.batch_size} must be from 1 to {MOST_BATCH}")
        if list(self.ramps) != sorted({ramp for ramp in self.ramps if self.start <= ramp < self.stop}):
            raise ValueError(f"split {self.start}..{self.stop}: ramps {self.ramps} must ascend and lie inside it")

    @property
    def blocks_text(self) -> str:
        """The blocks as people read them."""
        return blocks_text(self.start, self.stop - 1)


def blocks_text(first: int, last: int) -> str:
    """A range of blocks, the last one included, in the form that commands, pictures and logs print.

    >>> blocks_text(0, 5), blocks_text(6, 6)
    ('0-5', '6')
    """
    return f"{first}-{last}" if last > first else str(first)


def rate(per_s: float) -> str:
    """
    >>> rate(30938.4), rate(0.0312)
    ('30,938/s', '0.0312/s')
    """
    return f"{per_s:,.0f}/s" if per_s >= 100 else f"{per_s:.3g}/s"


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.0116), milliseconds(1.5)
    ('11.6 ms', '1,500 ms')
    """
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True)
class Placement:
    """`replicas` devices of one kind that run one split or, taking turns, several.

    In a `local` placement, inputs that continue from one split to the next stay on their replica: they are not handed
    over, and every replica forms the batches of the deeper split by itself.
    """

    kind: str
    replicas: int
    splits: tuple[Split, ...]
    local: bool = False

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_DEVICES:
            raise ValueError(f"placement on {self.kind}: replicas = {self.replicas} must be from 1 to {MOST_DEVICES}")
        if not self.splits:
            raise ValueError(f"placement on {self.kind}: it needs at least one split")


@dataclass(frozen=True)
class DecodingTerms:
    """How each replica decodes, in a plan for a decoder.

    The batch sizes of its splits count sequences: the residents for the first split, and for a deep one the sequences
    that a launch waits for. `prompt_rows`: prompt positions in one launch. `max_context`: the most tokens of a text, if
    memory holds fewer than the network reads. The promise is about texts with at most `ttft_s` until the first token
    and `tpot_s` from one token to the next; `tokens_per_s` are promised of all these replicas together. `threads`:
    those of each replica on a CPU.
    """

    exits: str
    prompt_rows: int
    kv_megabytes: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float = 0.0
    max_context: int | None = None
    threads: int = 1

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.tokens_per_s < 0 or self.threads < 1:
            raise ValueError(
                f"tokens_per_s = {self.tokens_per_s:g}, threads = {self.threads}: must be at least 0, and at least 1"
            )


@dataclass(frozen=True)
class SimulatedTimes:
    """Simulated times of a plan at the rate that it promises.

    `in_time`: the share of all inputs. Refused inputs count in it, but have no latency.

    >>> print(SimulatedTimes(p50_s=0.2104, p99_s=1.481, in_time=0.991))
    p50 210 ms, p99 1,481 ms, 99.1 % in time
    """

    p50_s: Number
    p99_s: Number
    in_time: Number

    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        times = f"p50 {milliseconds(self.p50_s)}, p99 {milliseconds(self.p99_s)}"
        return f"{times}, {100 * self.in_time:.1f} % in time"


@dataclass(frozen=True)
class Promise:
    """What the planner promises of a plan. `gap`: no plan is better by more than this share (0: none is better).

    `latency_s` is that of an input that stays to the last block while every launch is full; of texts, it is the
    time until the first token. `simulated`: None where the plan was not simulated; older files call it `played`.
    """

    goodput_per_s: float
    latency_s: float
    cost_per_hour: float
    gap: float
    simulated: Annotated[SimulatedTimes | None, Field(validation_alias=AliasChoices("simulated", "played"))] = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Plan:
    """Placements whose splits cover every block once.

    `length`: an input is a text of this mean number of tokens, and a launch has room for the tokens of a full batch,
    in texts of any length. None: all inputs have the same size.

    `thresholds` are those of the controller for the ramps of all pipelines; other ramps use the network's own.

    >>> plan = Plan((Placement("v100", 2, (Split(0, 6, 8, ramps=(5,)), Split(6, 12, 8))),))
    >>> plan.num_blocks, plan.ramps, [split.start for split in plan.splits]
    (12, (5,), [0, 6])
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    placements: tuple[Placement, ...]
    promise: Promise | None = None
    # Further pipelines on devices of their own, each of which takes a share of the inputs. The promise is for all.
    beside: "tuple[Plan, ...]" = ()
    length: int | None = None
    thresholds: Thresholds = ()
    # The network of the plan: its name, and a hash of its weights; "": not known. The fields from here on, but for
    # `decoding`, do not count when two plans are compared.
    model: str = field(default="", compare=False)
    weights: str = field(default="", compare=False)
    # The times of the plan: their backend and precision, and whether they are measured, published or estimated.
    backend: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)
    origin: str = field(default="", compare=False)
    slo_s: float | None = field(default=None, compare=False)  # the SLO of the plan; None: it has none
    decoding: DecodingTerms | None = None  # for a decoder

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        edges = [0, *(edge for split in self.splits for edge in (split.start, split.stop))]
        for stop, start in list(pairwise(edges))[::2]:
            if stop != start:
                raise ValueError(f"the splits must cover every block once, but {start} follows {stop}")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length = {self.length} must be at least 1 token")
        if any(each.num_blocks != self.num_blocks or each.beside for each in self.beside):
            raise ValueError(f"every pipeline beside must cover {self.num_blocks} blocks, and have none beside itself")

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits in the order in which inputs pass them."""
        everywhere = (split for placement in self.placements for split in placement.splits)
        return tuple(sorted(everywhere, key=lambda split: split.start))

    @property
    def ramps(self) -> tuple[int, ...]:
        """The active ramps of the whole network."""
        return tuple(ramp for split in self.splits for ramp in split.ramps)

    @property
    def num_blocks(self) -> int:
        return max((split.stop for split in self.splits), default=0)

    @property
    def shape(self) -> tuple[tuple[str, tuple[Split, ...], bool], ...]:
        """The common shape of pipelines that differ only in replicas."""
        return tuple((each.kind, each.splits, each.local) for each in self.placements)

    def placement_of(self, split: Split) -> Placement:
        return next(placement for placement in self.placements if split in placement.splits)

    def devices(self) -> dict[str, int]:
        """The number of devices of each kind, for this pipeline and those beside it."""
        kinds = sorted({placement.kind for placement in self.all_placements})
        return {kind: sum(p.replicas for p in self.all_placements if p.kind == kind) for kind in kinds}

    @property
    def pipelines(self) -> "tuple[Plan, ...]":
        """Every pipeline as a plan of its own."""
        return (replace(self, beside=()), *self.beside)

    @property
    def all_placements(self) -> list[Placement]:
        """The placements of this pipeline and of those beside it, in order."""
        return [placement for pipeline in (self, *self.beside) for placement in pipeline.placements]

    def with_each(self, change: Callable[["Plan"], "Plan"]) -> "Plan":
        """The plan in which every pipeline is changed in this way."""
        first, *others = map(change, self.pipelines)
        return replace(first, beside=tuple(others))

    @property
    def writes_texts(self) -> bool:
        return self.decoding is not None

    @property
    def unpromised(self) -> "Plan":
        """The plan without its promise and its thresholds: two plans that serve alike are then equal."""
        terms = self.decoding and replace(self.decoding, tokens_per_s=0.0)
        return replace(self, promise=None, thresholds=(), decoding=terms)

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan. Raise UserError with one line that names the wrong place."""
        content: Mapping[str, Any] = json_in(text, "this plan")
        if not isinstance(content, dict):
            raise UserError(f"this plan must be a JSON object, got {type(content).__name__}")
        if "placements" not in content:
            raise UserError("this is not a plan: 'isobatch plan' writes one")
        version = content.get("schema_version")
        if version is True or version != SCHEMA_VERSION:
            version = f"schema_version {version!r}, this isobatch reads {SCHEMA_VERSION}"
            raise UserError(f"this plan has {version}: plan again")
        fields = {key: value for key, value in content.items() if key != "schema_version"}
        try:
            plan = TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            wrong = first_wrong(error)
            raise UserError(f"{wrong.place or 'plan'}: {wrong.reason}") from None
        check_numbers(fields, plan, "this plan")
        return plan


def read_plan(path: Path) -> Plan:
    text = read_text(path)
    try:
        return Plan.from_json(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def opened(plan: Plan) -> list[int]:
    """The ramps that at least one of the pipelines opens."""
    return sorted({ramp for pipeline in plan.pipelines for ramp in pipeline.ramps})
