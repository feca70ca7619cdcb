"""Messages over a connection: orders and replies arrive unchanged, in pieces of any size."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.transport.connection import SHARED_BUFFER_BYTES, MessageConnection, bytes_of, frame
from isobatch.deployments.transport.holdings import Claim, Share
from isobatch.deployments.transport.orders import Departed, Failed, NumberedOrder, NumberedReply, Order, Stayed
from isobatch.deployments.transport.packed import Packed, pack
from isobatch.profiles.model import Batch, Exits, OpenRamps
from tests.helpers.travelling_batches import batches, same

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
    said = [Departed(exits, 0.25), *stayed, Failed("why", True)]
    ear = Ear()
    ear.hear(b"".join(bytes_of_frame(NumberedReply(n, reply)) for n, reply in enumerate(said)), sizes)
    departed, by_value, held, nobody, failed = ear.replies
    assert isinstance(departed, Departed)
    for name, sent in vars(exits).items():
        np.testing.assert_array_equal(getattr(departed.exits, name), sent)
    assert isinstance(by_value, Stayed)
    assert same(by_value.survivors, said[1].survivors)  # type: ignore[arg-type, union-attr]
    assert isinstance(held, Stayed)
    assert (held.survivors, held.rows.tolist(), held.computed_s) == (HELD, rows.tolist(), 0.5)
    assert isinstance(nobody, Stayed)
    assert (nobody.survivors, len(nobody.rows), failed) == (None, 0, said[4])
