"""Orders and replies arrive unchanged over a connection, in pieces of any size, and packed batches in any precision."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.transport.connection import SHARED_BUFFER_BYTES, MessageConnection, bytes_of, frame
from isobatch.deployments.transport.holdings import Claim, Share
from isobatch.deployments.transport.orders import Departed, Failed, NumberedOrder, NumberedReply, Order, Stayed
from isobatch.deployments.transport.packed import Packed, pack, take, unpack
from isobatch.profiles.model import Batch, Exits, OpenRamps
from tests.helpers.travelling_batches import DTYPES, at_level_0, batches, make, same

HELD = Claim(4, "10.0.0.7:4242", "7f3a", 8, 1000)


class Ear(MessageConnection):
    """Receives messages as a connection does, in pieces of any size."""

    messages = NumberedOrder | NumberedReply

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.replies: list[Departed | Stayed | Failed] = []
        self.connection_made(Silent())

    def on_message(self, message: NumberedOrder | NumberedReply) -> None:
        if isinstance(message, NumberedOrder):
            self.orders.append(message.order)
        else:
            self.replies.append(message.reply)

    def hear(self, said: bytes, sizes: list[int]) -> None:
        while said:
            room = self.get_buffer(-1)
            size = min(len(said), len(room), sizes[len(said) % len(sizes)])
            room[:size] = said[:size]
            self.buffer_updated(size)
            said = said[size:]


class Silent(asyncio.Transport):
    def abort(self) -> None:
        raise AssertionError("what was said was not understood")


def bytes_of_frame(message: object) -> bytes:
    arrays: list[Any] = []
    return frame(message, arrays) + b"".join(bytes_of(array) for array in arrays)


shares = st.builds(lambda rows: Share(HELD, np.array(rows)), st.lists(st.integers(0, 7), min_size=1, unique=True))
sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


parts = st.lists(st.builds(pack, batches) | shares, min_size=1, max_size=3)
ramps = st.sampled_from([frozenset({2, 5}), {1: 0.25, 2: None}])


@given(st.lists(st.tuples(parts, ramps), min_size=1, max_size=3), sizes)
def test_orders_arrive_as_they_were_in_pieces_of_any_size(
    orders: list[tuple[list[Packed | Share], OpenRamps]], sizes: list[int]
) -> None:
    terms = {"keep": True, "by_value_bytes": 9, "hold_s": 1.5, "kinds": bytes([1, 2])}
    sent = [Order(7, ramps, tuple(parts), **terms) for parts, ramps in orders]
    ear = Ear()
    ear.hear(b"".join(bytes_of_frame(NumberedOrder(n, order)) for n, order in enumerate(sent)), sizes)
    assert len(ear.orders) == len(sent)
    for came, order in zip(ear.orders, sent, strict=True):
        assert (came.stop, came.ramps) == (7, order.ramps)
        assert {name: getattr(came, name) for name in terms} == terms
        for left, right in zip(came.parts, order.parts, strict=True):
            if isinstance(right, Share):
                assert isinstance(left, Share)
                assert (left.claim, left.rows.tolist()) == (right.claim, right.rows.tolist())
            else:
                assert isinstance(left, Packed)
                assert same(left, right)


def test_large_arrays_arrive() -> None:
    hidden = np.arange(3 * SHARED_BUFFER_BYTES, dtype=np.float32).reshape(3, SHARED_BUFFER_BYTES)
    order = Order(4, frozenset(), (pack(Batch(2, {"hidden": hidden}, np.zeros((3, 1), np.float32))),) * 2)
    ear = Ear()
    ear.hear(bytes_of_frame(NumberedOrder(0, order)) * 2, [10**6, SHARED_BUFFER_BYTES - 1])
    assert len(ear.orders) == 2
    for came in ear.orders:
        assert all(same(left, right) for left, right in zip(came.parts, order.parts, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [bytes(8), None])
def test_arrays_of_objects_are_refused(content: bytes | None) -> None:
    """Their bytes would be taken for addresses in this process's memory."""
    with pytest.raises(AssertionError, match="not understood"):
        Ear().hear(frame(["NumberedReply", 0, ["Stayed", None, ["|O", [1], content], 0.5, None]]), [100])


@given(batches, sizes, st.booleans())
def test_replies_arrive_as_they_were(batch: Batch, sizes: list[int], of_words: bool) -> None:
    rows = np.arange(len(batch))
    counts = rows % 3 if of_words else None
    answers = len(rows) if counts is None else int(counts.sum())
    logits = np.linspace(0, 1, 2 * answers, dtype=np.float32).reshape(-1, 2)
    exits = Exits(rows, rows + 3, logits, counts)
    stayed = (Stayed(pack(batch), rows, 0.5), Stayed(HELD, rows, 0.5), Stayed(None, rows[:0], 0.75))
    results = [Departed(exits, 0.25), *stayed, Failed("why", True)]
    ear = Ear()
    ear.hear(b"".join(bytes_of_frame(NumberedReply(n, reply)) for n, reply in enumerate(results)), sizes)
    departed, by_value, held, nobody, failed = ear.replies
    assert isinstance(departed, Departed)
    for name, sent in vars(exits).items():
        np.testing.assert_array_equal(getattr(departed.exits, name), sent)
    assert isinstance(by_value, Stayed)
    assert same(by_value.survivors, results[1].survivors)  # type: ignore[arg-type, union-attr]
    assert isinstance(held, Stayed)
    assert (held.survivors, held.rows.tolist(), held.computed_s) == (HELD, rows.tolist(), 0.5)
    assert isinstance(nobody, Stayed)
    assert (nobody.survivors, len(nobody.rows), failed) == (None, 0, results[4])


# Packed


def rows_of(batch: Batch) -> list[torch.Tensor]:
    hidden = torch.as_tensor(batch.arrays["hidden"])
    return list(hidden) if batch.lengths is None else list(hidden.split(batch.lengths.tolist()))


def same_rows(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
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
    assert same_rows(rows_of(joined), expected)
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
