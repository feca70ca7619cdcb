"""Merging and choosing inputs: padding to the longest, and never more than that."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from profiles.model import Batch


def merge(batches: Sequence[Batch]) -> Batch:
    """One batch of all inputs, in order."""
    cursors = {batch.cursor for batch in batches}
    if len(cursors) != 1:
        raise ValueError(f"batches to be merged must stand before one block, got {sorted(cursors)}")
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    lengths = None if first.lengths is None else np.concatenate([_lengths(batch) for batch in batches])
    longest = None if lengths is None else int(lengths.max())
    arrays = {name: _join([batch.arrays[name] for batch in batches], longest) for name in first.arrays}
    memory = torch.cat([torch.as_tensor(batch.memory) for batch in batches])
    return Batch(first.cursor, arrays, memory, lengths)


def select(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    """The inputs at these positions, trimmed to the longest of them."""
    lengths = None if batch.lengths is None else batch.lengths[rows]
    longest = None if lengths is None else int(lengths.max(initial=0))
    memory = torch.as_tensor(batch.memory)
    which = torch.from_numpy(rows).to(memory.device, non_blocking=True)  # where the arrays are, too
    arrays = {name: torch.as_tensor(array)[:, :longest].index_select(0, which) for name, array in batch.arrays.items()}
    return Batch(batch.cursor, arrays, memory.index_select(0, which), lengths)


def _lengths(batch: Batch) -> NDArray[np.int64]:
    if batch.lengths is None:
        raise ValueError("a padded batch cannot be merged with one that has no lengths")
    return batch.lengths


def _join(arrays: Sequence[object], longest: int | None) -> Tensor:
    tensors = [torch.as_tensor(array) for array in arrays]
    return torch.cat(tensors if longest is None else [_stretch(tensor, longest) for tensor in tensors])


def _stretch(tensor: Tensor, length: int) -> Tensor:
    """Pad to this length with zeros, which no real token ever looks at."""
    if tensor.shape[1] == length:
        return tensor
    wide = tensor.new_zeros((tensor.shape[0], length, *tensor.shape[2:]))
    wide[:, : tensor.shape[1]] = tensor
    return wide
