"""What all networks of our loader share: how batches are merged and inputs selected, whatever computes them.

Texts lie one token after another, so nothing is ever padded.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isobatch.deployments.models.predict import PredictedAnswer, predict
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.transport.packed import rows_of
from isobatch.profiles.model import Batch


class CutNetwork:
    """A network with ramps, on one device."""

    def __init__(self, ramps: Ramps, labels: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        self.ramps, self.labels, self.device, self.dtype = ramps, tuple(labels), device, dtype

    @property
    def num_blocks(self) -> int:
        raise NotImplementedError

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def ramp_blocks(self) -> tuple[int, ...]:
        return self.ramps.blocks

    def predict(self: ServedModel, inputs: Sequence[Any], exits: bool = True) -> list[PredictedAnswer]:
        """Answers in the order of the inputs, as served; without `exits` all inputs run to the last block."""
        return predict(self, inputs, exits)

    @torch.inference_mode()
    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return select(batch, rows)

    def check(self, batch: Batch, stop: int, ramps: Collection[int]) -> None:
        """Raise ValueError for a launch that this network cannot run."""
        if not batch.cursor < stop <= self.num_blocks:
            raise ValueError(f"stop = {stop} must lie in {batch.cursor + 1}..{self.num_blocks}")
        if unknown := set(ramps) - set(self.ramp_blocks):
            raise ValueError(f"no ramp after block {min(unknown)}; ramps are after {list(self.ramp_blocks)}")


def merge(batches: Sequence[Batch]) -> Batch:
    """One batch of all inputs, in order."""
    cursors = {batch.cursor for batch in batches}
    if len(cursors) != 1:
        raise ValueError(f"batches to be merged must stand before the same block, got {sorted(cursors)}")
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    arrays = {name: torch.cat([torch.as_tensor(batch.arrays[name]) for batch in batches]) for name in first.arrays}
    memory = torch.cat([torch.as_tensor(batch.memory) for batch in batches])
    lengths = None if first.lengths is None else np.concatenate([_lengths(batch) for batch in batches])
    ahead = [batch.ahead for batch in batches if batch.ahead]
    return Batch(first.cursor, arrays, memory, lengths, ahead=merge(ahead) if ahead else None)


def select(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    """The inputs at these positions."""
    memory = torch.as_tensor(batch.memory)
    inputs = torch.from_numpy(rows).to(memory.device, non_blocking=True)  # the arrays are on the same device
    array_rows, lengths = inputs, None
    if batch.lengths is not None:
        array_rows = torch.from_numpy(rows_of(batch.lengths, rows)).to(memory.device, non_blocking=True)
        lengths = batch.lengths[rows]
    arrays = {name: torch.as_tensor(array).index_select(0, array_rows) for name, array in batch.arrays.items()}
    ahead = select(batch.ahead, rows) if batch.ahead else None
    return Batch(batch.cursor, arrays, memory.index_select(0, inputs), lengths, ahead=ahead)


def _lengths(batch: Batch) -> NDArray[np.int64]:
    if batch.lengths is None:
        raise ValueError("a batch of texts cannot be merged with one that has no lengths")
    return batch.lengths
