"""Runs an order on a replica: a batch goes from its cursor to the stop, and inputs leave on the way."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deployments.dispatch.messages import RowKind
from deployments.dispatch.route import stops
from deployments.transport.holdings import Held, Holdings, Share, State
from deployments.transport.orders import Departed, Order, Stayed
from deployments.transport.packed import Integers, Packed, pack, take, unpack
from profiles.model import Batch, Exits, Launched, SplitModel

Kinds = NDArray[np.uint8]


class SplitReplica:
    """One network on one device, as a plain class without Ray and threads.

    Replicas of one process may share `holdings`: then each can use on the device what another holds.
    """

    def __init__(self, model: SplitModel, holdings: Holdings | None = None) -> None:
        self._model = model
        self.holdings = Holdings() if holdings is None else holdings

    def run(self, order: Order) -> Iterator[Departed | Stayed]:
        """Yield the inputs that leave at each active ramp as soon as they are known, and finally those that stay.

        When only shadows of its inputs are left, the launch ends, as it would without them; where answers are early, it
        goes on. At the edge of a cascade it is told first what is known so far of those who stay.
        """
        started_s = time.perf_counter()
        ahead = self._joined(order.parts)
        rows, kinds = np.arange(len(ahead)), _kinds(order, len(ahead))
        goes_on = not {RowKind.SHADOW, RowKind.EARLY}.isdisjoint(kinds.tolist())
        for stop in stops(ahead.cursor, order.stop, order.ramps):
            if not goes_on and len(rows) and (kinds[rows] == RowKind.SHADOW).all():
                break
            launched = self._run(ahead, stop, order.ramps, np.flatnonzero(kinds[rows]))
            left = launched.exits
            if len(left):
                exits = replace(left, rows=rows[left.rows])
                told, gone = self._told(exits, kinds, at_end=stop == self._model.num_blocks)
                rows = _without(rows, np.searchsorted(rows, gone))
                if len(told):
                    yield Departed(told, time.perf_counter() - started_s)
            if launched.survivors is None:
                break
            ahead = launched.survivors
            if known := launched.meanwhile:
                so_far = replace(known, rows=rows)
                yield Departed(so_far, time.perf_counter() - started_s, stays=True)
        staying = self._staying(ahead, order) if len(rows) else None
        stopped = ahead.cursor if len(rows) and ahead.cursor != order.stop else None
        yield Stayed(staying, rows, time.perf_counter() - started_s, stopped)

    def _run(self, batch: Batch, stop: int, ramps: Collection[int], kept: Integers) -> Launched:
        """Ask a network to keep inputs only where there are some: one that cannot need not know of it."""
        if len(kept):
            return self._model.run(batch, stop, ramps, kept)
        return self._model.run(batch, stop, ramps)

    @staticmethod
    def _told(exits: Exits, kinds: Kinds, at_end: bool) -> tuple[Exits, Integers]:
        """The exits that the front hears of, and the rows that go. Who is answered and stays is a shadow by then."""
        found = kinds[exits.rows]
        if at_end or not found.any():
            return exits, exits.rows
        answered = (found == RowKind.AUDITED) | (found == RowKind.EARLY)
        heard = (found == RowKind.PLAIN) | answered
        kinds[exits.rows[answered]] = RowKind.SHADOW
        return exits.at(np.flatnonzero(heard)), exits.rows[found == RowKind.PLAIN]

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


def _kinds(order: Order, size: int) -> Kinds:
    return np.frombuffer(order.kinds or bytes(size), np.uint8).copy()


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
