"""How long a block takes: measured or derived seconds per block and batch size, on one kind of device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LatencyTable:
    """Seconds on one device of `kind`. Rows are batch sizes, columns are blocks.

    `ramp_s[i][k]` is what an active ramp after block k adds; 0 where block k may carry none.
    `hidden_bytes[k]` is what one input weighs on the wire when it leaves block k for another device.
    `memory_bytes[k]` is what block k holds on the device (weights and, in block 0, the embedding).
    """

    kind: str
    batch_sizes: tuple[int, ...]
    block_s: tuple[tuple[float, ...], ...]
    ramp_s: tuple[tuple[float, ...], ...]
    launch_s: float
    hidden_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    source: str

    @property
    def num_blocks(self) -> int:
        return len(self.block_s[0])

    def block_times_s(self, batch: ArrayLike) -> Floats:
        """Seconds of every block at (possibly fractional) batch sizes: shape `batch.shape + (num_blocks,)`."""
        return _interpolate(np.asarray(self.batch_sizes, float), np.asarray(self.block_s), np.asarray(batch, float))

    def ramp_times_s(self, batch: ArrayLike) -> Floats:
        """Seconds of the ramp after every block at (possibly fractional) batch sizes."""
        return _interpolate(np.asarray(self.batch_sizes, float), np.asarray(self.ramp_s), np.asarray(batch, float))


def _interpolate(sizes: Floats, rows: Floats, batch: Floats) -> Floats:
    """Linear between sizes and beyond the largest; below the smallest a launch costs what the smallest does."""
    at = np.maximum(batch, sizes[0])
    if len(sizes) == 1:
        scaled: Floats = np.multiply.outer(at / sizes[0], rows[0])
        return scaled
    left = np.clip(np.searchsorted(sizes, at, side="right") - 1, 0, len(sizes) - 2)
    share = (at - sizes[left]) / (sizes[left + 1] - sizes[left])
    times: Floats = rows[left] + share[..., None] * (rows[left + 1] - rows[left])
    return times
