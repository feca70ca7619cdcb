"""An order to a replica and its replies, and the messages for them."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deployments.transport.frames import ArrayForm, Message, PackedForm, buffers, bytes_of
from deployments.transport.holdings import Claim, LostError, Share
from deployments.transport.packed import Integers, Packed
from profiles.model import Exits, OpenRamps


@dataclass(frozen=True)
class Order:
    """Everything that a replica, which has no plan, must know for a launch: it runs these parts up to block `stop`.

    `ramps` are the active ramps of the whole network. With `keep`, survivors stay on the device. Otherwise they are
    sent back, or stay in the replica's host memory if they exceed `by_value_bytes`. They are held for `hold_s` at most.

    `kinds` has a `RowKind` for each input; empty: all are plain. `trace` is the launch's OpenTelemetry span.
    """

    stop: int
    ramps: OpenRamps
    parts: tuple[Packed | Share, ...]
    keep: bool = False
    by_value_bytes: int = sys.maxsize
    hold_s: float = 60.0
    kinds: bytes = b""
    trace: str = ""


@dataclass(frozen=True)
class Departed:
    """The inputs that left, with their rows in the order's batch; sent as soon as they are known.

    `stays`: the inputs have not left. They have reached the end of a level of a cascade, and these would be their
    answers if they went no further.
    """

    exits: Exits
    computed_s: float
    stays: bool = False


@dataclass(frozen=True)
class Stayed:
    """The end of a launch: the survivors (None: there are none), and their rows in the order's batch.

    They stand before block `stop`; None: the order's stop.
    """

    survivors: Packed | Claim | None
    rows: Integers
    computed_s: float
    stop: int | None = None


@dataclass(frozen=True)
class Failed:
    """The launch has failed for this reason. `is_loss`: survivors that it needed are lost."""

    reason: str
    is_loss: bool

    @property
    def error(self) -> Exception:
        return LostError(self.reason) if self.is_loss else LaunchError(self.reason)


class LaunchError(RuntimeError):
    """A launch failed at a replica. The replica's log has the traceback."""


Reply = Departed | Stayed | Failed


# Each message has the fields of its class above, with array forms instead of arrays.


class ShareForm(Message, frozen=True):
    claim: Claim
    rows: list[int]


class OrderForm(Message, frozen=True):
    number: int  # its replies carry the same number
    stop: int
    ramps: frozenset[int] | dict[int, float | None]
    parts: tuple[PackedForm | ShareForm, ...]
    keep: bool
    by_value_bytes: int
    hold_s: float
    kinds: bytes
    trace: str = ""


class DepartedForm(Message, frozen=True):
    number: int
    rows: list[int]
    blocks: list[int]
    logits: ArrayForm
    computed_s: float
    stays: bool = False
    counts: list[int] | None = None


class StayedForm(Message, frozen=True):
    number: int
    survivors: PackedForm | Claim | None
    rows: list[int]
    computed_s: float
    stop: int | None


class FailedForm(Message, frozen=True):
    number: int
    reason: str
    is_loss: bool


ReplyForm = DepartedForm | StayedForm | FailedForm


def message_of_order(number: int, order: Order) -> tuple[OrderForm, Iterable[memoryview]]:
    """The message of an order, and the bytes that follow it."""
    parts = tuple(
        ShareForm(part.claim, part.rows.tolist()) if isinstance(part, Share) else PackedForm.of(part)
        for part in order.parts
    )
    ramps = order.ramps if isinstance(order.ramps, frozenset) else dict(order.ramps)
    unchanged = order.keep, order.by_value_bytes, order.hold_s, order.kinds, order.trace
    return OrderForm(number, order.stop, ramps, parts, *unchanged), buffers(order.parts)


def order_of(form: OrderForm) -> Order:
    """The order of a message; the `buffers` of its parts are still to be filled."""
    parts = tuple(
        Share(part.claim, _integers(part.rows)) if isinstance(part, ShareForm) else part.allocate()
        for part in form.parts
    )
    return Order(form.stop, form.ramps, parts, form.keep, form.by_value_bytes, form.hold_s, form.kinds, form.trace)


def message_of_reply(number: int, reply: Reply) -> tuple[ReplyForm, Iterable[memoryview]]:
    match reply:
        case Departed(exits, computed_s, stays):
            rows, blocks = exits.rows.tolist(), exits.blocks.tolist()
            counts = None if exits.counts is None else exits.counts.tolist()
            form = DepartedForm(number, rows, blocks, ArrayForm.of(exits.logits), computed_s, stays, counts)
            return form, bytes_of(exits.logits)
        case Stayed(survivors, rows, computed_s, stop):
            staying = PackedForm.of(survivors) if isinstance(survivors, Packed) else survivors
            return StayedForm(number, staying, rows.tolist(), computed_s, stop), buffers([survivors])
        case Failed(reason, is_loss):
            return FailedForm(number, reason, is_loss), ()


def reply_of(form: ReplyForm) -> tuple[Reply, Iterable[memoryview]]:
    """The reply of a message, and its buffers, which are still to be filled."""
    match form:
        case DepartedForm(_, rows, blocks, logits, computed_s, stays, counts):
            counted = None if counts is None else _integers(counts)
            exits = Exits(_integers(rows), _integers(blocks), logits.allocate(), counted)
            return Departed(exits, computed_s, stays), bytes_of(exits.logits)
        case StayedForm(_, staying, rows, computed_s, stop):
            survivors = staying.allocate() if isinstance(staying, PackedForm) else staying
            return Stayed(survivors, _integers(rows), computed_s, stop), buffers([survivors])
        case FailedForm(_, reason, is_loss):
            return Failed(reason, is_loss), ()


def _integers(numbers: list[int]) -> Integers:
    return np.array(numbers, np.int64)
