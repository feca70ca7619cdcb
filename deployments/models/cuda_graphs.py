"""CUDA graphs on torch or ONNX Runtime: the work for batches of one shape is recorded once, then replayed in one call.

Small launches wait for the host to name their kernels one by one; a replay names none. A graph has memory of its own,
so a batch is copied into buffers of the next larger shape, and what it gives is copied out of them.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deployments.models.attention import is_fused
from deployments.models.interface import BackedModel, BlockRange, Fingerprint, RangeOutput
from deployments.models.spans import Integers, Room, Spans, in_room
from deployments.models.torch_model import TorchModel
from profiles.errors import UserError
from profiles.model import Batch

log = logging.getLogger(__name__)

MOST = 64  # recordings kept by one replica: each has buffers of its own
INPUTS, TOKENS, LONGEST = 8, 256, 32  # what inputs, their tokens, and the longest are rounded up to multiples of
WARM_UPS = 3  # before recording, as torch wants it

Again = Callable[[], object]


class GraphModel(TorchModel):
    """The same network with the same answers, replayed where it is recorded and run as usual where it is not."""

    def __init__(self, inner: TorchModel, record: "Recorder") -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner, self._record = inner, record
        self.backend = {"torch": "graphs", "onnx": "onnx-graphs"}[inner.backend]
        self.exports = inner.exports
        self._recordings: dict[Hashable, Recording | None] = {}

    @property
    def exact(self) -> TorchModel:
        return self.inner.exact

    def twin(self) -> TorchModel:
        if self.inner.backend != "torch":
            raise UserError(f"{self.backend} computes one launch at a time: use onnx or graphs for more")
        return GraphModel(self.inner, TorchRecorder(self.inner))

    def prepare(self, stretches: Iterable[BlockRange], example: Batch) -> None:
        self.inner.prepare(stretches, example)

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        return self.inner.features(batch)

    def through(self, stretch: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        inputs = Inputs(arrays, spans)
        room = room_for(inputs.rows) if spans is None else spans.room
        key = (stretch, room, inputs.widths)
        if key not in self._recordings:
            self._add(key, stretch, partial(inputs.empty, room))
        count = inputs.rows if spans is None or self.task.by_token else spans.count
        if recording := self._recordings.get(key):
            return recording.run(inputs, count)
        return self.inner.through(stretch, arrays, None if spans is None else spans.trimmed(inputs.rows))

    def _spans(self, lengths: Integers) -> Spans:
        """Spans of a recording's shape, whatever the texts."""
        room = room_for_texts(lengths, self.encoder.longest)
        return in_room(lengths, self.device, room, is_fused(self.device, self.dtype) and self.inner.backend == "torch")

    def _add(self, key: Hashable, stretch: BlockRange, buffers: "Callable[[], Inputs]") -> None:
        try:
            made = self._record(stretch, buffers)
            if made is None:  # not yet
                return
        except Exception:
            log.exception("blocks %s run without a CUDA graph for %s", stretch, buffers().shapes)
            made = None
        if len(self._recordings) >= MOST:  # the one that was made first goes
            del self._recordings[next(iter(self._recordings))]
        self._recordings[key] = made


def room_for(count: int) -> Room:
    """The next larger number of images that is recorded."""
    return Room(_rounded(count, INPUTS))


def room_for_texts(lengths: Integers, longest: int | None) -> Room:
    """The next larger shape that is recorded. `longest`: the network knows no more positions."""
    most = int(lengths.max())
    rounded = -(-most // LONGEST) * LONGEST
    fitting = max(most, min(rounded, longest or rounded))
    return Room(_rounded(len(lengths), INPUTS), _rounded(int(lengths.sum()), TOKENS), fitting)


def _rounded(number: int, of: int) -> int:
    """Up to a multiple; few, up to a power of two.

    >>> _rounded(3, 8), _rounded(9, 8)
    (4, 16)
    """
    return 1 << (number - 1).bit_length() if number < of else -(-number // of) * of


@dataclass(frozen=True)
class Inputs:
    """What a stretch reads: arrays with one row an input, or for texts one row a token, and where the texts lie."""

    arrays: Mapping[str, Tensor]
    spans: Spans | None

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in sorted(self.arrays.items())}

    @property
    def widths(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The dimensions that are never rounded: a picture's size, say."""
        return tuple((name, shape[1:]) for name, shape in self.shapes.items())

    def empty(self, room: Room) -> "Inputs":
        """Buffers of this size."""
        rows = room.tokens or room.inputs
        arrays = {name: each.new_zeros((rows, *each.shape[1:])) for name, each in self.arrays.items()}
        if self.spans is None:
            return Inputs(arrays, None)
        return Inputs(arrays, self.spans.with_tensors({n: each.clone() for n, each in self.spans.tensors().items()}))

    def fill(self, given: "Inputs") -> None:
        """Copy what is given into these buffers. Rows beyond it keep what was there before: nobody reads them."""
        for name, buffer in self.arrays.items():
            buffer[: given.rows].copy_(given.arrays[name])
        if self.spans is not None and given.spans is not None:
            now = given.spans.tensors()
            for name, buffer in self.spans.tensors().items():
                buffer.copy_(now[name])


@dataclass(frozen=True)
class Recording:
    """The buffers that a recorded launch reads, those that it writes, and the call that repeats it."""

    reads: Inputs
    gives: RangeOutput
    again: Again

    def run(self, given: Inputs, count: int) -> RangeOutput:
        """`count`: of inputs, or of tokens where these are answered. What is given is a copy, since the next replay
        writes over the buffers."""
        self.reads.fill(given)
        self.again()
        hidden, head = self.gives.hidden, self.gives.head
        return RangeOutput(
            None if hidden is None else hidden[: given.rows].clone(),
            {block: logits[:count].clone() for block, logits in self.gives.ramps.items()},
            None if head is None else head[:count].clone(),
        )


# Records a stretch on buffers that it makes by the given call. None: not yet, so ask again; an error: it never can.
Recorder = Callable[[BlockRange, Callable[[], Inputs]], Recording | None]


class TorchRecorder:
    """Records the work that torch queues on the device. Other threads may go on meanwhile."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        # Replays follow each other, and what they give is copied at once: they need not have scratch memory each.
        self._scratch = torch.cuda.graph_pool_handle()

    def __call__(self, stretch: BlockRange, buffers: Callable[[], Inputs]) -> Recording:
        reads, graph = buffers(), torch.cuda.CUDAGraph()
        run = partial(self._model.through, stretch, reads.arrays, reads.spans)
        with torch.cuda.device(self._model.device):
            beside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    run()
            here.wait_stream(beside)
            with torch.cuda.graph(graph, pool=self._scratch, capture_error_mode="thread_local"):
                gives = run()
        return Recording(reads, gives, graph.replay)


class _TorchGraphs:
    """The backend `graphs`: torch, recorded."""

    tried_by_auto = True

    def obstacle(self, model: TorchModel, int8: bool) -> str | None:
        return without_cuda(model, "graphs", "torch")

    def serve(self, model: TorchModel, fingerprint: Fingerprint, int8: bool) -> BackedModel:
        return GraphModel(model, TorchRecorder(model))


TORCH_GRAPHS = _TorchGraphs()


def without_cuda(model: TorchModel, backend: str, instead: str) -> str | None:
    """Why a backend that replays CUDA graphs cannot run a network that is not on CUDA."""
    if _has_cuda(model):
        return None
    return f"backend {backend} replays CUDA graphs, and there are none on {model.device.type}: use backend: {instead}"


def _has_cuda(model: TorchModel) -> bool:
    return model.device.type == "cuda"
