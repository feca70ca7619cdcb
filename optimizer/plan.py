"""The planner's answer: which blocks run together, where, and at what batch size."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from profiles.errors import UserError, first_wrong, read_text

SCHEMA_VERSION = 1
Thresholds = tuple[tuple[int, float], ...]  # of some ramps, by the block they follow
STRICT = ConfigDict(extra="forbid")  # a misspelt field in a file is an error


@dataclass(frozen=True)
class Split:
    """Blocks `start .. stop - 1`, run as one, on `batch_size` inputs at a time.

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
        if self.batch_size < 1:
            raise ValueError(f"split {self.start}..{self.stop}: batch_size = {self.batch_size} must be at least 1")
        if list(self.ramps) != sorted({ramp for ramp in self.ramps if self.start <= ramp < self.stop}):
            raise ValueError(f"split {self.start}..{self.stop}: ramps {self.ramps} must ascend and lie inside it")

    @property
    def told(self) -> str:
        """Its blocks as people read them."""
        return blocks_told(self.start, self.stop - 1)


def blocks_told(first: int, last: int) -> str:
    """Blocks in a row, the last one included: the one form that commands, pictures and logs print.

    >>> blocks_told(0, 5), blocks_told(6, 6)
    ('0-5', '6')
    """
    return f"{first}-{last}" if last > first else str(first)


@dataclass(frozen=True)
class Placement:
    """`replicas` devices of one kind that run one split or, taking turns, several.

    In a `local` placement, what goes on from one of its splits straight to the next one stays on the replica that made
    it: no hand-over, and the batches of the deeper split form on every replica by itself.
    """

    kind: str
    replicas: int
    splits: tuple[Split, ...]
    local: bool = False

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"placement on {self.kind}: replicas = {self.replicas} must be at least 1")
        if not self.splits:
            raise ValueError(f"placement on {self.kind}: it needs at least one split")


@dataclass(frozen=True)
class DecodingTerms:
    """How each replica decodes, of a plan for a network that writes token by token.

    The batch sizes of its splits are sequences: as many as are resident for the first, and for a deep one as many as
    it waits for. `prompt_rows`: positions of prompts in one launch. `max_context`: tokens of a text, where memory holds
    fewer than the network reads. `ttft_s`, `tpot_s`: the time until the first token, and from one to the next, within
    which the promise holds; `tokens_per_s` are promised, of all these replicas.
    """

    exits: str
    prompt_rows: int
    kv_megabytes: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float = 0.0
    max_context: int | None = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class SimulatedTimes:
    """What the simulator shows of a plan at the rate that it promises.

    `in_time`: the share of all inputs, of which those that are refused have no latency.

    >>> print(SimulatedTimes(p50_s=0.2104, p99_s=0.481, in_time=0.991))
    p50 210 ms, p99 481 ms, 99.1 % in time
    """

    p50_s: float
    p99_s: float
    in_time: float

    __pydantic_config__ = STRICT

    def __str__(self) -> str:
        return f"p50 {1e3 * self.p50_s:.3g} ms, p99 {1e3 * self.p99_s:.3g} ms, {100 * self.in_time:.1f} % in time"


@dataclass(frozen=True)
class Promise:
    """What the planner said of its plan. `gap`: no plan is better by more than this share (0: none is better).

    `latency_s` is that of an input that stays to the last block while every launch is full; of a decoder it is the time
    until the first token. `played`: None where the plan was not played.
    """

    goodput_per_s: float
    latency_s: float
    cost_per_hour: float
    gap: float
    played: SimulatedTimes | None = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Plan:
    """Placements whose splits cover every block once.

    `length`: an input is so many tokens, and a launch of a batch has room for as many as the batch's inputs have, in
    texts of any length. None: whatever inputs, all alike.

    `thresholds` are those of the controller, at the ramps of all pipelines; at others the network's own hold.

    >>> plan = Plan((Placement("v100", 2, (Split(0, 6, 8, ramps=(5,)), Split(6, 12, 8))),))
    >>> plan.num_blocks, plan.ramps, [split.start for split in plan.splits]
    (12, (5,), [0, 6])
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    placements: tuple[Placement, ...]
    promise: Promise | None = None
    # Further pipelines, on devices of their own, each of which takes a share of the inputs; the promise is for all.
    beside: "tuple[Plan, ...]" = ()
    length: int | None = None
    thresholds: Thresholds = ()
    # The network that it was made for: its name, and a hash of its weights. "": not known. Two plans are the same
    # whatever they say of it.
    model: str = field(default="", compare=False)
    weights: str = field(default="", compare=False)
    # What its times are of: the backend and precision, and whether they are measured, published or estimated.
    backend: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)
    origin: str = field(default="", compare=False)
    slo_s: float | None = field(default=None, compare=False)  # that it was made for; None: for none
    decoding: DecodingTerms | None = None  # where the network writes token by token: an input is a text

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
        """In the order in which an input meets them."""
        everywhere = (split for placement in self.placements for split in placement.splits)
        return tuple(sorted(everywhere, key=lambda split: split.start))

    @property
    def ramps(self) -> tuple[int, ...]:
        """The active ramps of the whole network."""
        return tuple(ramp for split in self.splits for ramp in split.ramps)

    @property
    def num_blocks(self) -> int:
        return max((split.stop for split in self.splits), default=0)

    def placement_of(self, split: Split) -> Placement:
        return next(placement for placement in self.placements if split in placement.splits)

    def devices(self) -> dict[str, int]:
        """How many devices of each kind it holds, with the pipelines beside it."""
        placements = [placement for pipeline in self.pipelines for placement in pipeline.placements]
        kinds = sorted({placement.kind for placement in placements})
        return {kind: sum(p.replicas for p in placements if p.kind == kind) for kind in kinds}

    @property
    def pipelines(self) -> "tuple[Plan, ...]":
        """Every pipeline by itself."""
        return (replace(self, beside=()), *self.beside)

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """What is wrong with a text that is no plan is one line that names the place."""
        try:
            content: Mapping[str, Any] = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise UserError(f"this is no plan: {error}") from None
        if content.get("schema_version") != SCHEMA_VERSION:
            found = content.get("schema_version")
            raise UserError(f"this plan has schema_version {found!r}, this isobatch reads {SCHEMA_VERSION}: plan again")
        fields = {key: value for key, value in content.items() if key != "schema_version"}
        try:
            return TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            wrong = first_wrong(error)
            raise UserError(f"{wrong.place or 'plan'}: {wrong.reason}") from None


def read_plan(path: Path) -> Plan:
    text = read_text(path)
    try:
        return Plan.from_json(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
