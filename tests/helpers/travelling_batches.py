"""Batches of every shape and precision, for tests that send them somewhere."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from isobatch.deployments.transport.packed import Packed
from isobatch.profiles.model import Batch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)


def make(lengths: list[int] | None, count: int, dtype: torch.dtype, seed: int) -> Batch:
    torch.manual_seed(seed)
    memory = torch.rand(count, 2).numpy()
    if lengths is None:
        return Batch(3, {"hidden": (torch.randn(count, 2, 3) * 9).to(dtype)}, memory)
    hidden = (torch.randn(sum(lengths), 3) * 9).to(dtype)
    return Batch(3, {"hidden": hidden}, memory, np.array(lengths))


def at_level_0(batch: Batch) -> Batch:
    """The same in a cascade, of which another level reads other tokens."""
    ids = np.arange(3 * len(batch))
    ahead = Batch(7, {"input_ids": ids}, np.zeros((len(batch), 0), np.float32), np.full(len(batch), 3))
    return replace(batch, ahead=ahead)


batches = st.builds(
    lambda lengths, texts, dtype, seed, cascade: (at_level_0 if cascade else replace)(
        make(lengths if texts else None, len(lengths), dtype, seed)
    ),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
    st.booleans(),
)


def same(left: Packed, right: Packed) -> bool:
    if left.ahead and right.ahead and not same(left.ahead, right.ahead):
        return False
    arrays = [*zip(left.arrays.values(), right.arrays.values(), strict=True), (left.memory, right.memory)]
    if left.lengths is not None:
        arrays.append((left.lengths, right.lengths))
    about = [
        (part.cursor, part.bfloat16, list(part.arrays), part.lengths is None, part.ahead is None)
        for part in (left, right)
    ]
    return about[0] == about[1] and all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in arrays)
