"""Profiles on disk: one JSON file per network that a person can read, edit and compare."""

import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter, ValidationError

from isobatch.profiles.devices import Link, whole_kind
from isobatch.profiles.errors import UserError, check_numbers, first_wrong, naming_target, read_json
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.lengths import Lengths, at_length

SCHEMA_VERSION = 1
AnyProfile = TypeVar("AnyProfile")


@dataclass(frozen=True)
class Profile:
    """Everything known about one network: a table per kind of device and length, and its exits.

    Where the `lengths` of its texts are known, plans count tokens: an input is a text of their mean length, and
    `token_exits` are the exits weighted by the tokens of each text.
    """

    model: str
    tables: tuple[LatencyTable, ...]
    exits: ExitProfile | None = None
    # Remarks of the measurement on its own quality. Each starts with its subject and a colon.
    notes: tuple[str, ...] = ()
    weights: str = ""  # a hash of the network's weights; "": not known
    lengths: Lengths | None = None
    token_exits: ExitProfile | None = None
    # Of a cascade: the blocks at which its second and later levels begin. Every plan is cut there.
    edges: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()  # the measured costs of moving survivors
    ramps: str = ""  # a hash of the ramps, and of their rules, with which the exits were counted; "": not known

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a misspelt field in a file is an error

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("a profile needs at least one table")
        counts = {f"{table.kind} ({table.source})": table.num_blocks for table in self.tables}
        if self.exits:
            counts["exits"] = self.exits.num_blocks
        if self.token_exits:
            counts["token_exits"] = self.token_exits.num_blocks
        if len(set(counts.values())) > 1:
            raise ValueError(f"all parts must have the same number of blocks, got {counts}")
        if list(self.edges) != sorted({edge for edge in self.edges if 0 < edge < self.num_blocks}):
            raise ValueError(f"edges = {self.edges} must ascend and lie inside the network")

    @property
    def num_blocks(self) -> int:
        return self.tables[0].num_blocks

    @property
    def length(self) -> int | None:
        """The tokens of an input, where plans count tokens; None: inputs have one size."""
        return self.lengths.mean if self.lengths else None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(table.kind for table in self.tables))

    def joined_by(self, other: "Profile") -> "Profile":
        """Both as one. A later table replaces that of the same kind and length, but no measurement by a derived table.

        There may be derived tables for several backends and precisions. A later note replaces the earlier one on the
        same subject, and a later link that between the same kinds. The cost of sharing a device was measured with its
        table, and is dropped with it. Exits that were counted with other ramps are dropped.
        """
        self.check_same(other.model, other.num_blocks, other.weights)
        anew = {(table.kind, table.length) for table in other.tables if not table.derived}
        tables = {_key(table): table for table in self.tables if not _outdated(table, anew)}
        for table in other.tables:
            tables.pop(_key(table), None)  # so that a new table is last
            tables[_key(table)] = table
        measured = {(table.kind, table.length) for table in tables.values() if not table.derived}
        kept = [table for table in tables.values() if not (table.derived and (table.kind, table.length) in measured)]
        dropped = {*self.kinds} - {table.kind for table in kept}
        counted = other if other.exits or differ(self.ramps, other.ramps) else self
        if self.exits and not counted.exits:
            dropped |= {"exits"}
        own = (note for note in self.notes if note.partition(": ")[0].partition(", ")[0] not in dropped)
        notes = {note.partition(": ")[0]: note for note in (*own, *other.notes)}
        links = {(link.source, link.target, link.one_machine): link for link in self.links + other.links}
        return replace(
            self, tables=tuple(kept), exits=counted.exits, notes=tuple(notes.values()),
            weights=other.weights or self.weights, lengths=other.lengths or self.lengths,
            token_exits=counted.token_exits, links=tuple(links.values()), ramps=counted.ramps,
        )  # fmt: skip

    def check_same(self, model: str, num_blocks: int, weights: str = "") -> None:
        if (self.model, self.num_blocks) != (model, num_blocks):
            own, other = f"{self.model} ({self.num_blocks} blocks)", f"{model} ({num_blocks} blocks)"
            raise UserError(f"cannot add a profile of {other} to one of {own}: write it to another file")
        if differ(self.weights, weights):
            raise UserError(
                f"cannot add to the profile of another {model}, whose weights were {self.weights} and are {weights} "
                "now: write it to another file"
            )

    def on(self, backend: str, dtype: str, kind: str = "") -> "Profile":
        """The profile without tables of other backends and precisions, for kinds with tables of this one ("": any).

        `kind`: the only kind whose tables are left out; "": all kinds.
        """
        fitting = (table.kind for table in self.tables if _fits(table, backend, dtype))
        chosen = {each for each in fitting if each == (kind or each)}
        tables = (table for table in self.tables if table.kind not in chosen or _fits(table, backend, dtype))
        return replace(self, tables=tuple(tables))

    def dtypes(self, kind: str) -> set[str]:
        """The precisions of this kind's tables, where they were noted."""
        return {table.dtype for table in self.tables if table.kind == kind and table.dtype}

    def check_has(self, kind: str, backend: str, dtype: str) -> None:
        """Raise UserError if this kind has tables, but none of the requested backend and precision."""
        tables = [table for table in self.tables if table.kind == kind]
        if tables and not any(_fits(table, backend, dtype) for table in tables):
            requested, has = f"{backend} {dtype}".strip(), sorted({f"{each.backend} {each.dtype}" for each in tables})
            how = f"add some with 'isobatch profile ... --devices {kind}', or measure there"
            if not all(table.derived for table in tables):  # which the command would not add beside measured ones
                wanted = " ".join(f"--{name} {each}" for name, each in (("backend", backend), ("dtype", dtype)) if each)
                how = f"measure some there with 'isobatch profile ... {wanted}'"
            raise UserError(f"{self.model} on {kind} has no times of {requested}, only of {', '.join(has)}: {how}")

    def table(self, kind: str, length: int | None = None) -> LatencyTable:
        """The table for inputs of up to `length` tokens: the shortest that is long enough (None: the longest).

        A measured table is preferred to a derived one.
        """
        measured = self._tables(kind)
        fitting = [table for table in measured if length is None or table.length is None or table.length >= length]
        if not fitting:
            longest = max(table.length or 0 for table in measured)
            raise UserError(f"{self.model} on {kind} was profiled up to {longest} tokens, not {length}: profile longer")
        pick = max if length is None else min
        return pick(fitting, key=lambda table: table.length or 0)

    def table_of(self, kind: str, length: int | None) -> LatencyTable:
        """The table for texts of a mean `length`, which counts tokens (None: the table for the longest inputs)."""
        return self.table(kind) if length is None else at_length(self._tables(kind), length)

    def exits_of(self, length: int | None) -> ExitProfile:
        """The exits, weighted by tokens if inputs have a length; no exits if none were counted."""
        counted = (self.token_exits if length else None) or self.exits
        return counted or ExitProfile((1.0,) * self.num_blocks)

    def _tables(self, kind: str) -> list[LatencyTable]:
        tables = [table for table in self.tables if table.kind == kind]
        if not tables:
            whole, sharers = whole_kind(kind)
            how = f"add one with 'isobatch profile ... --devices {kind}', or measure there"
            if sharers > 1:  # no times of shared devices are published
                how = f"measure one on a {whole} with 'isobatch profile ... --together {sharers}'"
            has = ", ".join(self.kinds)
            raise UserError(f"no table for device kind {kind!r} in the profile of {self.model}, only for {has}: {how}")
        first = tables[0].backend, tables[0].dtype  # `isobatch profile` writes the network's own precision first
        of_first = [table for table in tables if (table.backend, table.dtype) == first]
        return [table for table in tables if not table.derived] or of_first


