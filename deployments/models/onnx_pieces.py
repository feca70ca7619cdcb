"""A network's ONNX pieces: made once per machine, kept on disk by content, shared by all replicas."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import onnxruntime as ort
import torch
from torch import Tensor

from deployments.folders import alone, make_room, whole
from deployments.models import checkpoint
from deployments.models.interface import BlockRange
from deployments.models.onnx_export import OPSET, Compute, export
from deployments.models.onnx_int8 import in_8_bits
from deployments.models.onnx_session import Session
from deployments.models.ramps import WEIGHTS
from deployments.models.torch_model import TorchModel

log = logging.getLogger(__name__)

FORMAT = "3"  # to be raised whenever exporting changes what is made
LIMIT_BYTES = 16 << 30
MOST = 64  # sessions kept by one replica: each holds the weights of its blocks
GRAPH = "graph.onnx"

# A thread must hold this to make a piece, or to record a CUDA graph: ONNX Runtime records in a mode in which no other
# thread of the process may allocate memory on a device, or both would fail.
UNDISTURBED = Lock()


@dataclass(frozen=True)
class Origin:
    """What pieces are made from: the weights by their fingerprint, where they will run, and whether in 8 bits."""

    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    int8: bool = False

    def key(self, stretch: BlockRange, inputs: Mapping[str, Tensor]) -> str:
        """A name for the piece of this stretch, which is the same for all that would be made the same."""
        reads = sorted((name, str(tensor.dtype), tensor.ndim) for name, tensor in inputs.items())
        made_by = [FORMAT, OPSET, version("torch"), version("transformers"), ort.__version__]
        parts = [self.fingerprint, self.device.type, self.dtype, self.int8, stretch, reads, made_by]
        return sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def fingerprint(directory: str | Path, model: TorchModel) -> str:
    """A hash of the weights, those of the ramps too. Thresholds are no part of it, since torch decides who leaves."""
    folder = checkpoint.locate(directory)
    digest = sha256(checkpoint.fingerprint(folder).encode())
    if (weights := folder / WEIGHTS).is_file():
        digest.update(weights.read_bytes())
    rules = model.ramps.rules
    digest.update(repr([rules.head_temperature, *((rule.block, rule.temperature) for rule in rules.ramps)]).encode())
    return digest.hexdigest()


class Pieces:
    """The stretches that are ready to run. Others are made on a thread of its own, unless somebody waits for them."""

    def __init__(self, compute: Compute, origin: Origin, cache: Path, records: bool = False) -> None:
        self._compute, self.origin, self.cache, self._records = compute, origin, cache, records
        self._ready: dict[BlockRange, Session] = {}
        self._coming: dict[BlockRange, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="onnx")

    def get(self, stretch: BlockRange) -> Session | None:
        return self._ready.get(stretch)

    def within(self, wanted: BlockRange, start: int) -> tuple[BlockRange, Session] | None:
        """The longest ready piece of what is wanted that begins at this block."""
        fitting = [each for each in list(self._ready) if each.start == start and each.covers(wanted)]
        longest = max(fitting, default=None, key=lambda each: each.stop)
        return None if longest is None else (longest, self._ready[longest])

    def make(self, stretch: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        """Make a piece; returns when it is ready."""
        if stretch not in self._ready:
            if len(self._ready) >= MOST:  # the one that was made first goes, and may be ordered again
                first = next(iter(self._ready))
                self._coming.pop(first, None)
                del self._ready[first]
            with UNDISTURBED:
                self._ready[stretch] = Session(self._file(stretch, inputs), self.origin.device, self._records)

    def order(self, stretch: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        """Have a piece made in the background. It is tried once; torch serves it until it is ready, or for good."""
        if stretch not in self._coming:
            example = {name: tensor[:1].clone() for name, tensor in inputs.items()}
            self._coming[stretch] = self._thread.submit(self._try, stretch, example)

    @property
    def ordered(self) -> frozenset[BlockRange]:
        """The pieces that were asked for before they were there."""
        return frozenset(self._coming)

    def wait(self) -> None:
        """Return when all that was ordered is there, or has failed."""
        for coming in list(self._coming.values()):
            coming.result()

    def _try(self, stretch: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        try:
            self.make(stretch, inputs)
        except Exception:
            log.exception("blocks %s stay on torch: they could not be exported to ONNX", stretch)

    def _file(self, stretch: BlockRange, inputs: Mapping[str, Tensor]) -> Path:
        """The graph's file. The replica that needs it first makes it, and the others wait."""
        entry = self.cache / self.origin.key(stretch, inputs)
        with alone(entry):
            if not entry.is_dir():
                make_room(self.cache, 0, LIMIT_BYTES)
                with whole(entry) as draft:
                    export(self._compute, stretch, inputs, draft / GRAPH)
                    if self.origin.int8:
                        in_8_bits(draft / GRAPH)
            entry.touch()
        return entry / GRAPH
