"""A cascade: several networks for the same labels as one, from the smallest to the largest. Each of them is a *level*.

Its blocks are the blocks of all levels, one after another. The head of a level is the ramp behind its last block: whom
the policy lets go there has an answer. All others pass the *edge*: they begin again in the next level, from their own
text, which travels with them as that level reads it (`Batch.ahead`). What the levels before believe travels too, as
log-probabilities (`Batch.memory`), and has a share in the next level's answer:

    p = weight * (what this level says) + (1 - weight) * (what those before say)
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.models import batches
from deployments.models.encode import Encoder
from deployments.models.interface import BackedModel, BlockRange
from deployments.models.predict import Predicted, predict
from deployments.models.ramps import Ramps
from profiles.model import NOBODY, Batch, Exits, Launched

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Put = Callable[[BackedModel, Path], BackedModel]


@dataclass(frozen=True)
class Level:
    """One network of a cascade: its blocks are `start .. stop - 1` there.

    It is loaded when it is first used, so that a front, which only encodes, holds no weights, and a replica those of
    the levels that it runs. Its head must be calibrated. `order[i]` is its own number for the cascade's label i.
    """

    start: int
    stop: int
    weight: float
    encoder: Encoder
    order: tuple[int, ...]
    folder: Path
    load: Callable[[], BackedModel]

    @cached_property
    def model(self) -> BackedModel:
        return self.load()

    @property
    def is_loaded(self) -> bool:
        return "model" in vars(self)

    def local(self, ramps: Collection[int]) -> list[int]:
        """Those of the cascade's ramps that stand inside this level, as its network numbers them."""
        return [ramp - self.start for ramp in ramps if self.start <= ramp < self.stop - 1]

    def part(self, stretch: BlockRange) -> BlockRange | None:
        """What this level runs of a stretch of the cascade."""
        start, stop = max(stretch.start, self.start), min(stretch.stop, self.stop)
        if start >= stop:
            return None
        inside = (ramp for ramp in self.local(stretch.ramps) if start <= ramp + self.start < stop)
        return BlockRange(start - self.start, stop - self.start, tuple(inside))

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: Rows) -> Launched:
        """Run blocks of this level alone, with blocks and labels as the cascade numbers them."""
        inside = replace(batch, cursor=batch.cursor - self.start, memory=_nothing(len(batch)), ahead=None)
        local: Collection[int] = self.local(ramps)
        if isinstance(ramps, Mapping):
            local = {ramp: ramps[ramp + self.start] for ramp in local}
        launched = self.model.run(inside, stop - self.start, local, kept)
        exits = launched.exits
        told = Exits(exits.rows, exits.blocks + self.start, exits.logits[:, list(self.order)])
        return Launched(told, launched.survivors)


