"""A batch shrinks at every active ramp, and every input leaves it exactly once; what a replica loads."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.config import AppConfig, parse
from isobatch.deployments.dispatch.messages import RowKind
from isobatch.deployments.replica.loading import load_model
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import pack
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.model import Exits
from tests.helpers.toy_model import BLOCKS, RAMPS, Toy, left_at
from tests.helpers.virtual_device import SURVIVAL, table


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
    told = [(row, block) for part in parts for row, block in zip(part.exits.rows, part.exits.blocks, strict=True)]
    at_end, wanted = toy.num_blocks - 1, list[tuple[int, int]]()
    for row, (block, kind) in enumerate(inputs):
        leaves = left_at(block, ramps)
        answered = kind in (RowKind.AUDITED, RowKind.EARLY)
        if (kind is RowKind.PLAIN or answered) and leaves < stop:
            wanted.append((row, leaves))
        if (kind in (RowKind.SHADOW, RowKind.FULL) or (answered and leaves < at_end)) and stayed.stop is None:
            wanted += [(row, at_end)] if stop == toy.num_blocks else []
    assert sorted(told) == sorted(wanted)
    inside = {row for row, (block, kind) in enumerate(inputs) if kind or left_at(block, ramps) >= stop}
    if stayed.stop is not None or stop < toy.num_blocks:
        assert set(stayed.rows.tolist()) == inside
    if stayed.stop is not None:
        assert {RowKind.FULL, RowKind.EARLY}.isdisjoint(kinds), "who is meant to run to the end does"


def test_with_early_answers_inputs_are_answered_at_ramps_and_computed_to_the_end() -> None:
    toy = Toy()
    order = Order(4, frozenset(RAMPS), (pack(toy.encode([[0, 1], [0, 1], [1, 1]])),), kinds=bytes([RowKind.EARLY] * 3))
    *parts, stayed = SplitReplica(toy).run(order)
    assert toy.sizes == [3, 3, 3]
    assert [(part.exits.rows.tolist(), part.exits.blocks.tolist()) for part in parts] == [
        ([0, 1], [0, 0]),
        ([2], [2]),
        ([0, 1, 2], [3, 3, 3]),
    ]
    assert stayed.survivors is None


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


LOADER = "tests.helpers.toy_model:load"


@pytest.fixture
def first(tmp_path: Path) -> AppConfig:
    """A configuration that was parsed while its plan's file existed; the file has been removed since."""
    save(Profile("toy", (replace(table(), kind="cpu"),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    plan = Plan((Placement("cpu", 1, (Split(0, BLOCKS, 1),)),), backend="onnx", dtype="int8")
    (tmp_path / "plan.json").write_text(plan.to_json())
    made = parse({"plan": str(tmp_path / "plan.json"), "profile": str(tmp_path / "profile.json"), "loader": LOADER})
    (tmp_path / "plan.json").unlink()
    return made


def test_a_replica_that_starts_later_does_not_need_the_file_of_the_plan(first: AppConfig) -> None:
    assert (first.backend, first.dtype) == ("onnx", "int8"), "as the plan said"
    assert isinstance(load_model(first.model_copy(update={"backend": "torch", "dtype": "float32"}), "cpu", ""), Toy)


def test_a_virtual_replica_does_not_need_the_file_of_the_plan(first: AppConfig) -> None:
    assert isinstance(load_model(first.model_copy(update={"backend": "virtual"}), "cpu", ""), VirtualModel)
