"""An order and what comes back of it, as frames: what is small stands in the description, arrays follow it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from deployments.replicas.frames import buffers, bytes_of, describe, empty, form_of, room_for
from deployments.replicas.holdings import Held, LostError, Share
from deployments.replicas.split import Departed, Order, Stayed
from deployments.replicas.wire import Integers, Packed
from profiles.model import Exits

Frame = tuple[dict[str, Any], Iterable[memoryview]]  # a description, and the bytes that follow it


@dataclass(frozen=True)
class Failed:
    """The launch has failed: why, and whether something was lost that it needed."""

    reason: str
    is_loss: bool

    @property
    def error(self) -> Exception:
        return LostError(self.reason) if self.is_loss else LaunchError(self.reason)


class LaunchError(RuntimeError):
    """What went wrong at a replica; its log says where."""


Reply = Departed | Stayed | Failed


def frame_of_order(number: int, order: Order) -> Frame:
    described = {
        "run": number,
        "stop": order.stop,
        "ramps": sorted(order.ramps),
        "parts": [_share(part) if isinstance(part, Share) else describe(part) for part in order.parts],
        "keep": order.keep,
        "by_value_bytes": order.by_value_bytes,
        "hold_s": order.hold_s,
    }
    return described, rooms_of(order.parts)


def order_of(described: dict[str, Any]) -> Order:
    """Its packed parts are still to be filled."""
    return Order(
        described["stop"],
        frozenset(described["ramps"]),
        tuple(_share_of(part) if "held" in part else room_for(part) for part in described["parts"]),
        described["keep"],
        described["by_value_bytes"],
        described["hold_s"],
    )


def rooms_of(parts: Iterable[object]) -> Iterator[memoryview]:
    """The bytes of those that come along."""
    return chain.from_iterable(buffers(part) for part in parts if isinstance(part, Packed))


def frame_of_reply(number: int, reply: Reply) -> Frame:
    match reply:
        case Departed(exits, computed_s):
            described = {"rows": exits.rows.tolist(), "blocks": exits.blocks.tolist(), "logits": form_of(exits.logits)}
            return described | {"to": number, "computed_s": computed_s}, bytes_of(exits.logits)
        case Stayed(survivors, rows, computed_s):
            staying = _claim(survivors) if isinstance(survivors, Held) else survivors and describe(survivors)
            described = {"to": number, "staying": staying, "rows": rows.tolist(), "computed_s": computed_s}
            return described, rooms_of([survivors])
        case Failed(reason, is_loss):
            return {"to": number, "failed": reason, "is_loss": is_loss}, ()


def reply_of(described: dict[str, Any]) -> tuple[Reply, Iterable[memoryview]]:
    """What was said, and the rooms of it that are still to be filled."""
    if "failed" in described:
        return Failed(described["failed"], described["is_loss"]), ()
    rows, computed_s = _integers(described["rows"]), described["computed_s"]
    if "logits" in described:
        logits = empty(described["logits"])
        return Departed(Exits(rows, _integers(described["blocks"]), logits), computed_s), bytes_of(logits)
    staying = described["staying"]
    survivors = Held(*staying["held"]) if staying and "held" in staying else staying and room_for(staying)
    return Stayed(survivors, rows, computed_s), rooms_of([survivors])


def _claim(held: Held) -> dict[str, Any]:
    return {"held": [held.cursor, held.address, held.key, held.count, held.size_bytes]}


def _share(share: Share) -> dict[str, Any]:
    return _claim(share.held) | {"rows": share.rows.tolist()}


def _share_of(described: dict[str, Any]) -> Share:
    return Share(Held(*described["held"]), _integers(described["rows"]))


def _integers(numbers: list[int]) -> Integers:
    return np.array(numbers, np.int64)