class Cascade:
    """A SplitModel of several levels. `ramps` are the rules of all of it: its levels hold the weights."""

    exports = True  # levels that a plan wants here are better loaded before anybody waits for them

    def __init__(
        self,
        levels: Sequence[Level],
        ramps: Ramps,
        labels: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        backend: str = "torch",
    ) -> None:
        self.levels = tuple(levels)
        self.ramps = ramps
        self.labels = tuple(labels)
        self.device, self.dtype = device, dtype
        self._backend = backend  # as it was asked for

    def predict(self, inputs: Sequence[Any], exits: bool = True) -> list[Predicted]:
        """The answers in the order of the inputs, as they are served; without `exits` all run to the last block."""
        return predict(self, inputs, exits)

    @property
    def backend(self) -> str:
        """Of the levels that are loaded; until one is, what was asked for."""
        loaded = [level.model.backend for level in self.levels if level.is_loaded]
        return loaded[-1] if loaded else self._backend

    @property
    def num_blocks(self) -> int:
        return self.levels[-1].stop

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def edges(self) -> tuple[int, ...]:
        """The blocks at which a level begins behind another."""
        return tuple(level.start for level in self.levels[1:])

    @property
    def ramp_blocks(self) -> tuple[int, ...]:
        return self.ramps.blocks

    @property
    def reads_text(self) -> bool:
        return self.levels[0].encoder.longest is not None

    @property
    def exact(self) -> "Cascade":
        return self._with(lambda level: level.model.exact)

    def twin(self) -> "Cascade":
        """Levels are loaded once: twins share their weights."""
        return self._with(lambda level: level.model.twin())

    def on_backend(self, backend: str, put: Put) -> "Cascade":
        """The same with every level as `put` makes it of its network and of the folder that this came from."""
        return self._with(lambda level: put(level.load(), level.folder), backend)

    def _with(self, load: Callable[[Level], BackedModel], backend: str | None = None) -> "Cascade":
        levels = [replace(level, load=partial(load, level)) for level in self.levels]
        return Cascade(levels, self.ramps, self.labels, self.device, self.dtype, backend or self._backend)

    def prepare(self, stretches: Iterable[BlockRange], example: Batch) -> None:
        """Load and prepare the levels that these stretches run through. The example stands before block 0."""
        wanted = list(stretches)
        for level, here in zip(self.levels, _each_level(example), strict=True):
            if parts := [part for stretch in wanted if (part := level.part(stretch))]:
                level.model.prepare(parts, replace(here, cursor=0, ahead=None))

    def encode(self, inputs: Sequence[Any]) -> Batch:
        """The inputs as every level reads them. Levels with one and the same encoder share what it gives."""
        encoders = {id(level.encoder): level.encoder for level in self.levels}
        encoded = {key: encoder(inputs) for key, encoder in encoders.items()}
        truncated = frozenset[int]().union(*(each.truncated for each in encoded.values()))
        batch: Batch | None = None
        for level in reversed(self.levels):
            own = encoded[id(level.encoder)]
            batch = Batch(level.start, own.arrays, _nothing(len(inputs)), own.lengths, truncated, ahead=batch)
        assert batch is not None, "This is a bug: a cascade has levels."
        return batch

    @torch.inference_mode()
    def merge(self, parts: Sequence[Batch]) -> Batch:
        return self._level_at(parts[0].cursor).model.merge(parts)

    @torch.inference_mode()
    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return batches.select(batch, rows)

    @torch.inference_mode()
    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: Rows = NOBODY) -> Launched:
        self._check(batch, stop, ramps)
        level = self._level_at(batch.cursor)
        end = min(stop, level.stop)
        inside = [ramp for ramp in ramps if batch.cursor <= ramp < end - 1]
        if len(kept) and inside:  # or what the level's head says would hide an exit before, though it lets nobody go
            end = max(inside) + 1
        launched = self._within(level, batch, end, ramps, kept)
        if stop <= end or launched.survivors is None:
            return launched
        staying = _staying(len(batch), launched.exits, kept)
        deeper = self.run(launched.survivors, stop, ramps, np.flatnonzero(np.isin(staying, kept)))
        return _one_after_another(launched.exits, staying, deeper)

    def _within(self, level: Level, batch: Batch, stop: int, ramps: Collection[int], kept: Rows) -> Launched:
        """Run blocks of one level; at its end, whom its head does not answer stands at the edge."""
        launched = level.run(batch, stop, ramps, kept)
        if stop == level.stop:
            return self._at_the_end(level, batch, launched.exits, ramps, kept)
        if launched.survivors is None:
            return launched
        staying = _staying(len(batch), launched.exits, kept)
        memory = torch.as_tensor(batch.memory)[torch.from_numpy(staying)]
        ahead = batches.select(batch.ahead, staying) if batch.ahead else None
        return Launched(launched.exits, replace(launched.survivors, cursor=stop, memory=memory, ahead=ahead))

    def _at_the_end(self, level: Level, batch: Batch, exits: Exits, ramps: Collection[int], kept: Rows) -> Launched:
        last = level.stop - 1
        ended = np.flatnonzero(exits.blocks == last)
        believed = _mixed(level, exits.logits[ended], batch.memory, exits.rows[ended])
        logits = exits.logits.copy()
        if batch.ahead is None:
            logits[ended] = believed
            return Launched(replace(exits, logits=logits), None)
        threshold = ramps.get(last) if isinstance(ramps, Mapping) else None
        decision = self.ramps.decide(last, torch.from_numpy(believed), torch.zeros(len(ended), 0), threshold)
        logits[ended] = decision.answer.numpy()
        leaves = decision.leaves.numpy() & (last in ramps)
        goes_on = ~leaves | np.isin(exits.rows[ended], kept)
        left = np.delete(np.arange(len(exits)), ended[~leaves])
        told = Exits(exits.rows[left], exits.blocks[left], logits[left])
        if not goes_on.any():
            return Launched(told, None)
        staying = ended[goes_on]
        meanwhile = Exits(exits.rows[staying], exits.blocks[staying], logits[staying])
        ahead = batches.select(batch.ahead, meanwhile.rows)
        return Launched(told, replace(ahead, memory=believed[goes_on]), meanwhile)

    def _level_at(self, block: int) -> Level:
        return next(level for level in self.levels if level.start <= block < level.stop)

    def _check(self, batch: Batch, stop: int, ramps: Collection[int]) -> None:
        if not batch.cursor < stop <= self.num_blocks:
            raise ValueError(f"stop = {stop} must lie in {batch.cursor + 1}..{self.num_blocks}")
        if unknown := set(ramps) - set(self.ramp_blocks):
            raise ValueError(f"no ramp after block {min(unknown)}; ramps are after {list(self.ramp_blocks)}")


