"""Batches are packed and unpacked without change, in every precision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.transport.packed import pack, take, unpack
from isobatch.profiles.model import Batch
from tests.helpers.travelling_batches import DTYPES, at_level_0, batches, make


def rows_of(batch: Batch) -> list[torch.Tensor]:
    hidden = torch.as_tensor(batch.arrays["hidden"])
    return list(hidden) if batch.lengths is None else list(hidden.split(batch.lengths.tolist()))


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


@settings(deadline=None)
@given(batches)
def test_a_batch_comes_back_as_it_was(batch: Batch) -> None:
    again = unpack([pack(batch)])
    assert again.cursor == 3
    assert torch.equal(torch.as_tensor(again.arrays["hidden"]), torch.as_tensor(batch.arrays["hidden"]))
    assert (again.memory == batch.memory).all()


@settings(deadline=None)
@given(st.data(), st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_any_rows_of_any_parts_can_be_joined(data: st.DataObject, shapes: list[list[int]], texts: bool) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    sources = [make(shape if texts else None, len(shape), dtype, seed) for seed, shape in enumerate(shapes)]
    chosen = [data.draw(st.permutations(range(len(shape)))) for shape in shapes]
    chosen = [rows[: data.draw(st.integers(1, len(rows)))] for rows in chosen]
    joined = unpack([take(pack(s), np.array(rows)) for s, rows in zip(sources, chosen, strict=True)])
    expected = [rows_of(source)[row] for source, rows in zip(sources, chosen, strict=True) for row in rows]
    assert same(rows_of(joined), expected)
    memory = np.concatenate([s.memory[rows] for s, rows in zip(sources, chosen, strict=True)])
    assert (joined.memory == memory).all()


def test_the_encoding_for_the_next_level_of_a_cascade_is_sent_along() -> None:
    parts = [pack(at_level_0(make([1, 2], 2, torch.float16, seed))) for seed in range(2)]
    joined = unpack([take(part, np.array([1])) for part in parts])
    assert joined.ahead is not None
    assert (joined.ahead.cursor, joined.ahead.lengths.tolist()) == (7, [3, 3])
    assert joined.ahead.arrays["input_ids"].tolist() == [3, 4, 5] * 2


def test_parts_before_different_blocks_are_refused() -> None:
    first = pack(make([2], 1, torch.float32, 0))
    other = pack(Batch(5, {"hidden": torch.zeros(2, 3)}, np.zeros((1, 2), np.float32), np.array([2])))
    with pytest.raises(ValueError, match=r"one block, got \[3, 5\]"):
        unpack([first, other])
