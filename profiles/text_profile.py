"""The profile of a decoder: the times of its launches, and the workload of its clients."""

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import ClassVar

from isobatch.profiles.errors import UserError
from isobatch.profiles.files import SCHEMA_VERSION, as_profile, differ, fields_in, write_whole

KIND = "decoder"  # names the kind of profile in its file, as in exits.json
LEAST_OBSERVED = 20  # texts: a plan from observations needs at least this number
STRICT = {"extra": "forbid", "allow_inf_nan": False}  # a misspelt field in a file is an error


@dataclass(frozen=True)
class LaunchSize:
    """The size of a launch by its parts. Its time is the sum of all parts times their prices (`DecodingTable`).

    Attention reads sequences of similar length side by side, as a *band*, padded to the longest of them.
    """

    launches: float = 0.0
    pieces: float = 0.0  # sequences
    blocks: float = 0.0  # blocks that it runs
    bands: float = 0.0  # bands in each of these blocks
    rows: float = 0.0  # positions that run through each of these blocks
    read: float = 0.0  # positions whose KV is read in each of these blocks
    seen: float = 0.0  # pairs of a row and a position that it attends to, in each of these blocks
    heads: float = 0.0  # 1 if the head runs
    asked: float = 0.0  # rows that the head reads
    sources: float = 0.0  # groups of texts that an encoder reads side by side
    source_rows: float = 0.0  # positions of these groups
    source_seen: float = 0.0  # pairs of positions that attend to each other in these groups
    projections: float = 0.0  # blocks in which some rows only leave their KV
    projected: float = 0.0  # these rows, in each of these blocks


PARTS = tuple(field.name for field in fields(LaunchSize))
# Where a device reads memory while it computes, only the longer one of these two sums counts.
MEMORY = ("blocks", "read", "heads", "sources")
ARITHMETIC = ("rows", "seen", "asked", "source_rows", "source_seen", "projected")
PROJECT = "project"  # the way of exits that projects KV for the blocks that a token skips


@dataclass(frozen=True)
class DecodingTable:
    """How long launches take on one kind of device: the seconds of each part of a launch.

    `overlaps`: reading and computing overlap, as on a GPU by its datasheet; otherwise all parts add up. `error`: the
    median relative error on launches that were held out, and `bias` the relative error of their sum; None: the table is
    estimated, not measured. `residents`: the most sequences of a timed launch, and so of a plan; None: nothing was
    timed. `projects`: there is a price for projecting KV.
    """

    kind: str
    price_s: LaunchSize
    source: str
    kv_bytes: int  # keys and values of one position in one block
    weights_bytes: int
    dtype: str = "float32"
    overlaps: bool = False
    error: float | None = None
    bias: float = 0.0
    residents: int | None = None
    projects: bool = False
    threads: int = 1  # of the processors, where these compute
    front_s: float = 0.0  # of the front's processor, for a token that it passes on; 0: not timed

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        prices = [getattr(self.price_s, name) for name in PARTS]
        if not all(0 <= price < inf for price in prices):
            raise ValueError(f"{self.kind}: prices must be finite, 0 or more")
        if not any(prices):
            raise ValueError(f"{self.kind}: some part of a launch must take time")
        for name in ("kv_bytes", "weights_bytes", "residents", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{self.kind}: {name} = {getattr(self, name)} must be above 0")
        if not 0 <= self.front_s < inf:
            raise ValueError(f"{self.kind}: front_s = {self.front_s} must be finite, 0 or more")

    @property
    def estimated(self) -> bool:
        return self.error is None

    def seconds(self, size: LaunchSize) -> float:
        """
        >>> table = DecodingTable("cpu", LaunchSize(launches=1e-3, rows=1e-4), "made up", 64, 10)
        >>> round(table.seconds(LaunchSize(launches=1, rows=20)), 6)
        0.003
        """
        costs: dict[str, float] = {name: getattr(self.price_s, name) * getattr(size, name) for name in PARTS}
        if not self.overlaps:
            return sum(costs.values())
        memory_s, arithmetic_s = (sum(costs[name] for name in names) for names in (MEMORY, ARITHMETIC))
        return sum(costs.values()) - min(memory_s, arithmetic_s)


@dataclass(frozen=True)
class DecodingWorkload:
    """The texts of clients, and how early their tokens are known.

    `survival`: for each block that a ramp may follow, the share of tokens that continue after it; `projected`: the same
    where KV is projected. `prompts` and `outputs` are the numbers of tokens of sampled texts.
    """

    survival: tuple[tuple[int, float], ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    agreement: float = 1.0  # the share of tokens that leave early and equal the full network's
    projected: tuple[tuple[int, float], ...] = ()

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.outputs):
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.outputs)} outputs: each text has one of both")
        if min(*self.prompts, *self.outputs) < 1:
            raise ValueError("a prompt and an output have 1 token at least")
        shares = self.agreement, *dict(self.survival).values(), *dict(self.projected).values()
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError("survival, projected and agreement are shares: from 0 to 1")

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(self.prompts) / len(self.prompts)

    @property
    def output(self) -> float:
        return sum(self.outputs) / len(self.outputs)

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.prompts), max(self.outputs)

    def after(self, block: int) -> float:
        """The share of tokens that continue after a block; all of them where no ramp is possible."""
        return dict(self.survival).get(block, 1.0)


