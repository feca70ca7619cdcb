"""A batch shrinks at every active ramp, and every input leaves it exactly once."""

from collections.abc import Collection

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.dispatch.messages import RowKind
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.model import Exits
from tests.helpers.toy_model import RAMPS, Toy, left_at


def run_through(toy: Toy, inputs: list[list[int]], ramps: Collection[int]) -> list[Exits]:
    """Run a batch from the first block to the last on one replica."""
    order = Order(toy.num_blocks, frozenset(ramps), (pack(toy.encode(inputs)),))
    return [reply.exits for reply in SplitReplica(toy).run(order) if isinstance(reply, Departed)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sets(st.sampled_from(RAMPS)))
def test_every_input_leaves_once_at_the_first_active_ramp_where_it_is_sure(blocks: list[int], ramps: set[int]) -> None:
    toy = Toy()
    parts = run_through(toy, [[block, 1] for block in blocks], ramps)
    rows = np.concatenate([part.rows for part in parts])
    exits = dict(zip(rows.tolist(), np.concatenate([part.blocks for part in parts]).tolist(), strict=True))
    assert sorted(rows) == list(range(len(blocks)))
    assert [exits[row] for row in range(len(blocks))] == [left_at(block, ramps) for block in blocks]


def test_no_input_is_computed_after_it_left() -> None:
    toy = Toy()
    run_through(toy, [[0, 1], [0, 1], [1, 1], [4, 1]], RAMPS)
    assert toy.sizes == [4, 2, 1]
    toy.sizes.clear()
    run_through(toy, [[0, 1], [0, 1]], RAMPS)
    assert toy.sizes == [2]


ROWS = st.tuples(st.integers(0, 4), st.sampled_from(list(RowKind)))


@given(st.lists(ROWS, min_size=1, max_size=12), st.sets(st.sampled_from(RAMPS)), st.sampled_from([1, 3, 4]))
def test_shadows_run_on_and_change_no_answer(inputs: list[tuple[int, RowKind]], ramps: set[int], stop: int) -> None:
    toy, kinds = Toy(), [kind for _, kind in inputs]
    order = Order(stop, frozenset(ramps), (pack(toy.encode([[block, 1] for block, _ in inputs])),), kinds=bytes(kinds))
    *parts, stayed = SplitReplica(toy).run(order)
    results = [(row, block) for part in parts for row, block in zip(part.exits.rows, part.exits.blocks, strict=True)]
    at_end, wanted = toy.num_blocks - 1, list[tuple[int, int]]()
    for row, (block, kind) in enumerate(inputs):
        leaves = left_at(block, ramps)
        answered = kind in (RowKind.AUDITED, RowKind.EARLY)
        if (kind is RowKind.PLAIN or answered) and leaves < stop:
            wanted.append((row, leaves))
        if (kind in (RowKind.SHADOW, RowKind.FULL) or (answered and leaves < at_end)) and stayed.stop is None:
            wanted += [(row, at_end)] if stop == toy.num_blocks else []
    assert sorted(results) == sorted(wanted)
    inside = {row for row, (block, kind) in enumerate(inputs) if kind or left_at(block, ramps) >= stop}
    if stayed.stop is not None or stop < toy.num_blocks:
        assert set(stayed.rows.tolist()) == inside
    if stayed.stop is not None:
        assert {RowKind.FULL, RowKind.EARLY}.isdisjoint(kinds), "who is meant to run to the end does"


def test_a_launch_ends_when_only_shadows_are_left() -> None:
    toy = Toy()
    order = Order(
        4, frozenset(RAMPS), (pack(toy.encode([[0, 1], [0, 1]])),), kinds=bytes([RowKind.PLAIN, RowKind.AUDITED])
    )
    *_, stayed = SplitReplica(toy).run(order)
    assert toy.sizes == [2]
    assert (stayed.stop, stayed.rows.tolist(), stayed.survivors.cursor) == (1, [1], 1)
    onward = Order(4, frozenset(RAMPS), (stayed.survivors,), kinds=bytes([RowKind.SHADOW]))
    departed, stayed = SplitReplica(toy).run(onward)
    assert (departed.exits.blocks.tolist(), stayed.survivors) == ([3], None)
