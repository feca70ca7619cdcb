"""The times of blocks: measured or derived seconds per block and batch size, on one kind of device."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isobatch.profiles.errors import UserError

Floats = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]

# The origins of a table's times; its `source` begins with one of them.
MEASURED = "measured"
PUBLISHED = "published"
ESTIMATED = "estimated"
ORIGINS = (MEASURED, PUBLISHED, ESTIMATED)  # the most reliable first
MOST_BATCH = 2**20  # far beyond what any device computes at once
USUAL_LARGEST, MOST_LARGEST = 64, 256  # the largest batch that is timed, and where larger ones answer more


class ExtrapolationWarning(UserWarning):
    """A table was used for batches beyond the largest in it."""


@dataclass(frozen=True)
class LatencyTable:
    """Seconds on one device of `kind`. Rows are batch sizes, columns are blocks.

    Where texts differ in length, a batch size counts tokens, as a multiple of a text of `length` tokens.

    `ramp_s[i][k]` is the extra time of an active ramp after block k; 0 where block k may have none. `launch_s` is the
    extra time of every launch, with the replica's own work where it was timed. `stop_s` is the extra time at each ramp
    after which the batch gets smaller, in addition to the ramp; None: the same as `launch_s`. `hidden_bytes[k]` is the
    size of one input on the wire when it leaves block k for another device. `memory_bytes[k]` is the memory of block k
    on the device (weights and, in block 0, the embedding). `repeated_bytes[k]` is the part of it that block k - 1 holds
    as well, where layers share weights; empty: none do. `activation_bytes[k]` is the memory of one input on the device
    while block k runs it; empty: not measured. `length` is the mean number of tokens per input in the measurement; None
    where inputs have one size. `backend` computes, with precision `dtype`; None: nothing computes, or it was not noted.
    `block_p95_s` are 95th percentiles, beside the medians; empty where the source has none. `interval[i]` are the
    factors between which times at batch size i lie in four of five cases; empty: not estimated.
    """

    kind: str
    batch_sizes: tuple[int | float, ...]
    block_s: Rows
    ramp_s: Rows
    launch_s: float
    hidden_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    source: str
    length: int | None = None
    block_p95_s: Rows = ()
    launch_p95_s: float | None = None
    activation_bytes: tuple[int, ...] = ()
    backend: str | None = None
    repeated_bytes: tuple[int, ...] = ()
    dtype: str | None = None
    stop_s: float | None = None
    interval: Rows = ()

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a misspelt field in a file is an error

    def __post_init__(self) -> None:
        self._check_batch_sizes()
        self._check_rows("block_s", self.block_s, positive=True)
        self._check_rows("ramp_s", self.ramp_s)
        if self.block_p95_s:
            self._check_rows("block_p95_s", self.block_p95_s, positive=True)
        if self.interval:
            self._check_interval()
        for name in ("hidden_bytes", "memory_bytes", "activation_bytes", "repeated_bytes"):
            self._check_bytes(name, getattr(self, name))
        for name in ("launch_s", "launch_p95_s", "stop_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < np.inf:
                raise ValueError(f"{name} = {seconds} must be 0 or more, and finite")

    @property
    def num_blocks(self) -> int:
        return len(self.block_s[0])

    @property
    def largest(self) -> int:
        """The largest batch to plan with: the largest measured size, and at least one input."""
        return max(1, int(self.batch_sizes[-1]))

    def size_text(self, size: float) -> str:
        """A batch size in words: in inputs, or in tokens where it is no whole number of texts.

        >>> table = LatencyTable("cpu", (0.25, 1), ((0.1,),) * 2, ((0.0,),) * 2, 0.0, (0,), (0,), "measured", length=13)
        >>> table.size_text(0.25), table.size_text(1)
        ('3 tokens', '1')
        """
        if self.length is None or size % 1 == 0:
            return f"{size:g}"
        tokens = round(size * self.length)
        return f"{tokens} token{'s' if tokens != 1 else ''}"

    @property
    def origin(self) -> str:
        """The origin of its times: measured here, published for this kind of device, or estimated from others."""
        if self.source.startswith(PUBLISHED):
            return PUBLISHED
        return ESTIMATED if self.source.startswith((ESTIMATED, "datasheet")) else MEASURED

    @property
    def derived(self) -> bool:
        return self.origin != MEASURED

    @property
    def each_stop_s(self) -> float:
        return self.launch_s if self.stop_s is None else self.stop_s

    def at_end_of_interval(self, end: int) -> "LatencyTable":
        """The table if all times are at the short end (0) or the long end (1) of their interval."""
        if not self.interval:
            return self
        block_s, ramp_s = (_longer(rows, [row[end] for row in self.interval]) for rows in (self.block_s, self.ramp_s))
        return replace(self, block_s=block_s, ramp_s=ramp_s, block_p95_s=(), interval=())

    def shared_by(self, sharers: int, factors: Sequence[float]) -> "LatencyTable":
        """The table of one of several replicas that launch on one device at the same time. `factors`: by how much a
        launch of each batch size then takes longer; what every launch costs grows as the smallest one."""
        block_s, ramp_s, p95_s = (
            rows and _longer(rows, factors) for rows in (self.block_s, self.ramp_s, self.block_p95_s)
        )
        launch_s, stop_s, launch_p95_s = (
            each and factors[0] * each for each in (self.launch_s, self.stop_s, self.launch_p95_s)
        )
        longer = f"{sharers} at once take {min(factors):.3g} to {max(factors):.3g} times as long as one"
        return replace(
            self, kind=f"{self.kind}/{sharers}", block_s=block_s, ramp_s=ramp_s, block_p95_s=p95_s,
            launch_s=launch_s or 0.0, stop_s=stop_s, launch_p95_s=launch_p95_s, source=f"{self.source}; {longer}",
        )  # fmt: skip

    @property
    def kind_and_length(self) -> str:
        return f"{self.kind}, {self.length} tokens" if self.length else self.kind

    def covers(self, batch: ArrayLike) -> bool:
        """Whether no batch is larger than the largest measured one; beyond it, times are extrapolated."""
        return bool(np.max(batch, initial=0) <= self.batch_sizes[-1])

    def block_times_s(self, batch: ArrayLike) -> Floats:
        """Seconds of every block at (possibly fractional) batch sizes: shape `batch.shape + (num_blocks,)`."""
        return self._times("block_s", batch)

    def ramp_times_s(self, batch: ArrayLike) -> Floats:
        """Seconds of the ramp after every block at (possibly fractional) batch sizes."""
        return self._times("ramp_s", batch)

    def block_p95_times_s(self, batch: ArrayLike) -> Floats:
        """The 95th percentiles, as `block_times_s`; the medians where the source has none."""
        return self._times("block_p95_s" if self.block_p95_s else "block_s", batch)

    @cached_property
    def _arrays(self) -> dict[str, Floats]:
        names = ("batch_sizes", "block_s", "ramp_s", "block_p95_s")
        return {name: np.asarray(getattr(self, name), float) for name in names}

    def _times(self, rows: str, batch: ArrayLike) -> Floats:
        at = np.asarray(batch, float)
        if not self.covers(at):
            size, known = self.size_text(float(at.max())), self.size_text(self.batch_sizes[-1])
            largest = f"{self.kind}: a batch of {size} is beyond the largest measured ({known})"
            warnings.warn(f"{largest}: extrapolated in a straight line", ExtrapolationWarning, stacklevel=3)
        return interpolate(self._arrays["batch_sizes"], self._arrays[rows], at)

    def _check_batch_sizes(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"length = {self.length} must be at least 1 token")
        least = 1 if self.length is None else 0
        if not self.batch_sizes or not all(max(least, 1e-9) <= size <= MOST_BATCH for size in self.batch_sizes):
            sizes = f"at least one size, from {least} to {MOST_BATCH}"
            raise ValueError(f"batch_sizes = {self.batch_sizes} must hold {sizes}")
        for before, after in pairwise(self.batch_sizes):
            if after <= before:
                raise ValueError(f"batch_sizes must ascend, but {after} follows {before}")

    def _by_size(self, name: str, rows: Rows) -> Iterator[tuple[float, tuple[float, ...]]]:
        """Each batch size with its row; raise ValueError if their numbers differ."""
        if len(rows) != len(self.batch_sizes):
            raise ValueError(f"{name} has {len(rows)} rows, and must have {len(self.batch_sizes)}: one per batch size")
        yield from zip(self.batch_sizes, rows, strict=True)

    def _check_rows(self, name: str, rows: Rows, *, positive: bool = False) -> None:
        for size, row in self._by_size(name, rows):
            if len(row) != self.num_blocks:
                raise ValueError(f"{name} at batch {size} has {len(row)} blocks, expected {self.num_blocks}")
            for block, seconds in enumerate(row):
                if not 0 <= seconds < np.inf or (positive and seconds == 0):
                    least = "more than 0" if positive else "0 or more"
                    raise ValueError(f"{name} at batch {size}, block {block} = {seconds} must be {least}, and finite")

    def _check_interval(self) -> None:
        for size, row in self._by_size("interval", self.interval):
            if len(row) != 2 or not 0 < row[0] <= row[1] < np.inf:
                must = "must be two factors above 0, the smaller first"
                raise ValueError(f"interval at batch {size} = {list(row)} {must}")

    def _check_bytes(self, name: str, values: tuple[int, ...]) -> None:
        if len(values) != self.num_blocks and (values or name in ("hidden_bytes", "memory_bytes")):
            raise ValueError(f"{name} has {len(values)} blocks, expected {self.num_blocks}")
        for block, value in enumerate(values):
            if value < 0:
                raise ValueError(f"{name}[{block}] = {value} must be 0 or more")


def _longer(rows: Rows, factors: Sequence[float]) -> Rows:
    """Rows whose times are longer by a factor for each batch size."""
    return tuple(tuple(factor * each for each in row) for factor, row in zip(factors, rows, strict=True))


def mixed_backends_warning(tables: Sequence[LatencyTable]) -> str | None:
    """A warning if tables are of different backends or precisions; None if they are of one.

    Eager code pays for every kernel, compiled code hardly: plans that combine them compare frameworks, not devices.
    """
    variants = {table.kind: " ".join(filter(None, (table.backend, table.dtype))) for table in tables}
    if len({variant for variant in variants.values() if variant}) < 2:
        return None
    mixture = ", ".join(f"{kind} {variant}" for kind, variant in variants.items() if variant)
    return f"times of several backends are mixed ({mixture}): the plan compares frameworks as much as devices"


def interpolate(sizes: Floats, rows: Floats, batch: Floats) -> Floats:
    """Linear between sizes, so monotone where the rows are. Below the smallest size, its own time counts.

    Beyond the largest size, every further input costs as much as the last ones, or as the mean input if that is more.
    This straight line is only an assumption.
    """
    at = np.minimum(np.maximum(batch, sizes[0]), sizes[-1])
    right = np.minimum(sizes.searchsorted(at, side="right"), len(sizes) - 1)
    left = np.maximum(right - 1, 0)  # equals `right` if there is only one size
    apart = sizes[right] - sizes[left]
    share = (at - sizes[left]) / np.where(apart > 0, apart, 1.0)
    times: Floats = rows[left] + share[..., None] * (rows[right] - rows[left])
    beyond = np.maximum(batch - sizes[-1], 0)
    return times + beyond[..., None] * _slope_beyond(sizes, rows) if beyond.any() else times


def _slope_beyond(sizes: Floats, rows: Floats) -> Floats:
    average: Floats = rows[-1] / sizes[-1]
    if len(sizes) == 1:
        return average
    last: Floats = (rows[-1] - rows[-2]) / (sizes[-1] - sizes[-2])
    return np.where(last > average, last, average)


TOKEN_BYTES = 16  # of one token on the wire: its number and its type


def edge_bytes(length: int | None, side: int, num_labels: int) -> int:
    """The size of one input at an edge: a text of `length` tokens or a square image, and the labels' probabilities.

    >>> edge_bytes(10, 0, num_labels=2), edge_bytes(None, 32, num_labels=2)
    (168, 12296)
    """
    return (TOKEN_BYTES * length if length else 4 * 3 * side * side) + 4 * num_labels


def cascade_table(tables: Sequence[LatencyTable], carried_bytes: int) -> LatencyTable:
    """One table of all levels, from one table of each on the same kind of device, for inputs of one length.

    `carried_bytes` is the size of one input on the wire at an edge, in the form that the next level reads. Before the
    edge this form travels along with the hidden state. A launch costs as much as at the most expensive level.
    """
    first = tables[0]
    if any((each.kind, each.length) != (first.kind, first.length) for each in tables):
        raise UserError(f"levels must be timed on one kind and at one length: {first.kind}, {first.length}")
    sizes = _sizes(tables)
    before = [(*(size + carried_bytes for size in each.hidden_bytes[:-1]), carried_bytes) for each in tables[:-1]]
    sources = dict.fromkeys(each.source for each in tables)
    return replace(
        first,
        batch_sizes=sizes,
        block_s=_joined([each.block_times_s(sizes) for each in tables]),
        ramp_s=_joined([each.ramp_times_s(sizes) for each in tables]),
        block_p95_s=_joined([each.block_p95_times_s(sizes) for each in tables]),
        launch_s=max(each.launch_s for each in tables),
        stop_s=max(each.each_stop_s for each in tables),
        launch_p95_s=max(each.launch_p95_s or each.launch_s for each in tables),
        hidden_bytes=(*chain.from_iterable(before), *tables[-1].hidden_bytes),
        memory_bytes=_one_after_another([each.memory_bytes for each in tables]),
        activation_bytes=_one_after_another([each.activation_bytes for each in tables]),
        source="; ".join(sources),
        repeated_bytes=_repeated(tables),
        interval=widest_interval(tables, sizes),
    )


def _repeated(tables: Sequence[LatencyTable]) -> tuple[int, ...]:
    """The weights that blocks share inside their level; levels share none with each other."""
    if not any(each.repeated_bytes for each in tables):
        return ()
    return tuple(chain.from_iterable(each.repeated_bytes or (0,) * each.num_blocks for each in tables))


def widest_interval(tables: Sequence[LatencyTable], sizes: Sequence[float]) -> Rows:
    """The widest interval of any level at each batch size; empty if no level has one."""
    at = np.asarray(sizes, float)
    ends = [
        [np.interp(at, each.batch_sizes, [row[end] for row in each.interval]) for each in tables if each.interval]
        for end in (0, 1)
    ]
    if not ends[0]:
        return ()
    return tuple(zip(np.min(ends[0], axis=0).tolist(), np.max(ends[1], axis=0).tolist(), strict=True))


def _one_after_another(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The values of all levels in order; empty if one level has none."""
    return tuple(chain.from_iterable(parts)) if all(parts) else ()


def _sizes(tables: Sequence[LatencyTable]) -> tuple[int | float, ...]:
    """All batch sizes of any level that lie within the range of every level."""
    low, high = (max(each.batch_sizes[0] for each in tables), min(each.batch_sizes[-1] for each in tables))
    return tuple(sorted({size for each in tables for size in each.batch_sizes if low <= size <= high} | {low, high}))


def _joined(parts: Sequence[np.ndarray]) -> Rows:
    return tuple(tuple(row) for row in np.concatenate(parts, axis=1).tolist())
