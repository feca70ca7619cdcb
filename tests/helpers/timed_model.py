"""A SplitModel without arithmetic, whose blocks take known times on a clock that only it moves."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.model import NOBODY, Batch, Exits, Launched

LAUNCH_S = 0.002
RAMP_S = 0.0005
HIDDEN_BYTES = 4 * 16


class FakeModel:
    """Block k takes (k + 1) ms, and from `floor` inputs on time in proportion. Half of the inputs leave at ramp 1."""

    num_blocks, num_labels, ramp_blocks = 3, 2, (1,)

    def __init__(self, floor: int = 8, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._floor, self._noise = floor, noise

    def block_s(self, block: int, size: int) -> float:
        return 0.001 * (block + 1) * max(1.0, size / self._floor)

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        self.calls += 1
        active = [ramp for ramp in ramps if batch.cursor <= ramp < stop]
        blocks_s = sum(self.block_s(block, len(batch)) for block in range(batch.cursor, stop))
        self.now_s += (LAUNCH_S + blocks_s + RAMP_S * len(active)) * self._noise()
        leaves = np.arange(len(batch)) % 2 == 0 if active else np.zeros(len(batch), bool)
        blocks = np.where(leaves, active[0] if active else 0, stop - 1)
        if stop == self.num_blocks:
            leaves[:] = True
        rows = np.flatnonzero(leaves)
        exits = Exits(rows, blocks[rows], np.zeros((len(rows), self.num_labels), np.float32))
        leaves[kept] = stop == self.num_blocks
        return Launched(
            exits, None if leaves.all() else self.select(batch_at(stop, len(batch)), np.flatnonzero(~leaves))
        )

    def encode(self, inputs: Sequence[Any]) -> Batch:
        return batch_at(0, len(inputs))

    def merge(self, batches: Sequence[Batch]) -> Batch:
        return batch_at(batches[0].cursor, sum(map(len, batches)))

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return batch_at(batch.cursor, len(rows))

    def clock(self) -> float:
        return self.now_s

    def stopwatch(self, call: Callable[[], Launched]) -> tuple[Launched, float]:
        start = self.now_s
        launched = call()
        return launched, self.now_s - start


def batch_at(cursor: int, size: int) -> Batch:
    return Batch(cursor, {"hidden": np.zeros((size, 16), np.float32)}, np.zeros((size, 0), np.float32))
