"""A replica of a split: run a batch from its cursor to the split's end, and let go of whoever is sure on the way."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from deployments.dispatch.route import stops
from deployments.wire import Integers, Packed, pack, unpack
from profiles.model import Exits, SplitModel


@dataclass(frozen=True)
class Order:
    """What a call carries: a replica holds no plan. `ramps` are the active ramps of the whole network."""

    stop: int
    ramps: frozenset[int]
    parts: tuple[Packed, ...]

    @property
    def is_straight(self) -> bool:
        """Nobody leaves before the end."""
        return len(stops(self.parts[0].cursor, self.stop, self.ramps)) == 1


@dataclass(frozen=True)
class Departed:
    """Who left, with their rows in the order's batch; sent as soon as it is known."""

    exits: Exits
    computed_s: float


@dataclass(frozen=True)
class Stayed:
    """The end of a launch: who is still inside (None: nobody), and which rows of the order's batch they were."""

    survivors: Packed | None
    rows: Integers
    computed_s: float


class SplitReplica:
    """One model on one device. A plain class: whoever calls it decides what it is wrapped in."""

    def __init__(self, model: SplitModel) -> None:
        self._model = model

    def run(self, order: Order) -> Iterator[Departed | Stayed]:
        """Yield who left at each active ramp at once, and at last who stayed."""
        started_s = time.perf_counter()
        batch = unpack(order.parts)
        rows, ahead = np.arange(len(batch)), batch
        for stop in stops(batch.cursor, order.stop, order.ramps):
            launched = self._model.run(ahead, stop, order.ramps)
            if len(launched.exits):
                left = replace(launched.exits, rows=rows[launched.exits.rows])
                yield Departed(left, time.perf_counter() - started_s)
            rows = np.delete(rows, launched.exits.rows)
            if launched.survivors is None:
                break
            ahead = launched.survivors
        staying = pack(ahead) if len(rows) else None
        yield Stayed(staying, rows, time.perf_counter() - started_s)
