"""The messages between a front and a replica: an order and its replies."""

import sys

from isobatch.deployments.transport.connection import Message
from isobatch.deployments.transport.holdings import Claim, LostError, Share
from isobatch.deployments.transport.packed import Integers, Packed
from isobatch.profiles.model import Exits, OpenRamps


class Order(Message, frozen=True):
    """All facts of a launch for a replica, which has no plan: it runs these parts up to block `stop`.

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


class Departed(Message, frozen=True):
    """The inputs that left, with their rows in the order's batch; sent as soon as they are known."""

    exits: Exits
    computed_s: float


class Stayed(Message, frozen=True):
    """The end of a launch: the survivors (None: there are none), and their rows in the order's batch.

    They run block `stop` next; None: the order's stop.
    """

    survivors: Packed | Claim | None
    rows: Integers
    computed_s: float
    stop: int | None = None


class Failed(Message, frozen=True):
    """The launch has failed for this reason. `is_loss`: survivors that it needed are lost."""

    reason: str
    is_loss: bool

    @property
    def error(self) -> Exception:
        return LostError(self.reason) if self.is_loss else LaunchError(self.reason)


class LaunchError(RuntimeError):
    """A launch failed at a replica. The replica's log has the traceback."""


class NumberedOrder(Message, frozen=True):
    number: int  # its replies carry the same number
    order: Order


class NumberedReply(Message, frozen=True):
    number: int
    reply: Departed | Stayed | Failed
