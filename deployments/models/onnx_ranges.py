"""Block ranges of a network as ONNX graphs: exported once per machine, cached on disk, shared by all replicas."""

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

from isobatch.deployments.folders import locked, make_room, replacing
from isobatch.deployments.models import checkpoint
from isobatch.deployments.models.onnx_export import OPSET, Compute, export, in_8_bits
from isobatch.deployments.models.onnx_session import Session
from isobatch.deployments.models.ramps import WEIGHTS
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel

log = logging.getLogger(__name__)

# Part of every cache key. Raise it when a change to exporting changes the graphs.
FORMAT = "3"
LIMIT_BYTES = 16 << 30  # the size of the cache: the graphs of a large network take some GiB per block range
MAX_SESSIONS = 64  # sessions of one replica: each holds the weights of its blocks
GRAPH = "graph.onnx"  # the name of a graph's file in its cache entry

# A thread holds this lock while it opens a session or records a CUDA graph: ONNX Runtime records in a mode in which an
# allocation on a device by another thread of the process makes both fail.
EXCLUSIVE = Lock()


@dataclass(frozen=True)
class GraphSource:
    """Everything about a network that its graphs depend on: weights (by fingerprint), device, and precision."""

    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    int8: bool = False

    def key(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> str:
        """The name of a block range's graph in the cache: equal for all replicas that would export the same graph."""
        reads = sorted((name, str(tensor.dtype), tensor.ndim) for name, tensor in inputs.items())
        made_by = [FORMAT, OPSET, version("torch"), version("transformers"), ort.__version__]
        parts = [self.fingerprint, self.device.type, self.dtype, self.int8, block_range, reads, made_by]
        return sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def fingerprint(directory: str | Path, model: TorchModel) -> str:
    """A hash of the weights, including those of ramps. Thresholds are not part of it, as torch decides on exits."""
    folder = checkpoint.locate(directory)
    digest = sha256(checkpoint.fingerprint(folder).encode())
    if (weights := folder / WEIGHTS).is_file():
        digest.update(weights.read_bytes())
    rules = model.ramps.rules
    digest.update(repr([rules.head_temperature, *((rule.block, rule.temperature) for rule in rules.ramps)]).encode())
    return digest.hexdigest()


class ExportedRanges:
    """The block ranges that are ready to run. Requested ranges are exported on a background thread."""

    def __init__(self, compute: Compute, source: GraphSource, cache: Path, records: bool = False) -> None:
        self._compute, self.source, self.cache, self._records = compute, source, cache, records
        self._ready: dict[BlockRange, Session] = {}
        self._exports: dict[BlockRange, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="onnx")

    def get(self, block_range: BlockRange) -> Session | None:
        return self._ready.get(block_range)

    def longest_from(self, start: int, wanted: BlockRange) -> tuple[BlockRange, Session] | None:
        """The longest ready range that begins at this block and can be a part of the wanted range."""
        fitting = [ready for ready in list(self._ready) if ready.start == start and ready.covers(wanted)]
        longest = max(fitting, default=None, key=lambda block_range: block_range.stop)
        return None if longest is None else (longest, self._ready[longest])

    def make(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        """Export a block range and open its session; returns when it is ready."""
        if block_range not in self._ready:
            if len(self._ready) >= MAX_SESSIONS:  # the oldest session goes, and may be requested again
                first = next(iter(self._ready))
                self._exports.pop(first, None)
                del self._ready[first]
            with EXCLUSIVE:
                self._ready[block_range] = Session(self._file(block_range, inputs), self.source.device, self._records)

    def request(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        """Export a block range in the background, once. Torch runs the range until then, or for good if this fails."""
        if block_range not in self._exports:
            example = {name: tensor[:1].clone() for name, tensor in inputs.items()}
            self._exports[block_range] = self._thread.submit(self._try, block_range, example)

    @property
    def requested(self) -> frozenset[BlockRange]:
        """The block ranges that were needed before they were exported."""
        return frozenset(self._exports)

    def wait(self) -> None:
        """Return when all requested exports have finished or failed."""
        for pending in list(self._exports.values()):
            pending.result()

    def _try(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        try:
            self.make(block_range, inputs)
        except Exception:
            log.exception("blocks %s stay on torch: they could not be exported to ONNX", block_range)

    def _file(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> Path:
        """The graph's file. The first replica that needs it exports it, and the others wait."""
        entry = self.cache / self.source.key(block_range, inputs)
        with locked(entry):
            if not entry.is_dir():
                make_room(self.cache, 0, LIMIT_BYTES)
                with replacing(entry) as draft:
                    export(self._compute, block_range, inputs, draft / GRAPH)
                    if self.source.int8:
                        in_8_bits(draft / GRAPH)
            entry.touch()
        return entry / GRAPH
