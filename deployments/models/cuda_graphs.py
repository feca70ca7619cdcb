"""CUDA graphs on torch or ONNX Runtime: the work for batches of one shape is recorded once, then replayed in one call.

In a small launch the device waits while the host starts kernels one by one; a replay starts all of them at once. A
graph has its own memory, so a batch is copied into buffers of the next larger recorded shape, and its output is copied
out of them.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isobatch.deployments.models.attention import is_fused
from isobatch.deployments.models.interface import Backend
from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.deployments.models.spans import Integers, RecordingShape, Spans, in_shape
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.model import Batch

log = logging.getLogger(__name__)

MAX_RECORDINGS = 64  # recordings of one replica: each has buffers of its own in the device's memory
# Recorded shapes are rounded up to multiples of these, so that few recordings serve all batches.
INPUTS_MULTIPLE = 8
TOKENS_MULTIPLE = 256
LONGEST_MULTIPLE = 32
FULL = 0.75  # the share of a planned shape's tokens from which a batch of texts takes that shape
WARM_UPS = 3  # runs before a recording, as torch's documentation advises

Replay = Callable[[], object]
Widths = tuple[tuple[str, tuple[int, ...]], ...]  # of the inputs of a block range, by their names
RecordingKey = tuple[BlockRange, RecordingShape, Widths]


class GraphModel(TorchModel):
    """The same network with the same answers: recorded block ranges are replayed, all others run as usual."""

    def __init__(self, inner: TorchModel, record: "Recorder") -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner, self._record = inner, record
        self.backend = {"torch": "graphs", "onnx": "onnx-graphs"}[inner.backend]
        self.exports = inner.exports
        self._recordings: dict[RecordingKey, Recording | None] = {}  # the one that was used longest ago comes first
        self._planned: list[RecordingShape] = []  # of full batches of texts, the smallest first

    @property
    def exact(self) -> TorchModel:
        return self.inner.exact

    def prepare(self, block_ranges: Iterable[BlockRange], example: Batch) -> None:
        self.inner.prepare(block_ranges, example)

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        return self.inner.features(batch)

    def through(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        inputs = RangeInputs(arrays, spans)
        shape = RecordingShape(_rounded(inputs.rows, INPUTS_MULTIPLE)) if spans is None else spans.shape
        key = (block_range, shape, inputs.widths)
        if key not in self._recordings:
            self._add(key, inputs)
        count = inputs.rows if spans is None or self.task.by_token else spans.count
        if self.task.by_map:
            count *= self.task.parts(self.num_labels)
        if key in self._recordings:
            recording = self._recordings[key] = self._recordings.pop(key)
            if recording:
                return recording.run(inputs, count)
        return self.inner.through(block_range, arrays, None if spans is None else spans.trimmed(inputs.rows))

    def _spans(self, lengths: Integers) -> Spans:
        """Spans that have the shape of a recording, for any texts."""
        if self._is_fused:
            planned = (shape for shape in self._planned if _fills(lengths, shape))
            shape = next(planned, None) or fused_shape(lengths, self.encoder.longest)
        else:
            shape = text_shape(lengths, self.encoder.longest)
        return in_shape(lengths, self.device, shape, self._is_fused)

    @property
    def _is_fused(self) -> bool:
        return is_fused(self.device, self.dtype) and self.inner.backend == "torch"

    def warm_up(self, start: int, stops: Iterable[int], ramps: Collection[int], example: Batch) -> None:
        """Record the block ranges of a split in one shape, which replays all its full batches of texts."""
        if example.lengths is not None and self._is_fused:
            shapes = {*self._planned, planned_shape(example.lengths, self.encoder.longest)}
            self._planned = sorted(shapes, key=lambda shape: shape.tokens or 0)
        super().warm_up(start, stops, ramps, example)

    def _add(self, key: RecordingKey, inputs: "RangeInputs") -> None:
        block_range, shape, widths = key
        try:
            recording = self._record(block_range, partial(inputs.empty, shape))
            if recording is None:  # it cannot be recorded yet
                return
        except Exception:
            log.exception("blocks %s run without a CUDA graph for %s of %s", block_range, shape, widths)
            recording = None
        if len(self._recordings) >= MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[key] = recording


def text_shape(lengths: Integers, longest: int | None) -> RecordingShape:
    """The next larger recorded shape for texts of these lengths. `longest`: the most tokens that the network reads."""
    most = int(lengths.max())
    rounded = -(-most // LONGEST_MULTIPLE) * LONGEST_MULTIPLE
    return RecordingShape(
        _rounded(len(lengths), INPUTS_MULTIPLE),
        _rounded(int(lengths.sum()), TOKENS_MULTIPLE),
        _readable(rounded, most, longest),
    )


def fused_shape(lengths: Integers, longest: int | None) -> RecordingShape:
    """The same for a kernel without padding. Spare texts and a longer longest text cost it nothing, so only tokens are
    rounded up in small steps: four to each power of two."""
    most, tokens = int(lengths.max()), int(lengths.sum())
    step = 1 << max((tokens - 1).bit_length() - 3, 0)
    return RecordingShape(_power(len(lengths)), -(-tokens // step) * step, _readable(_power(most), most, longest))


def planned_shape(lengths: Integers, longest: int | None) -> RecordingShape:
    """The shape for all full batches of a split, by one of them: their texts may be half or twice as long."""
    most = int(lengths.max())
    return RecordingShape(2 * len(lengths), int(lengths.sum()), _readable(2 * most, most, longest))


def _fills(lengths: Integers, shape: RecordingShape) -> bool:
    """Whether texts fit into a planned shape and fill it so far that another shape would save little."""
    assert shape.tokens is not None, "This is a bug: a planned shape is one of texts."
    assert shape.longest is not None, "This is a bug: a planned shape is one of texts."
    fits = len(lengths) <= shape.inputs and lengths.max() <= shape.longest
    return fits and FULL * shape.tokens <= lengths.sum() <= shape.tokens


def _readable(rounded: int, most: int, longest: int | None) -> int:
    """The rounded length, but no longer than the network reads (`longest`)."""
    return max(most, min(rounded, longest or rounded))


def _power(number: int) -> int:
    """
    >>> [_power(number) for number in (1, 3, 8)]
    [1, 4, 8]
    """
    return 1 << (number - 1).bit_length()


def _rounded(number: int, multiple: int) -> int:
    """The number rounded up to a multiple; a smaller number is rounded up to a power of two.

    >>> _rounded(3, 8), _rounded(9, 8)
    (4, 16)
    """
    return _power(number) if number < multiple else -(-number // multiple) * multiple


@dataclass(frozen=True)
class RangeInputs:
    """The inputs of a block range: arrays with one row per input, or per token of texts, and where the texts lie."""

    arrays: Mapping[str, Tensor]
    spans: Spans | None

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def widths(self) -> Widths:
        """The dimensions that are never rounded, such as an image's height and width."""
        return tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(self.arrays.items()))

    def empty(self, shape: RecordingShape) -> "RangeInputs":
        rows = shape.tokens or shape.inputs
        arrays = {name: each.new_zeros((rows, *each.shape[1:])) for name, each in self.arrays.items()}
        if self.spans is None:
            return RangeInputs(arrays, None)
        return RangeInputs(
            arrays, self.spans.with_tensors({n: each.clone() for n, each in self.spans.tensors().items()})
        )

    def fill(self, inputs: "RangeInputs") -> None:
        """Copy inputs into these buffers. Rows beyond them keep older values, which are never read."""
        for name, buffer in self.arrays.items():
            buffer[: inputs.rows].copy_(inputs.arrays[name])
        if self.spans is not None and inputs.spans is not None:
            tensors = inputs.spans.tensors()
            for name, buffer in self.spans.tensors().items():
                buffer.copy_(tensors[name])


