"""Runs an order on a replica: a batch goes from its cursor to the stop, and inputs leave on the way."""

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from deployments.dispatch.route import stops
from deployments.transport.holdings import Held, Holdings, Share, State
from deployments.transport.orders import Departed, Order, Stayed
from deployments.transport.packed import Integers, Packed, pack, take, unpack
from profiles.model import Batch, Exits, SplitModel


class SplitReplica:
    """One network on one device, as a plain class without Ray and threads.

    Replicas of one process may share `holdings`: then each can use on the device what another holds.
    """

    def __init__(self, model: SplitModel, holdings: Holdings | None = None) -> None:
        self._model = model
        self.holdings = Holdings() if holdings is None else holdings

    def run(self, order: Order) -> Iterator[Departed | Stayed]:
        """Yield the inputs that leave at each active ramp as soon as they are known, and finally those that stay."""
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
    """Batches of all states: neighbours in host memory are joined there first; a batch on the device stays there."""
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