def mixed(weight: float, own: Floats, before: Floats) -> Floats:
    """Log-probabilities of both together, from those of each.

    >>> np.exp(mixed(0.75, np.log(np.float32([[0.8, 0.2]])), np.log(np.float32([[0.4, 0.6]])))).round(3)
    array([[0.7, 0.3]], dtype=float32)
    """
    if weight in (0.0, 1.0):
        return own if weight else before
    both: Floats = np.logaddexp(own + np.log(weight), before + np.log1p(-weight)).astype(np.float32)
    return both


def _mixed(level: Level, logits: Floats, memory: Any, rows: NDArray[np.int64]) -> Floats:
    """What a level and those before it say of some rows of a batch."""
    own = torch.from_numpy(logits).log_softmax(dim=1).numpy()
    if level.start == 0:
        return own
    return mixed(level.weight, own, torch.as_tensor(memory).cpu().numpy()[rows])


def _each_level(batch: Batch | None) -> Iterator[Batch]:
    """The same inputs as each level reads them, of a batch that was just encoded."""
    while batch is not None:
        yield batch
        batch = batch.ahead


def _staying(count: int, exits: Exits, kept: Rows) -> Rows:
    """The positions of those of `count` inputs that go on: who has not left, or is kept."""
    return np.setdiff1d(np.arange(count), np.setdiff1d(exits.rows, kept))


def _one_after_another(first: Exits, staying: Rows, then: Launched) -> Launched:
    """Two launches as one: the second ran those that stayed. Of two exits of one input the second counts."""
    again = staying[then.exits.rows]
    once = ~np.isin(first.rows, again)
    rows = np.concatenate((first.rows[once], again))
    order = np.argsort(rows)
    blocks = np.concatenate((first.blocks[once], then.exits.blocks))[order]
    logits = np.concatenate((first.logits[once], then.exits.logits))[order]
    known = then.meanwhile and replace(then.meanwhile, rows=staying[then.meanwhile.rows])
    return Launched(Exits(rows[order], blocks, logits), then.survivors, known)


def _nothing(count: int) -> Floats:
    return np.zeros((count, 0), np.float32)