@dataclass(frozen=True)
class Recording:
    """The buffers that a recorded launch reads, the buffers that it writes, and the call that replays it."""

    inputs_buffer: RangeInputs
    output: RangeOutput
    replay: Replay

    def run(self, inputs: RangeInputs, count: int) -> RangeOutput:
        """A copy of the output, since the next replay overwrites the buffers.

        `count`: the number of inputs, or of tokens or pixels where these are answered.
        """
        self.inputs_buffer.fill(inputs)
        self.replay()
        hidden, head = self.output.hidden, self.output.head
        return RangeOutput(
            None if hidden is None else hidden[: inputs.rows].clone(),
            {block: logits[:count].clone() for block, logits in self.output.ramps.items()},
            None if head is None else head[:count].clone(),
        )


# Records a block range on buffers that the second argument makes. None: it cannot be recorded yet; an error: never.
Recorder = Callable[[BlockRange, Callable[[], RangeInputs]], Recording | None]


class TorchRecorder:
    """Records the work that torch queues on the device. Other threads may work at the same time."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        # All recordings share scratch memory: replays run one after another, and each output is copied at once.
        self._scratch = torch.cuda.graph_pool_handle()

    def __call__(self, block_range: BlockRange, buffers: Callable[[], RangeInputs]) -> Recording:
        inputs_buffer, graph = buffers(), torch.cuda.CUDAGraph()
        run = partial(self._model.through, block_range, inputs_buffer.arrays, inputs_buffer.spans)
        with torch.cuda.device(self._model.device):
            side_stream, main_stream = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            side_stream.wait_stream(main_stream)
            with torch.cuda.stream(side_stream):
                for _ in range(WARM_UPS):
                    run()
            main_stream.wait_stream(side_stream)
            with torch.cuda.graph(graph, pool=self._scratch, capture_error_mode="thread_local"):
                output = run()
        return Recording(inputs_buffer, output, graph.replay)


def without_cuda(model: TorchModel, backend: str, instead: str) -> str | None:
    """Why a backend that replays CUDA graphs cannot run a network that is not on CUDA."""
    device = model.device.type
    if device == "cuda":
        return None
    return f"backend {backend} replays CUDA graphs, which {device} does not have: use backend: {instead}"


TORCH_GRAPHS = Backend(
    lambda model, fingerprint, int8: GraphModel(model, TorchRecorder(model)),
    lambda model, int8: without_cuda(model, "graphs", "torch"),
)
