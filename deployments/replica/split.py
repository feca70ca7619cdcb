"""Runs an order on a replica: a batch runs from its cursor to the stop, and inputs leave at ramps on the way."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace as replace_fields
from numpy.typing import NDArray

from isobatch.deployments.dispatch.messages import RowKind
from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.transport.holdings import Claim, Holdings, Share
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.packed import Packed, begin_packing, joined, pack, unpack, unpack_on
from isobatch.profiles.model import Batch, Exits, Launched, SplitModel

if TYPE_CHECKING:
    import torch

Kinds = NDArray[np.uint8]


class SplitReplica:
    """One network on one device, without Ray and threads.

    Replicas of one process may share `holdings`: each can then use survivors of another that are still on the device.
    """

    def __init__(self, model: SplitModel, holdings: Holdings | None = None) -> None:
        self._model = model
        self.holdings = Holdings() if holdings is None else holdings
        # Survivors are copied while other launches compute. ONNX Runtime records graphs in a mode in which calls of
        # CUDA by other threads fail.
        self.gpu: torch.device | None = None
        if isinstance(model, ServedModel) and model.device.type == "cuda" and model.backend != "onnx-graphs":
            self.gpu = model.device

    def uploaded(self, order: Order) -> tuple[Order, list[str]]:
        """The order with its parts on the GPU, which may compute another launch, and the keys under which they are
        held there. The caller drops these when the launch ends."""
        assert self.gpu, "This is a bug: a CPU reads parts where they are."
        parts, keys = list[Packed | Share](), list[str]()
        try:
            for part in joined(order.parts):
                if isinstance(part, Packed):
                    claim = self.holdings.hold(unpack_on(self.gpu, [part]), order.hold_s)
                    keys.append(claim.key)
                    part = Share(claim, np.arange(len(part)))
                parts.append(part)
        except Exception:  # such as a GPU without memory for the next part: the earlier ones must not stay there
            self.holdings.drop(keys)
            raise
        return replace_fields(order, parts=tuple(parts)), keys

    def run(self, order: Order) -> Iterator[Departed | Stayed]:
        """Yield the inputs that leave at each active ramp as soon as they are known, and finally the survivors.

        A launch ends when all inputs left in it are shadows of answered inputs, unless it began with shadows or with
        inputs that are answered early.
        """
        started_s = time.perf_counter()
        batch = self._joined(order.parts)
        # The kind of each input, which may be changed; None: all are plain.
        kinds = np.frombuffer(order.kinds, np.uint8).copy() if any(order.kinds) else None
        rows = np.arange(len(batch))
        runs_shadows = RowKind.SHADOW in order.kinds or RowKind.EARLY in order.kinds
        for stop in stops(batch.cursor, order.stop, order.ramps):
            if kinds is not None and not runs_shadows and len(rows) and (kinds[rows] == RowKind.SHADOW).all():
                break
            launched = self._run(batch, stop, order.ramps, None if kinds is None else kinds[rows])
            if left := launched.exits:
                reported, leaving = replace(left, rows=rows[left.rows]), left.rows
                if kinds is not None and stop < self._model.num_blocks:
                    reported, leaves = self._reported(reported, kinds)
                    leaving = leaving[leaves]
                staying = np.ones(len(rows), bool)
                staying[leaving] = False
                rows = rows[staying]
                if reported:
                    yield Departed(reported, time.perf_counter() - started_s)
            if launched.survivors is None:
                break
            batch = launched.survivors
        survivors = self._survivors(batch, order) if len(rows) else None
        stopped = batch.cursor if len(rows) and batch.cursor != order.stop else None
        yield Stayed(survivors, rows, time.perf_counter() - started_s, stopped)

    def _run(self, batch: Batch, stop: int, ramps: Collection[int], kinds: Kinds | None) -> Launched:
        """Name the inputs to be kept only if there are any, so that networks without audits need no such parameter."""
        if kinds is not None and len(keep := np.flatnonzero(kinds)):
            return self._model.run(batch, stop, ramps, keep)
        return self._model.run(batch, stop, ramps)

    @staticmethod
    def _reported(exits: Exits, kinds: Kinds) -> tuple[Exits, NDArray[np.bool_]]:
        """The exits at a ramp that the front must know, and which of all exits leave. An input that is answered and
        stays becomes a shadow."""
        row_kinds = kinds[exits.rows]
        answered = (row_kinds == RowKind.AUDITED) | (row_kinds == RowKind.EARLY)
        plain = row_kinds == RowKind.PLAIN
        kinds[exits.rows[answered]] = RowKind.SHADOW
        return exits.at(np.flatnonzero(plain | answered)), plain

    def _joined(self, parts: Sequence[Packed | Share]) -> Batch:
        """The inputs of all parts in one batch. The parts are freed when this returns."""
        states = [self._state(part) if isinstance(part, Share) else part for part in parts]
        batches = [unpack([state]) if isinstance(state, Packed) else state for state in joined(states)]
        return batches[0] if len(batches) == 1 else self._model.merge(batches)

    def _state(self, share: Share) -> Batch | Packed:
        state = self.holdings.get(share.claim.key)
        if not isinstance(state, Batch):
            return self.holdings.packed(share.claim.key, share.rows)
        return state if share.is_complete else self._model.select(state, share.rows)

    def _survivors(self, survivors: Batch, order: Order) -> Packed | Claim:
        if order.keep:
            return self.holdings.hold(survivors, order.hold_s)
        packing = begin_packing(survivors) if self.gpu else pack(survivors)
        if packing.size_bytes > order.by_value_bytes:
            return self.holdings.hold(packing, order.hold_s)
        return pack(packing)
