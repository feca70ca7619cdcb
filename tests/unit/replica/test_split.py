"""A batch shrinks at every active ramp, and everybody leaves it exactly once."""

from collections.abc import Collection

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deployments.replica.split import SplitReplica
from deployments.transport.orders import Departed, Order
from deployments.transport.packed import pack
from profiles.model import Exits
from tests.helpers.toy_model import RAMPS, Toy, left_at


def run_through(toy: Toy, inputs: list[list[int]], ramps: Collection[int]) -> list[Exits]:
    """From the first block to the last, on one replica."""
    order = Order(toy.num_blocks, frozenset(ramps), (pack(toy.encode(inputs)),))
    return [reply.exits for reply in SplitReplica(toy).run(order) if isinstance(reply, Departed)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sets(st.sampled_from(RAMPS)))
def test_everybody_leaves_once_at_the_first_active_ramp_that_fits(blocks: list[int], ramps: set[int]) -> None:
    toy = Toy()
    parts = run_through(toy, [[block, 1] for block in blocks], ramps)
    rows = np.concatenate([part.rows for part in parts])
    exits = dict(zip(rows.tolist(), np.concatenate([part.blocks for part in parts]).tolist(), strict=True))
    assert sorted(rows) == list(range(len(blocks)))
    assert [exits[row] for row in range(len(blocks))] == [left_at(block, ramps) for block in blocks]


def test_nobody_is_computed_after_leaving() -> None:
    toy = Toy()
    run_through(toy, [[0, 1], [0, 1], [1, 1], [4, 1]], RAMPS)
    assert toy.sizes == [4, 2, 1]
    toy.sizes.clear()
    run_through(toy, [[0, 1], [0, 1]], RAMPS)
    assert toy.sizes == [2]
