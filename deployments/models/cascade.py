"""A cascade: several networks for the same labels, from the smallest to the largest. Each network is a *level*.

The blocks of a cascade are the blocks of all its levels, one after another. The head of a level is the ramp after its
last block: an input that the policy lets leave there has its answer. All other inputs pass the *edge*: they start the
next level from their own text, which travels with them in the form that the next level reads (`Batch.ahead`). The
log-probabilities of the earlier levels travel too (`Batch.memory`), and have a share in the next level's answer:

    p = weight * (probabilities of this level) + (1 - weight) * (probabilities of the earlier levels)
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isobatch.deployments.models.encode import Encoder
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import CutNetwork, select
from isobatch.deployments.transport.device_copies import to_host
from isobatch.profiles.model import NOBODY, Batch, Exits, Launched

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
BackendSwitch = Callable[[BackedModel, Path], BackedModel]


@dataclass(frozen=True)
class Level:
    """One network of a cascade, whose blocks `start .. stop - 1` are its own.

    The network is loaded when it is first used. So a front, which only encodes, holds no weights, and a replica holds
    the weights of the levels that it runs. The head must be calibrated. `order[i]` is the level's own number for the
    cascade's label i.
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
        """The cascade's ramps inside this level, as its network numbers them."""
        return [ramp - self.start for ramp in ramps if self.start <= ramp < self.stop - 1]

    def part(self, block_range: BlockRange) -> BlockRange | None:
        """The part of a cascade's block range that this level runs, by its own numbers; None if there is none."""
        start, stop = max(block_range.start, self.start), min(block_range.stop, self.stop)
        if start >= stop:
            return None
        inside = (ramp for ramp in self.local(block_range.ramps) if start <= ramp + self.start < stop)
        return BlockRange(start - self.start, stop - self.start, tuple(inside))

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: Rows) -> Launched:
        """Run blocks of this level alone. Blocks and labels are numbered as in the cascade."""
        inside = replace(batch, cursor=batch.cursor - self.start, memory=_no_memory(len(batch)), ahead=None)
        local: Collection[int] = self.local(ramps)
        if isinstance(ramps, Mapping):
            local = {ramp: ramps[ramp + self.start] for ramp in local}
        launched = self.model.run(inside, stop - self.start, local, kept)
        exits = launched.exits
        renumbered = Exits(exits.rows, exits.blocks + self.start, exits.logits[:, list(self.order)])
        return Launched(renumbered, launched.survivors)


