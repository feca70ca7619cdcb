"""A SplitModel that runs on torch: any family, any device, any precision."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.deployments.exits import yes_or_no
from isobatch.deployments.models.anatomy import Anatomy
from isobatch.deployments.models.attention import is_fused
from isobatch.deployments.models.departures import Departures, TokenDepartures
from isobatch.deployments.models.encode import ANSWERED_TOKENS, Encoder
from isobatch.deployments.models.predict import PredictedAnswer, predict
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.served_model import BlockRange, RangeOutput, ServedModel
from isobatch.deployments.models.spans import MIN_STEP, MaskOf, Spans, compiles_shapes, rows_for, spans_of
from isobatch.deployments.tasks import Task
from isobatch.deployments.transport.device_copies import to_device
from isobatch.deployments.transport.packed import rows_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.lengths import WORD
from isobatch.profiles.model import NOBODY, Array, Batch, Launched


class CutNetwork:
    """The common part of all networks of our loader: ramps, a device, and batches with one row per token."""

    def __init__(self, ramps: Ramps, labels: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        self.ramps, self.labels, self.device, self.dtype = ramps, tuple(labels), device, dtype

    @property
    def num_blocks(self) -> int:
        raise NotImplementedError

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def ramp_blocks(self) -> tuple[int, ...]:
        return self.ramps.blocks

    def predict(self: ServedModel, inputs: Sequence[Any], exits: bool = True) -> list[PredictedAnswer]:
        """Answers in the order of the inputs, as served; without `exits` all inputs run to the last block."""
        return predict(self, inputs, exits)

    @torch.inference_mode()
    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return select(batch, rows)

    def check(self, batch: Batch, stop: int, ramps: Collection[int]) -> None:
        """Raise ValueError for a launch that this network cannot run."""
        if not batch.cursor < stop <= self.num_blocks:
            raise ValueError(f"stop = {stop} must lie in {batch.cursor + 1}..{self.num_blocks}")
        if unknown := set(ramps) - set(self.ramp_blocks):
            raise ValueError(f"no ramp after block {min(unknown)}; ramps are after {list(self.ramp_blocks)}")


def merge(batches: Sequence[Batch]) -> Batch:
    """One batch of all inputs, in order."""
    cursors = {batch.cursor for batch in batches}
    if len(cursors) != 1:
        raise ValueError(f"batches to be merged must stand before the same block, got {sorted(cursors)}")
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    arrays = {name: torch.cat([torch.as_tensor(batch.arrays[name]) for batch in batches]) for name in first.arrays}
    memory = torch.cat([torch.as_tensor(batch.memory) for batch in batches])
    lengths = [batch.lengths for batch in batches if batch.lengths is not None]
    if lengths and len(lengths) < len(batches):
        raise ValueError("batches of texts and of others cannot be merged")
    ahead = [batch.ahead for batch in batches if batch.ahead]
    all_lengths = np.concatenate(lengths) if lengths else None
    return Batch(first.cursor, arrays, memory, all_lengths, ahead=merge(ahead) if ahead else None)


def select(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    """The inputs at these positions. In a cascade, memory may be on the host while arrays are on a GPU."""
    arrays, memory = {name: torch.as_tensor(each) for name, each in batch.arrays.items()}, torch.as_tensor(batch.memory)
    device = next(iter(arrays.values())).device
    token_rows = [] if batch.lengths is None else [rows_of(batch.lengths, rows)]
    inputs, *of_tokens = to_device([rows, *token_rows], device)
    array_rows = of_tokens[0] if of_tokens else inputs
    memory_rows = inputs if memory.device == device else to_device([rows], memory.device)[0]
    lengths = None if batch.lengths is None else batch.lengths[rows]
    selected = {name: array.index_select(0, array_rows) for name, array in arrays.items()}
    ahead = select(batch.ahead, rows) if batch.ahead else None
    return Batch(batch.cursor, selected, memory.index_select(0, memory_rows), lengths, ahead=ahead)


class TorchModel(CutNetwork):
    """A Hugging Face classifier, cut at will.

    The parts in `anatomy` are the checkpoint's own modules; `ramps` come from files beside it and may be empty.
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
        super().__init__(ramps, labels, device, dtype)
        self.anatomy, self.encoder = anatomy, encoder
        self._last_spans: tuple[NDArray[np.int64] | None, Spans | None] = None, None
        self._compiles_shapes = compiles_shapes(device, dtype)

    def with_ramps(self, ramps: Ramps) -> "TorchModel":
        """The same blocks and weights with other ramps."""
        return TorchModel(self.anatomy, self.encoder, ramps, self.labels, self.device, self.dtype)

    @property
    def num_blocks(self) -> int:
        return len(self.anatomy.blocks)

    @property
    def task(self) -> Task:
        return self.anatomy.task

    @property
    def reads_text(self) -> bool:
        return self.encoder.longest is not None

    @property
    def exact(self) -> "TorchModel":
        """The network whose modules hold the weights, for any backend."""
        return self

    def prepare(self, block_ranges: Iterable[BlockRange], example: Batch) -> None:
        """Do nothing: on torch every block range is ready."""

    @torch.inference_mode()
    def compile_shapes(self, inputs: int, tokens: int, within_s: float, clock: Callable[[], float]) -> None:
        """Run the head and one block with every number of rows that launches up to this size may have.

        After that no launch waits for oneDNN. One block is enough, as all blocks of an encoder have the same shape.
        Sizes that are not reached within `within_s` are compiled when they occur.
        """
        if not (self._compiles_shapes and self.reads_text):
            return
        until_s, rows = clock() + within_s, 0
        arrays, word_spans = self._enter(self.encode([WORD]))
        word = self._before(0, arrays, word_spans)[:1]  # the hidden state of one token before the first block
        for count in range(1, 1 if self.task.by_token else inputs + 1):
            self.anatomy.head(word.expand(count, 1, -1))
        while rows < tokens and clock() < until_s:
            rows = rows_for(rows + 1)
            spans = spans_of(np.full(rows // MIN_STEP, MIN_STEP), self.device)
            hidden = self.anatomy.blocks[0](word.expand(rows, -1).contiguous(), spans)
            if self.task.by_token:
                self.anatomy.head(hidden)

    @torch.inference_mode()
    def warm_up(self, start: int, stops: Iterable[int], ramps: Collection[int], example: Batch) -> None:
        """Run a launch from block `start` to each stop on a batch as large as the example, which is an input of block
        0.

        No input leaves, so that every block gets the whole batch.
        """
        batch, all_rows = self._made_up(start, example), np.arange(len(example))
        for stop in stops:
            batch = self.run(batch, stop, ramps, all_rows).survivors or batch

    def _made_up(self, block: int, example: Batch) -> Batch:
        """A batch before this block. Earlier blocks run only where the shape of hidden states is not known otherwise,
        as this brings their weights to the device."""
        if not block:
            return example
        width = self.anatomy.token_width
        if example.lengths is None or width is None:
            survivors = self.exact.run(self.select(example, np.zeros(1, np.int64)), block, ()).survivors
            assert survivors is not None, "This is a bug: no ramp is active, so all go on."
            return self.select(survivors, np.zeros(len(example), np.int64))
        hidden = torch.zeros(int(example.lengths.sum()), width, dtype=self.dtype, device=self.device)
        along = {name: array for name, array in example.arrays.items() if name == ANSWERED_TOKENS}
        return Batch(block, {"hidden": hidden, **along}, example.memory, example.lengths)

    def encode(self, inputs: Sequence[Any]) -> Batch:
        encoded = self.encoder(inputs)
        memory = np.zeros((len(inputs), self.ramps.memory_width(self.num_labels)), np.float32)
        return Batch(0, encoded.arrays, memory, encoded.lengths, encoded.truncated, encoded.words)

    @torch.inference_mode()
    def merge(self, parts: Sequence[Batch]) -> Batch:
        return merge([self._moved(part) for part in parts])

    @torch.inference_mode()
    def run(
        self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY
    ) -> Launched:  # fmt: skip
        self.check(batch, stop, ramps)
        arrays, spans = self._enter(batch)
        departures = self._departures(batch, kept)
        observed = sorted(block for block in self.ramps.observed(ramps) if batch.cursor <= block < stop)
        output = self.through(BlockRange(batch.cursor, stop, tuple(observed)), arrays, spans)
        thresholds = ramps if isinstance(ramps, Mapping) else {}
        for block, logits in output.ramps.items():
            decision = self.ramps.decide(block, self._answers(logits), departures.memory, thresholds.get(block))
            departures.note(block, decision, may_leave=block in ramps)
        if output.head is not None:
            departures.close(stop - 1, self._answers(output.head))
        return self._launched(batch, stop, output.hidden, departures)

    def _answers(self, logits: Tensor) -> Tensor:
        """The logits of everything that is answered by itself, a row for each."""
        return yes_or_no(logits) if self.task.by_label else logits

    def _departures(self, batch: Batch, kept: NDArray[np.int64]) -> Departures:
        memory, most_unsure = self._on_device(batch.memory), self.ramps.rules.most_unsure
        if self.task.by_label or self.task.by_map:
            parts = np.full(len(batch), self.task.parts(self.num_labels))
            choices, answered = self.task.choices(self.num_labels), memory.new_ones(int(parts.sum()))
            return TokenDepartures(memory, choices, kept, parts, answered, most_unsure)
        if not self.task.by_token:
            return Departures(memory, self.num_labels, kept)
        assert batch.lengths is not None, "This is a bug: texts have lengths."
        answered = self._on_device(batch.arrays[ANSWERED_TOKENS])
        return TokenDepartures(memory, self.num_labels, kept, batch.lengths, answered, most_unsure)

    def through(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        """Run a block range without deciding on exits. Another backend overrides this method."""
        return self.compute(block_range, arrays, spans, lambda visible, dtype: visible)

    def compute(
        self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None, mask_of: MaskOf
    ) -> RangeOutput:
        """Run a block range on torch, for any backend."""
        spare = 0 if spans is None else spans.spare
        rows, logits = self._before(block_range.start, arrays, spans), {}
        spans = None if spans is None else spans.masked(mask_of, rows.dtype)
        for block in range(block_range.start, block_range.stop):
            rows = self.anatomy.blocks[block](rows, spans)
            hidden = rows[: len(rows) - spare] if spare else rows
            if block in block_range.ramps:
                logits[block] = self.ramps.logits(block, self.anatomy.pool(hidden, spans))
        if block_range.stop < self.num_blocks:
            return RangeOutput(self.anatomy.packed(hidden), logits, None)
        read = rows if self.task.by_token else hidden
        read = read if spans is None else self.anatomy.gather(read, spans)
        answer = self.anatomy.head(read)
        if spare and self.task.by_token:
            answer = answer[: len(answer) - spare]
        return RangeOutput(None, logits, answer.float() / self.ramps.rules.head_temperature)

    @torch.inference_mode()
    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """The training data of ramps: the pooled state after each block but the last, and the network's own logits.

        Where words are answered, there is one row for each answered token.
        """
        arrays, spans = self._enter(batch)
        pooled = []
        for block in range(self.num_blocks - 1):
            hidden = self.through(BlockRange(block, block + 1), arrays, spans).hidden
            assert hidden is not None, "This is a bug: the network goes on."
            pooled.append(self.anatomy.pool(self.anatomy.unpacked(hidden, block + 1), spans).float())
            arrays = {"hidden": hidden}
        head = self.through(BlockRange(self.num_blocks - 1, self.num_blocks), arrays, spans).head
        assert head is not None, "This is a bug: the network ends here."
        logits = head * self.ramps.rules.head_temperature
        if ANSWERED_TOKENS not in batch.arrays:
            return pooled, logits
        answered = self._on_device(batch.arrays[ANSWERED_TOKENS])
        return [features[answered] for features in pooled], logits[answered]

    def _enter(self, batch: Batch) -> tuple[Mapping[str, Tensor], Spans | None]:
        """The arrays that the next block reads, on the device, and where its texts lie (None for images)."""
        on_device = {name: self._on_device(each) for name, each in batch.arrays.items() if name != ANSWERED_TOKENS}
        arrays = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in on_device.items()
        }
        return arrays, None if batch.lengths is None else self._spans(batch.lengths)

    def _spans(self, lengths: NDArray[np.int64]) -> Spans:
        """The same object as last time, where a launch continues with the texts that it had before a ramp."""
        known, spans = self._last_spans
        if lengths is not known:
            tokens = int(lengths.sum())
            spare = rows_for(tokens) - tokens if self._compiles_shapes else 0
            spans = spans_of(lengths, self.device, is_fused(self.device, self.dtype), spare)
            self._last_spans = lengths, spans
        assert spans is not None, "This is a bug: texts have spans."
        return spans

    def _before(self, block: int, arrays: Mapping[str, Tensor], spans: Spans | None) -> Any:
        if spans is not None:
            if spare := spans.spare:
                zeros = {name: each.new_zeros(spare, *each.shape[1:]) for name, each in arrays.items()}
                arrays = {name: torch.cat((each, zeros[name])) for name, each in arrays.items()}
            arrays = {**arrays, "position_ids": spans.positions}
        if block > 0:
            return self.anatomy.unpacked(arrays["hidden"], block)
        try:
            return self.anatomy.embed(arrays)
        except IndexError as error:  # on a CPU
            beyond = f"the network does not know the token {int(arrays['input_ids'].max())}"
            raise UserError(f"{beyond}: save the tokenizer beside it with which it was trained") from error

    def _moved(self, batch: Batch) -> Batch:
        arrays = {name: self._on_device(array) for name, array in batch.arrays.items()}
        return Batch(batch.cursor, arrays, self._on_device(batch.memory), batch.lengths, ahead=batch.ahead)

    def _on_device(self, array: Array) -> Tensor:
        if isinstance(array, Tensor) and array.device == self.device:
            return array
        return to_device([array], self.device)[0]

    def _launched(self, batch: Batch, stop: int, hidden: Tensor | None, departures: Departures) -> Launched:
        exits, staying = departures.finish()
        exits = replace(exits, numbers=self.task.numbers, map_width=self.task.map_width)
        if hidden is None or len(staying) == 0:
            return Launched(exits, None)
        along = {name: self._on_device(array) for name, array in batch.arrays.items() if name == ANSWERED_TOKENS}
        after = Batch(stop, {"hidden": hidden, **along}, departures.memory, batch.lengths, ahead=batch.ahead)
        survivors = after if len(staying) == len(batch) else select(after, staying)
        return Launched(exits, survivors)
