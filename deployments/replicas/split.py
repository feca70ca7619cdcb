"""A replica of a split: run a batch from its cursor to the split's end, and let go of whoever is sure on the way."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.dispatch.route import stops
from deployments.replicas.holdings import Held, Holdings, Share, State
from deployments.replicas.wire import Integers, Packed, pack, take, unpack
from profiles.model import Batch, Exits, SplitModel


@dataclass(frozen=True)
class Order:
    """What a call carries: a replica holds no plan. `ramps` are the active ramps of the whole network.

    Survivors stay on the device if they are to be kept, or in the replica's host memory if they are too large to come
    back by value; they are held for `hold_s` at most.
    """

    stop: int
    ramps: frozenset[int]
    parts: tuple[Packed | Share, ...]
    keep: bool = False
    by_value_bytes: int = sys.maxsize
    hold_s: float = 60.0


@dataclass(frozen=True)
class Departed:
    """Who left, with their rows in the order's batch; sent as soon as it is known."""

    exits: Exits
    computed_s: float


@dataclass(frozen=True)
class Stayed:
    """The end of a launch: who is still inside (None: nobody), and which rows of the order's batch they were."""

    survivors: Packed | Held | None
    rows: Integers
    computed_s: float


class SplitReplica:
    """One model on one device. A plain class: whoever calls it decides what it is wrapped in.

    `holdings` may be shared by all replicas of a process: each can use what another holds.
    """

    def __init__(self, model: SplitModel, holdings: Holdings | None = None) -> None:
        self._model = model
        self.holdings = Holdings() if holdings is None else holdings

    def run(self, order: Order) -> Iterator[Departed | Stayed]:
        """Yield who left at each active ramp at once, and at last who stayed."""
        started_s = time.perf_counter()
        ahead = self._joined(order.parts)
        rows = np.arange(len(ahead))
        for stop in stops(ahead.cursor, order.stop, order.ramps):
            launched = self._model.run(ahead, stop, order.ramps)
            if len(left := launched.exits):
                exits = Exits(rows[left.rows], left.blocks, left.logits)
                rows = _without(rows, left.rows)
                yield Departed(exits, time.perf_counter() - started_s)
            if launched.survivors is None:
                break
            ahead = launched.survivors
        staying = self._staying(ahead, order) if len(rows) else None
        yield Stayed(staying, rows, time.perf_counter() - started_s)

    def _joined(self, parts: Sequence[Packed | Share]) -> Batch:
        """One batch of all parts, in order."""
        batches = list(_unpacked([self._state(part) if isinstance(part, Share) else part for part in parts]))
        return batches[0] if len(batches) == 1 else self._model.merge(batches)

    def _state(self, share: Share) -> State:
        state = self.holdings.get(share.held.key)
        if isinstance(state, Packed):
            return take(state, share.rows)
        return state if share.is_whole else self._model.select(state, share.rows)

    def _staying(self, survivors: Batch, order: Order) -> Packed | Held:
        if order.keep:
            return self.holdings.hold(survivors, order.hold_s)
        packed = pack(survivors)
        return packed if packed.size_bytes <= order.by_value_bytes else self.holdings.hold(packed, order.hold_s)


def _without(rows: Integers, gone: Integers) -> Integers:
    staying = np.ones(len(rows), bool)
    staying[gone] = False
    return rows[staying]


def _unpacked(states: Iterable[State]) -> Iterator[Batch]:
    """Neighbours in host memory are joined there, as one; what is on the device stays on it."""
    packed: list[Packed] = []
    for state in states:
        if isinstance(state, Packed):
            packed.append(state)
            continue
        if packed:
            yield unpack(packed)
            packed = []
        yield state
    if packed:
        yield unpack(packed)
