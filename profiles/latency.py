"""How long a block takes: measured or derived seconds per block and batch size, on one kind of device."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]

# Where a table's times come from, as its `source` begins.
ORIGINS = MEASURED, PUBLISHED, ESTIMATED = "measured", "published", "estimated"


class ExtrapolationWarning(UserWarning):
    """A table was asked about batches beyond the largest that it knows."""


@dataclass(frozen=True)
class LatencyTable:
    """Seconds on one device of `kind`. Rows are batch sizes, columns are blocks.

    Where texts differ in length, a batch size counts tokens: as many as so many texts of `length` tokens have.

    `ramp_s[i][k]` is what an active ramp after block k adds; 0 where block k may carry none.
    `launch_s` is what every launch adds, whatever it runs, a replica's own work among it where one was timed. `stop_s`
    is what a launch adds at each ramp behind which its batch goes on smaller, beside the ramp; None: as much.
    `hidden_bytes[k]` is what one input weighs on the wire when it leaves block k for another device.
    `memory_bytes[k]` is what block k holds on the device (weights and, in block 0, the embedding).
    `repeated_bytes[k]` is what of these block k - 1 holds too, where layers share weights; empty where none do.
    `activation_bytes[k]` is what one input needs on the device while block k runs it; empty where nobody measured.
    `length` is the number of tokens per input that was measured, on average; None where inputs have one size.
    `backend` is what computes, `dtype` in which precision; None where nothing does, or nobody noted it.
    The p95 of a block is kept beside its median; empty where the source has none.
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

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a misspelt field in a file is an error

    def __post_init__(self) -> None:
        self._check_batch_sizes()
        self._check_rows("block_s", self.block_s, positive=True)
        self._check_rows("ramp_s", self.ramp_s)
        if self.block_p95_s:
            self._check_rows("block_p95_s", self.block_p95_s, positive=True)
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
        """The largest batch to plan with: of the sizes that were measured, and at least one input."""
        return max(1, int(self.batch_sizes[-1]))

    def size_text(self, size: float) -> str:
        """A batch size in words: inputs, or tokens where it is no whole number of texts.

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
        """Where its times come from: measured here, published for this very device, or estimated from others."""
        if self.source.startswith(PUBLISHED):
            return PUBLISHED
        return ESTIMATED if self.source.startswith((ESTIMATED, "datasheet")) else MEASURED

    @property
    def derived(self) -> bool:
        """Not measured here."""
        return self.origin != MEASURED

    @property
    def each_stop_s(self) -> float:
        return self.launch_s if self.stop_s is None else self.stop_s

    def covers(self, batch: ArrayLike) -> bool:
        """Whether no batch is larger than the largest that was measured; beyond it, times are extrapolated."""
        return bool(np.max(batch, initial=0) <= self.batch_sizes[-1])

    def block_times_s(self, batch: ArrayLike) -> Floats:
        """Seconds of every block at (possibly fractional) batch sizes: shape `batch.shape + (num_blocks,)`."""
        return self._times(self._blocks, batch)

    def ramp_times_s(self, batch: ArrayLike) -> Floats:
        """Seconds of the ramp after every block at (possibly fractional) batch sizes."""
        return self._times(self._ramps, batch)

    def block_p95_times_s(self, batch: ArrayLike) -> Floats:
        """As `block_times_s`, the 95th percentiles; where the source has none, the medians."""
        return self._times(self._p95, batch)

    @cached_property
    def _sizes(self) -> Floats:
        return np.asarray(self.batch_sizes, float)

    @cached_property
    def _blocks(self) -> Floats:
        return np.asarray(self.block_s)

    @cached_property
    def _ramps(self) -> Floats:
        return np.asarray(self.ramp_s)

    @cached_property
    def _p95(self) -> Floats:
        return np.asarray(self.block_p95_s or self.block_s)

    def _times(self, rows: Floats, batch: ArrayLike) -> Floats:
        at = np.asarray(batch, float)
        if not self.covers(at):
            asked, known = self.size_text(float(at.max())), self.size_text(self.batch_sizes[-1])
            largest = f"{self.kind}: a batch of {asked} is beyond the largest measured ({known})"
            warnings.warn(f"{largest}: extrapolated in a straight line", ExtrapolationWarning, stacklevel=3)
        return interpolate(self._sizes, rows, at)

    def _check_batch_sizes(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"length = {self.length} must be at least 1 token")
        least = 1 if self.length is None else 0
        if not self.batch_sizes or not max(least, 1e-9) <= self.batch_sizes[0] <= self.batch_sizes[-1] < np.inf:
            raise ValueError(f"batch_sizes = {self.batch_sizes} must hold at least one size, from {least} upwards")
        for before, after in zip(self.batch_sizes, self.batch_sizes[1:], strict=False):
            if after <= before:
                raise ValueError(f"batch_sizes must ascend, but {after} follows {before}")

    def _check_rows(self, name: str, rows: Rows, *, positive: bool = False) -> None:
        if len(rows) != len(self.batch_sizes):
            raise ValueError(f"{name} has {len(rows)} rows, one per batch size makes {len(self.batch_sizes)}")
        for size, row in zip(self.batch_sizes, rows, strict=True):
            if len(row) != self.num_blocks:
                raise ValueError(f"{name} at batch {size} has {len(row)} blocks, expected {self.num_blocks}")
            for block, seconds in enumerate(row):
                if not 0 <= seconds < np.inf or (positive and seconds == 0):
                    least = "more than 0" if positive else "0 or more"
                    raise ValueError(f"{name} at batch {size}, block {block} = {seconds} must be {least}, and finite")

    def _check_bytes(self, name: str, values: tuple[int, ...]) -> None:
        if len(values) != self.num_blocks and (values or name in ("hidden_bytes", "memory_bytes")):
            raise ValueError(f"{name} has {len(values)} blocks, expected {self.num_blocks}")
        for block, value in enumerate(values):
            if value < 0:
                raise ValueError(f"{name}[{block}] = {value} must be 0 or more")


def mixed_backends_warning(tables: Sequence[LatencyTable]) -> str | None:
    """A warning where some tables are of one backend or precision and others of another; None where all are alike.

    An eager device pays for every kernel that it is given, a compiled one hardly: plans that put one beside the other
    compare frameworks, not devices.
    """
    made = {table.kind: " ".join(filter(None, (table.backend, table.dtype))) for table in tables}
    if len({each for each in made.values() if each}) < 2:
        return None
    told = ", ".join(f"{kind} {each}" for kind, each in made.items() if each)
    return f"times of several backends are mixed ({told}): the plan compares frameworks as much as devices"


def interpolate(sizes: Floats, rows: Floats, batch: Floats) -> Floats:
    """Linear between sizes, so monotone where the rows are. Below the smallest a launch costs what the smallest does.

    Beyond the largest, every further input costs what the last ones cost, or the average one where that is more:
    a straight line that promises nothing.
    """
    at = np.minimum(np.maximum(batch, sizes[0]), sizes[-1])
    right = np.minimum(sizes.searchsorted(at, side="right"), len(sizes) - 1)
    left = np.maximum(right - 1, 0)  # the same as `right` where there is but one size
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