def _fits(table: LatencyTable, backend: str, dtype: str) -> bool:
    """Whether the table is of this backend and precision. An empty request, or a table without a note, fits any."""
    return table.backend in (None, backend or table.backend) and table.dtype in (None, dtype or table.dtype)


def _outdated(table: LatencyTable, anew: Collection[tuple[str, int | None]]) -> bool:
    """Whether the table is of a shared device that was measured again: at this length, or at any without sharing it."""
    whole, kinds = whole_kind(table.kind)[0], {kind for kind, _ in anew}
    if whole == table.kind:
        return False
    return (whole, table.length) in anew or (whole in kinds and table.kind not in kinds)


def _key(table: LatencyTable) -> tuple[str | int | None, ...]:
    kind, length = table.kind, table.length
    return (kind, length, table.backend, table.dtype) if table.derived else (kind, length)


def differ(one: str, other: str) -> bool:
    """Whether two hashes are known and not equal.

    >>> differ("a1", "b2"), differ("a1", "a1"), differ("", "b2")
    (True, False, False)
    """
    return bool(one and other and one != other)


def save(profile: Profile, path: Path) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profile)}, indent=2)
    text = re.sub(r"\[([^\[\]{}]*)\]", lambda row: f"[{' '.join(row[1].split())}]", text)  # one line per row
    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Write all of a text or nothing: a crash leaves the old file. The file ends with one line break.

    Of several processes that write to it at the same time, the last one's text stays.
    """
    text = text.removesuffix("\n") + "\n"
    if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced
        path.write_text(text)
        return
    path = path.resolve()  # a link stays one
    beside = path.with_suffix(f"{path.suffix}.{os.getpid()}.part")
    try:
        with naming_target(beside, path):
            beside.write_text(text)
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path) -> Profile:
    """Read a profile. Raise UserError with one line that names the wrong place."""
    fields = fields_in(path)
    if of := fields.get("profile_of"):
        raise UserError(f"{path} is a profile of a {of}: isobatch plan takes the {of}'s directory")
    if "tables" not in fields:
        raise UserError(f"{path} is not a profile: 'isobatch profile' writes one")
    return as_profile(Profile, fields, path)


def fields_in(path: Path) -> dict[str, Any]:
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold one JSON object, got {type(fields).__name__}")
    return fields


def as_profile(kind: type[AnyProfile], fields: dict[str, Any], path: Path) -> AnyProfile:
    version = fields.pop("schema_version", None)
    if version is True or version != SCHEMA_VERSION:
        hint = "measure again with 'isobatch profile', or use the isobatch that wrote it"
        raise UserError(f"{path}: schema_version is {version!r}, this isobatch reads {SCHEMA_VERSION}: {hint}")
    try:
        profile = TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        wrong = first_wrong(error)
        raise UserError(f"{path}: {wrong.place or 'profile'}: {wrong.reason}") from None
    check_numbers(fields, profile, path)
    return profile
