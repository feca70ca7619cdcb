"""CUDA graphs for networks on torch: what batches of one shape take is recorded once, then replayed in one call.

Small launches wait for Python to name their kernels one by one; a replay names none. A graph has memory of its own, so
a batch is copied into buffers of the next larger shape, and what it gives is copied out of them.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.models.stretch import Passed, Stretch
from deployments.models.torch_model import TorchModel

log = logging.getLogger(__name__)

MOST = 64  # graphs held by one replica: each has buffers of its own
TOKENS = 32  # lengths are rounded up to multiples of this
WARM_UPS = 3  # before recording, as torch wants it

Again = Callable[[], object]
# Does something, and says how to do it again: from the same memory into the same memory.
Recorder = Callable[[Callable[[], Passed]], tuple[Passed, Again]]


class GraphModel(TorchModel):
    """The same network with the same answers. What cannot be recorded is run as it is."""

    backend = "graphs"
    always_masks = True

    def __init__(self, inner: TorchModel, record: Recorder) -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner = inner
        self._record = record
        self._recordings: dict[Hashable, Recording | None] = {}

    def through(self, stretch: Stretch, arrays: Mapping[str, Tensor], present: Tensor | None) -> Passed:
        inputs = Inputs(arrays, present)
        roomy = inputs.with_room(self._longest())
        key = (stretch, roomy.shapes)
        if key not in self._recordings:
            if len(self._recordings) >= MOST:  # the one that was made first goes
                del self._recordings[next(iter(self._recordings))]
            self._recordings[key] = self._try(stretch, roomy)
        recording = self._recordings[key]
        return recording.run(inputs) if recording else self.inner.through(stretch, arrays, present)

    def _longest(self) -> int | None:
        """More positions than this the network does not know."""
        return getattr(self.encoder, "longest", None)

    def _try(self, stretch: Stretch, roomy: "Inputs") -> "Recording | None":
        try:
            gives, again = self._record(lambda: self.inner.through(stretch, roomy.arrays, roomy.present))
        except RuntimeError:
            log.exception("blocks %s run without a CUDA graph at %s", stretch, roomy.shapes)
            return None
        return Recording(roomy, gives, again)


@dataclass(frozen=True)
class Inputs:
    """What a stretch reads: arrays with one row an input, and for texts which tokens are real."""

    arrays: Mapping[str, Tensor]
    present: Tensor | None

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def tokens(self) -> int | None:
        return None if self.present is None else self.present.shape[1]

    @property
    def shapes(self) -> tuple[tuple[str, torch.Size], ...]:
        return tuple((name, tensor.shape) for name, tensor in sorted(self.arrays.items()))

    def with_room(self, longest: int | None) -> "Inputs":
        """Empty ones of the next larger shape: rows to a power of two, tokens to a multiple."""
        rows = 1 << (self.rows - 1).bit_length()
        if self.present is None:
            return Inputs({name: each.new_zeros((rows, *each.shape[1:])) for name, each in self.arrays.items()}, None)
        tokens = -(-self.present.shape[1] // TOKENS) * TOKENS
        tokens = max(self.present.shape[1], min(tokens, longest or tokens))
        arrays = {name: each.new_zeros((rows, tokens, *each.shape[2:])) for name, each in self.arrays.items()}
        # Nobody may be made of padding alone: there would be nothing to attend to.
        return Inputs(arrays, self.present.new_ones((rows, tokens)))

    def fill(self, given: "Inputs") -> None:
        """In rows beyond those given stands what stood there before: nobody reads it."""
        for name, buffer in self.arrays.items():
            buffer[: given.rows, : given.arrays[name].shape[1]].copy_(given.arrays[name])
        if self.present is not None and given.present is not None:
            self.present[: given.rows] = False
            self.present[: given.rows, : given.tokens].copy_(given.present)


@dataclass(frozen=True)
class Recording:
    """Buffers to read from, buffers that are written, and how to have them written again."""

    reads: Inputs
    gives: Passed
    again: Again

    def run(self, given: Inputs) -> Passed:
        self.reads.fill(given)
        self.again()
        hidden, head = self.gives.hidden, self.gives.head
        return Passed(
            None if hidden is None else self._without_padding(hidden, given),
            {block: logits[: given.rows].clone() for block, logits in self.gives.ramps.items()},
            None if head is None else head[: given.rows].clone(),
        )

    @staticmethod
    def _without_padding(hidden: Tensor, given: Inputs) -> Tensor:
        """A copy: the next replay writes over it."""
        return hidden[: given.rows].clone() if given.tokens is None else hidden[: given.rows, : given.tokens].clone()


def on_cuda(run: Callable[[], Passed]) -> tuple[Passed, Again]:
    """Record what torch queues on the device. Other threads may go on copying meanwhile."""
    beside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        for _ in range(WARM_UPS):
            run()
    here.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gives = run()
    return gives, graph.replay
