"""A network small enough to be checked by eye: a SplitModel in numpy, named by import path where one is asked for."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.errors import UserError
from isobatch.profiles.model import NOBODY, Batch, Exits, Launched

BLOCKS = 4
RAMPS = (0, 2)
OVERFLOWS = -1000


class Toy:
    """An input is [where to leave, label]: it leaves at the first active ramp at or after that block, with that label.

    A label of -1 makes the network fail, a block of `OVERFLOWS` makes it say nothing finite; `pause_s` is what a block
    takes.
    """

    num_blocks = BLOCKS
    num_labels = 10
    ramp_blocks = RAMPS

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.sizes: list[int] = []  # of every launch, in order

    def encode(self, inputs: Sequence[Any]) -> Batch:
        inputs = [one.tolist() if isinstance(one, np.ndarray) else one for one in inputs]
        for position, one in enumerate(inputs):
            if not (isinstance(one, list) and len(one) == 2 and all(isinstance(x, int) for x in one)):
                raise UserError(f"input {position} is {one!r}: it must be [block, label]")
        pairs = np.array(inputs)
        return Batch(0, {"block": pairs[:, 0], "label": pairs[:, 1]}, np.zeros(len(pairs)))

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        self.sizes.append(len(batch))
        if self.pause_s:  # even no time takes some
            time.sleep(self.pause_s * (stop - batch.cursor))
        if (batch.arrays["label"] < 0).any():
            raise RuntimeError("a label of -1 breaks the toy")
        last = stop - 1
        leaves = (batch.arrays["block"] <= last) if last in ramps else np.zeros(len(batch), bool)
        leaves = np.ones(len(batch), bool) if stop == BLOCKS else leaves
        stays = ~leaves
        stays[kept] = stop < BLOCKS
        rows, stay = np.flatnonzero(leaves), np.flatnonzero(stays)
        logits = 3 * np.eye(self.num_labels, dtype=np.float32)[batch.arrays["label"][rows]]
        logits[batch.arrays["block"][rows] == OVERFLOWS] = np.nan
        ahead = self.select(batch, stay) if len(stay) else None
        survivors = Batch(stop, ahead.arrays, ahead.memory) if ahead else None
        return Launched(Exits(rows, np.full(len(rows), last), logits), survivors)

    def merge(self, batches: Sequence[Batch]) -> Batch:
        arrays = {name: np.concatenate([b.arrays[name] for b in batches]) for name in batches[0].arrays}
        return Batch(batches[0].cursor, arrays, np.concatenate([b.memory for b in batches]))

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return Batch(batch.cursor, {name: a[rows] for name, a in batch.arrays.items()}, batch.memory[rows])


class ReadsTexts(Toy):
    """The same for texts such as "3 1": all that follows the second word is cut off."""

    reads_text = True

    def encode(self, inputs: Sequence[Any]) -> Batch:
        words = [one.split() for one in inputs]
        batch = super().encode([list(map(int, each[:2])) for each in words])
        cut = frozenset(position for position, each in enumerate(words) if len(each) > 2)
        return replace(batch, truncated=cut)


class Retrained(Toy):
    """Inputs with the label 8 get 9."""

    def encode(self, inputs: Sequence[Any]) -> Batch:
        batch = super().encode(inputs)
        batch.arrays["label"] += batch.arrays["label"] == 8
        return batch


def left_at(block: int, ramps: Collection[int] = RAMPS) -> int:
    """The block at which an input that wants to leave at `block` does leave."""
    return next((ramp for ramp in sorted(ramps) if ramp >= block), BLOCKS - 1)


def loader(make: Callable[[], Toy]) -> Callable[[str | Path, str, str], Toy]:
    return lambda directory, device, dtype: make()


load, load_texts, load_retrained = loader(Toy), loader(ReadsTexts), loader(Retrained)
load_leisurely, load_endless = loader(partial(Toy, pause_s=0.1)), loader(partial(Toy, pause_s=60.0))


def load_at_the_front_only(directory: str | Path, device: str, dtype: str) -> Toy:
    """What a front does when only the replicas of splits lack something."""
    from ray import serve

    if serve.get_replica_context().deployment == "split":
        raise UserError(f"{directory}: no weights here")
    return Toy()