@dataclass(frozen=True)
class DecoderProfile:
    """The profile of one decoder: a table for each kind of device, and its workload."""

    model: str
    num_blocks: int
    reads: int  # the most tokens of a text that the network reads
    tables: tuple[DecodingTable, ...]
    workload: DecodingWorkload
    has_encoder: bool = False  # an encoder reads the prompt
    notes: tuple[str, ...] = ()
    weights: str = ""  # a hash of the network's weights; "": not known

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for name in ("num_blocks", "reads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if not self.tables:
            raise ValueError("a profile needs at least one table")
        ramps = (*self.workload.survival, *self.workload.projected)
        if wrong := [block for block, _ in ramps if not 0 <= block < self.num_blocks - 1]:
            raise ValueError(f"no ramp can stand after block {wrong[0]} of {self.num_blocks} blocks")

    def length(self, prompt: int, output: int) -> int:
        """The tokens of a text that must fit into the context: an encoder reads the prompt apart from the answer."""
        return max(prompt, output + 1) if self.has_encoder else prompt + output

    @cached_property
    def readable(self) -> DecodingWorkload:
        """The workload without texts that exceed the network's context, as these are refused; all, if all exceed it."""
        texts = zip(self.workload.prompts, self.workload.outputs, strict=True)
        if not (read := [each for each in texts if self.length(*each) <= self.reads]):
            return self.workload
        prompts, outputs = zip(*read, strict=True)
        return replace(self.workload, prompts=prompts, outputs=outputs)

    def table(self, kind: str) -> DecodingTable:
        table = next((table for table in self.tables if table.kind == kind), None)
        if table is None:
            kinds = ", ".join(table.kind for table in self.tables)
            raise UserError(
                f"{self.model}: there are no times of it on {kind}, only on {kinds}: add some with isobatch profile"
            )
        return table

    def for_exits(self, exits: str) -> "DecoderProfile":
        """The profile for this way of exits: where KV is projected, other shares continue, at ramps where it was tried.

        Raise UserError where these shares are not known at all.
        """
        if exits != PROJECT:
            return self
        if not self.workload.projected:
            raise UserError(
                "exits = 'project': the share of tokens that continue is not known: run isobatch prepare, then profile"
            )
        return replace(self, workload=replace(self.workload, survival=self.workload.projected))

    def check_same(self, model: str, num_blocks: int, weights: str) -> None:
        is_same = weights and self.weights == weights  # also by another name, as a directory may have moved
        if not is_same and (self.model, self.num_blocks) != (model, num_blocks):
            raise UserError(f"cannot add a profile of {model} to one of {self.model}: write it to another file")
        if differ(self.weights, weights):
            raise UserError(f"cannot add to the profile of another {self.model}: write it to another file")

    def joined_by(self, other: "DecoderProfile") -> "DecoderProfile":
        """Both as one: a later table replaces that of the same kind, but an estimate never replaces a measurement."""
        self.check_same(other.model, other.num_blocks, other.weights)
        tables = {table.kind: table for table in self.tables}
        for table in other.tables:
            known = tables.get(table.kind)
            if known is None or known.estimated or not table.estimated:
                tables[table.kind] = table
        return replace(other, tables=tuple(tables.values()))


def save_text_profile(profile: DecoderProfile, path: Path) -> None:
    content = {"schema_version": SCHEMA_VERSION, "profile_of": KIND, **asdict(profile)}
    write_whole(path, json.dumps(content, indent=2))


def load_text_profile(path: Path) -> DecoderProfile:
    """Read a profile. Raise UserError with one line that names the wrong place."""
    fields = fields_in(path)
    if fields.pop("profile_of", None) != KIND:
        raise UserError(
            f"{path} is not a profile of a decoder that this isobatch reads: measure with 'isobatch profile'"
        )
    return as_profile(DecoderProfile, fields, path)
