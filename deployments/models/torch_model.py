"""A SplitModel that runs on torch: any family, any device, any precision."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.models import batches
from deployments.models.anatomy import Anatomy
from deployments.models.attention import is_fused
from deployments.models.departures import Departures, TokenDepartures, Tokens
from deployments.models.encode import ASKED, Encoder
from deployments.models.interface import BackedModel, BlockRange, Fingerprint, RangeOutput
from deployments.models.predict import Predicted, predict
from deployments.models.ramps import Ramps
from deployments.models.spans import LEAST_STEP, MaskOf, Spans, rows_for, spans_of
from deployments.models.streams import finish
from deployments.tasks import Task
from profiles.lengths import WORD
from profiles.model import NOBODY, Array, Batch, Launched


class TorchModel:
    """A Hugging Face classifier, cut at will.

    The parts in `anatomy` are the checkpoint's own modules; `ramps` are read beside them and may be none.
    """

    backend = "torch"
    exports = False

    def __init__(
        self,
        anatomy: Anatomy,
        encoder: Encoder,
        ramps: Ramps,
        labels: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.anatomy = anatomy
        self.ramps = ramps
        self.labels = tuple(labels)
        self.device = device
        self.dtype = dtype
        self.encoder = encoder

    def with_ramps(self, ramps: Ramps) -> "TorchModel":
        """The same blocks and weights under other rules."""
        return TorchModel(self.anatomy, self.encoder, ramps, self.labels, self.device, self.dtype)

    def predict(self, inputs: Sequence[Any], exits: bool = True) -> list[Predicted]:
        """The answers in the order of the inputs, as they are served; without `exits` all run to the last block."""
        return predict(self, inputs, exits)

    @property
    def num_blocks(self) -> int:
        return len(self.anatomy.blocks)

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def ramp_blocks(self) -> tuple[int, ...]:
        return self.ramps.blocks

    @property
    def task(self) -> Task:
        return self.anatomy.task

    @property
    def reads_text(self) -> bool:
        return self.encoder.longest is not None

    @property
    def exact(self) -> "TorchModel":
        """The network whose modules hold the weights, whatever else computes."""
        return self

    @property
    def compiles_shapes(self) -> bool:
        """Whether the first launch with a number of rows takes longer: oneDNN compiles products in half precision."""
        return self.device.type == "cpu" and self.dtype != torch.float32

    def twin(self) -> "TorchModel":
        """The same network, same weights, for another thread that computes at the same time. Nothing else is shared."""
        return self

    def prepare(self, stretches: Iterable[BlockRange], example: Batch) -> None:
        """Do nothing: on torch every stretch is ready."""

    @torch.inference_mode()
    def compile_shapes(self, inputs: int, tokens: int, within_s: float, clock: Callable[[], float]) -> None:
        """Run the head and a block with every number of rows that launches of so many inputs and tokens may have.

        Then no launch waits for oneDNN. The blocks of an encoder have one shape. Sizes that are not reached within the
        time are compiled when they come.
        """
        if not (self.compiles_shapes and self.reads_text):
            return
        until_s, rows = clock() + within_s, 0
        word = self._hidden_word()
        for count in range(1, 1 if self.task.by_token else inputs + 1):
            self.anatomy.head(word.expand(count, 1, -1))
        while rows < tokens and clock() < until_s:
            rows = rows_for(rows + 1)
            spans = spans_of(np.full(rows // LEAST_STEP, LEAST_STEP), self.device)
            hidden = self.anatomy.blocks[0](word.expand(rows, -1).contiguous(), spans)
            if self.task.by_token:
                self.anatomy.head(hidden)

    def _hidden_word(self) -> Tensor:
        """One token as the first block reads it."""
        arrays, spans = self._enter(self.encode([WORD]))
        return self._before(0, arrays, spans)[:1]

    def encode(self, inputs: Sequence[Any]) -> Batch:
        encoded = self.encoder(inputs)
        memory = np.zeros((len(inputs), self.ramps.memory_width(self.num_labels)), np.float32)
        return Batch(0, encoded.arrays, memory, encoded.lengths, encoded.truncated, encoded.words)

    @torch.inference_mode()
    def merge(self, parts: Sequence[Batch]) -> Batch:
        return batches.merge([self._moved(part) for part in parts])

    @torch.inference_mode()
    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return batches.select(batch, rows)

    @torch.inference_mode()
    def run(
        self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY
    ) -> Launched:  # fmt: skip
        self._check(batch, stop, ramps)
        arrays, spans = self._enter(batch)
        departures = self._departures(batch, kept)
        observed = sorted(block for block in self.ramps.observed(ramps) if batch.cursor <= block < stop)
        passed = self.through(BlockRange(batch.cursor, stop, tuple(observed)), arrays, spans)
        thresholds = ramps if isinstance(ramps, Mapping) else {}
        for block, logits in passed.ramps.items():
            decision = self.ramps.decide(block, logits, departures.memory, thresholds.get(block))
            departures.note(block, decision, may_leave=block in ramps)
        if passed.head is not None:
            departures.close(stop - 1, passed.head)
        return self._settle(batch, stop, passed.hidden, departures)

    def _departures(self, batch: Batch, kept: NDArray[np.int64]) -> Departures:
        memory = self._on_device(batch.memory)
        if not self.task.by_token:
            return Departures(memory, self.num_labels, kept)
        assert batch.lengths is not None, "This is a bug: texts have lengths."
        text = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.lengths)).to(self.device, non_blocking=True)
        asked = self._on_device(batch.arrays[ASKED])
        tokens = Tokens(batch.lengths, text, asked, self.ramps.rules.most_unsure)
        return TokenDepartures(memory, self.num_labels, kept, tokens)

    def through(self, stretch: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        """Run a stretch without deciding who leaves. Another backend replaces this one method."""
        return self.compute(stretch, arrays, spans, lambda visible, dtype: visible)

    def compute(
        self, stretch: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None, mask_of: MaskOf
    ) -> RangeOutput:
        """Run a stretch on torch, whatever the backend is."""
        spare = 0 if spans is None else spans.spare
        rows, logits = self._before(stretch.start, arrays, spans), {}
        spans = None if spans is None else spans.masked(mask_of, rows.dtype)
        for block in range(stretch.start, stretch.stop):
            rows = self.anatomy.blocks[block](rows, spans)
            hidden = rows[: len(rows) - spare] if spare else rows
            if block in stretch.ramps:
                logits[block] = self.ramps.logits(block, self.anatomy.pool(hidden, spans))
        if stretch.stop < self.num_blocks:
            return RangeOutput(hidden, logits, None)
        read = rows if spans is None else self.anatomy.gather(rows, spans)
        answer = self.anatomy.head(read)
        if spare and self.task.by_token:
            answer = answer[: len(answer) - spare]
        return RangeOutput(None, logits, answer.float() / self.ramps.head_temperature)

    @torch.inference_mode()
    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """What ramps are made from: what one after each block but the last reads, and the network's own logits.

        Where tokens are answered, there is a row for each that is asked for.
        """
        arrays, spans = self._enter(batch)
        pooled = []
        for block in range(self.num_blocks - 1):
            hidden = self.through(BlockRange(block, block + 1), arrays, spans).hidden
            assert hidden is not None, "This is a bug: the network goes on."
            pooled.append(self.anatomy.pool(hidden, spans).float())
            arrays = {"hidden": hidden}
        head = self.through(BlockRange(self.num_blocks - 1, self.num_blocks), arrays, spans).head
        assert head is not None, "This is a bug: the network ends here."
        found = pooled, head * self.ramps.head_temperature
        if ASKED not in batch.arrays:
            return found
        asked = self._on_device(batch.arrays[ASKED])
        return [each[asked] for each in pooled], found[1][asked]

    def _check(self, batch: Batch, stop: int, ramps: Collection[int]) -> None:
        if not batch.cursor < stop <= self.num_blocks:
            raise ValueError(f"stop = {stop} must lie in {batch.cursor + 1}..{self.num_blocks}")
        if unknown := set(ramps) - set(self.ramp_blocks):
            raise ValueError(f"no ramp after block {min(unknown)}; ramps are after {list(self.ramp_blocks)}")

    def _enter(self, batch: Batch) -> tuple[Mapping[str, Tensor], Spans | None]:
        """What the next block reads, on the device, and where its texts lie (None: it reads no texts)."""
        read = {name: array for name, array in batch.arrays.items() if name != ASKED}
        arrays = {name: self._in_precision(self._on_device(array)) for name, array in read.items()}
        return arrays, None if batch.lengths is None else self._spans(batch.lengths)

    def _spans(self, lengths: NDArray[np.int64]) -> Spans:
        tokens = int(lengths.sum())
        spare = rows_for(tokens) - tokens if self.compiles_shapes else 0
        return spans_of(lengths, self.device, is_fused(self.device, self.dtype), spare)

    def _before(self, block: int, arrays: Mapping[str, Tensor], spans: Spans | None) -> Tensor:
        if spans is None:
            return arrays["hidden"] if block > 0 else self.anatomy.embed(arrays)
        arrays = _with_spare(arrays, spans.spare)
        return arrays["hidden"] if block > 0 else self.anatomy.embed({**arrays, "position_ids": spans.positions})

    def _moved(self, batch: Batch) -> Batch:
        arrays = {name: self._on_device(array) for name, array in batch.arrays.items()}
        return replace(batch, arrays=arrays, memory=self._on_device(batch.memory))

    def _on_device(self, array: Array) -> Tensor:
        return torch.as_tensor(array).to(self.device, non_blocking=True)

    def _in_precision(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _settle(self, batch: Batch, stop: int, hidden: Tensor | None, departures: Departures) -> Launched:
        exits, staying = departures.settle()
        if hidden is None or len(staying) == 0:
            return Launched(exits, None)
        along = {name: self._on_device(array) for name, array in batch.arrays.items() if name == ASKED}
        after = replace(batch, cursor=stop, arrays={"hidden": hidden, **along}, memory=departures.memory)
        survivors = after if len(staying) == len(batch) else batches.select(after, staying)
        finish(self.device)
        return Launched(exits, survivors)


def _with_spare(arrays: Mapping[str, Tensor], spare: int) -> Mapping[str, Tensor]:
    """The arrays with so many rows of zeros behind them."""
    if not spare:
        return arrays
    return {name: torch.cat((array, array.new_zeros(spare, *array.shape[1:]))) for name, array in arrays.items()}


class _OnTorch:
    """The backend `torch`: every network as it was loaded."""

    tried_by_auto = False  # it is what others are measured against

    def obstacle(self, model: TorchModel, int8: bool) -> str | None:
        return None

    def serve(self, model: TorchModel, fingerprint: Fingerprint, int8: bool) -> BackedModel:
        return model


TORCH = _OnTorch()