class Cascade(CutNetwork):
    """A SplitModel of several levels. `ramps` holds the rules of all ramps; the levels hold their weights."""

    exports = True  # `prepare` loads the levels of a plan, so that no request waits for them

    def __init__(
        self,
        levels: Sequence[Level],
        ramps: Ramps,
        labels: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        backend: str = "torch",
    ) -> None:
        super().__init__(ramps, labels, device, dtype)
        self.levels = tuple(levels)
        self._backend = backend  # the requested one, which may be "auto"

    @property
    def backend(self) -> str:
        """The backend of the loaded levels; the requested one until a level is loaded."""
        loaded = [level.model.backend for level in self.levels if level.is_loaded]
        return loaded[-1] if loaded else self._backend

    @property
    def num_blocks(self) -> int:
        return self.levels[-1].stop

    @property
    def edges(self) -> tuple[int, ...]:
        """The first blocks of all levels but the first."""
        return tuple(level.start for level in self.levels[1:])

    @property
    def encoder(self) -> Encoder:
        return self.levels[0].encoder

    @property
    def reads_text(self) -> bool:
        return self.encoder.longest is not None

    @property
    def exact(self) -> "Cascade":
        return self._with(lambda level: level.model.exact)

    def on_backend(self, backend: str, switch: BackendSwitch) -> "Cascade":
        """The same cascade with each level on another backend: `switch` gets a level's network and its folder."""
        return self._with(lambda level: switch(level.load(), level.folder), backend)

    def _with(self, load: Callable[[Level], BackedModel], backend: str | None = None) -> "Cascade":
        levels = [replace(level, load=partial(load, level)) for level in self.levels]
        return Cascade(levels, self.ramps, self.labels, self.device, self.dtype, backend or self._backend)

    def prepare(self, block_ranges: Iterable[BlockRange], example: Batch) -> None:
        """Load and prepare the levels that these block ranges run through. The example is an input of block 0."""
        wanted = list(block_ranges)
        for level in self.levels:
            if parts := [part for block_range in wanted if (part := level.part(block_range))]:
                level.model.prepare(parts, replace(example, cursor=0, ahead=None))
            example = example.ahead or example

    def warm_up(self, start: int, stops: Iterable[int], ramps: Collection[int], example: Batch) -> None:
        """Run full batches through each level's part of a split, as `TorchModel.warm_up` does."""
        ends = list(stops)
        for level in self.levels:
            first = max(start, level.start)
            if inside := sorted({min(end, level.stop) for end in ends if end > first and first < level.stop}):
                own = replace(example, cursor=0, memory=_no_memory(len(example)), ahead=None)
                blocks = [end - level.start for end in inside]
                level.model.warm_up(first - level.start, blocks, level.local(ramps), own)
            example = example.ahead or example

    def encode(self, inputs: Sequence[Any]) -> Batch:
        """The inputs as every level reads them. Levels with the same encoder share its output."""
        encoders = {id(level.encoder): level.encoder for level in self.levels}
        encoded = {key: encoder(inputs) for key, encoder in encoders.items()}
        truncated = frozenset[int]().union(*(each.truncated for each in encoded.values()))
        batch: Batch | None = None
        for level in reversed(self.levels):
            own = encoded[id(level.encoder)]
            batch = Batch(level.start, own.arrays, _no_memory(len(inputs)), own.lengths, truncated, ahead=batch)
        assert batch is not None, "This is a bug: a cascade has levels."
        return batch

    @torch.inference_mode()
    def merge(self, parts: Sequence[Batch]) -> Batch:
        return self._level_at(parts[0].cursor).model.merge(parts)

    @torch.inference_mode()
    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: Rows = NOBODY) -> Launched:
        self.check(batch, stop, ramps)
        level = self._level_at(batch.cursor)
        end = min(stop, level.stop)
        inside = [ramp for ramp in ramps if batch.cursor <= ramp < end - 1]
        if len(kept) and inside:
            # Stop at the last ramp: a kept input also gets an answer from the level's head, which would replace its
            # exit at that ramp.
            end = max(inside) + 1
        launched = self._run_level(level, batch, end, ramps, kept)
        if stop <= end or launched.survivors is None:
            return launched
        staying = _staying(len(batch), launched.exits, kept)
        deeper = self.run(launched.survivors, stop, ramps, np.flatnonzero(np.isin(staying, kept)))
        return _one_after_another(launched.exits, staying, deeper)

    def _run_level(self, level: Level, batch: Batch, stop: int, ramps: Collection[int], kept: Rows) -> Launched:
        """Run blocks of one level. At its end, inputs that its head does not answer survive at the edge."""
        memory = to_host(torch.as_tensor(batch.memory))  # it has arrived when the level's exits have
        launched = level.run(batch, stop, ramps, kept)
        if stop == level.stop:
            return self._pass_edge(level, replace(batch, memory=memory()), launched.exits, ramps, kept)
        if launched.survivors is None:
            return launched
        staying = _staying(len(batch), launched.exits, kept)
        ahead = select(batch.ahead, staying) if batch.ahead else None
        return Launched(launched.exits, replace(launched.survivors, cursor=stop, memory=memory()[staying], ahead=ahead))

    def _pass_edge(self, level: Level, batch: Batch, exits: Exits, ramps: Collection[int], kept: Rows) -> Launched:
        """Decide which inputs at the end of a level leave with its answer, and let the others start the next level."""
        last = level.stop - 1
        ended = np.flatnonzero(exits.blocks == last)
        mixed_logits = _mixed(level, exits.logits[ended], batch.memory, exits.rows[ended])
        logits = exits.logits.copy()
        if batch.ahead is None:
            logits[ended] = mixed_logits
            return Launched(replace(exits, logits=logits), None)
        threshold = ramps.get(last) if isinstance(ramps, Mapping) else None
        decision = self.ramps.decide(last, torch.from_numpy(mixed_logits), torch.zeros(len(ended), 0), threshold)
        logits[ended] = decision.answer.numpy()
        leaves = decision.leaves.numpy() & (last in ramps)
        goes_on = ~leaves | np.isin(exits.rows[ended], kept)
        left = np.delete(np.arange(len(exits)), ended[~leaves])
        exits_now = Exits(exits.rows[left], exits.blocks[left], logits[left])
        if not goes_on.any():
            return Launched(exits_now, None)
        ahead = select(batch.ahead, exits.rows[ended[goes_on]])
        return Launched(exits_now, replace(ahead, memory=mixed_logits[goes_on]))

    def _level_at(self, block: int) -> Level:
        return next(level for level in self.levels if level.start <= block < level.stop)


def mixed(weight: float, own: Floats, before: Floats) -> Floats:
    """Log-probabilities of the weighted mean of two answers: a level's own and that of the levels before it.

    >>> np.exp(mixed(0.75, np.log(np.float32([[0.8, 0.2]])), np.log(np.float32([[0.4, 0.6]])))).round(3)
    array([[0.7, 0.3]], dtype=float32)
    """
    if weight in (0.0, 1.0):
        return own if weight else before
    mean: Floats = np.logaddexp(own + np.log(weight), before + np.log1p(-weight)).astype(np.float32)
    return mean


def _mixed(level: Level, logits: Floats, memory: Floats, rows: NDArray[np.int64]) -> Floats:
    """Log-probabilities of a level together with the levels before it, for some rows of a batch."""
    own = torch.from_numpy(logits).log_softmax(dim=1).numpy()
    if level.start == 0:
        return own
    return mixed(level.weight, own, memory[rows])


def _staying(count: int, exits: Exits, kept: Rows) -> Rows:
    """The positions of the inputs that continue, of `count`: inputs that have not left, and kept ones."""
    return np.setdiff1d(np.arange(count), np.setdiff1d(exits.rows, kept))


def _one_after_another(first: Exits, staying: Rows, then: Launched) -> Launched:
    """Two launches as one: the second launch ran the inputs that stayed. An input's second exit replaces its first."""
    later_rows = staying[then.exits.rows]
    only_first = ~np.isin(first.rows, later_rows)
    rows = np.concatenate((first.rows[only_first], later_rows))
    order = np.argsort(rows)
    blocks = np.concatenate((first.blocks[only_first], then.exits.blocks))[order]
    logits = np.concatenate((first.logits[only_first], then.exits.logits))[order]
    return Launched(Exits(rows[order], blocks, logits), then.survivors)


def _no_memory(count: int) -> Floats:
    return np.zeros((count, 0), np.float32)
