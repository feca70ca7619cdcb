"""Runs any torch network on ONNX Runtime. Torch runs block ranges that are not exported yet, and decides on exits.

A block range is exported once per machine, cached on disk, and shared by all replicas.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import onnxruntime as ort
import torch
from torch import Tensor

from isobatch.deployments.folders import cache_directory, locked, make_room, replacing
from isobatch.deployments.models import checkpoint
from isobatch.deployments.models.cuda_graphs import GraphModel, RangeInputs, Recording, without_cuda
from isobatch.deployments.models.interface import Backend, Fingerprint
from isobatch.deployments.models.onnx_export import (
    AFTER,
    HEAD,
    HIDDEN,
    OPSET,
    Compute,
    export,
    graph_inputs,
    in_8_bits,
    ramp_name,
    split_graph_inputs,
)
from isobatch.deployments.models.onnx_session import Session
from isobatch.deployments.models.ramps import WEIGHTS
from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.deployments.models.spans import Integers, Spans, in_bands
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.progress import show
from isobatch.profiles.model import Batch

log = logging.getLogger(__name__)

# Part of every cache key. Raise it when a change to exporting changes the graphs.
FORMAT = "7"
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
    """A hash of the weights, including those of ramps, but not of the thresholds: torch decides on exits."""
    folder = checkpoint.locate(directory)
    digest = sha256(checkpoint.fingerprint(folder).encode())
    if (weights := folder / WEIGHTS).is_file():
        digest.update(weights.read_bytes())
    rules = model.ramps.rules
    digest.update(repr([rules.head_temperature, *((rule.block, rule.temperature) for rule in rules.ramps)]).encode())
    return digest.hexdigest()


class ExportedRanges:
    """The block ranges that are ready to run. Requested ranges are exported on a background thread."""

    def __init__(self, compute: Compute, source: GraphSource, cache: Path, records: bool) -> None:
        self._compute, self.source, self.cache, self.records = compute, source, cache, records
        self._ready: dict[BlockRange, Session] = {}
        self.requested: dict[BlockRange, Future[None]] = {}  # those that were needed before they were exported
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="onnx")

    def get(self, block_range: BlockRange) -> Session | None:
        return self._ready.get(block_range)

    def longest_from(self, start: int, wanted: BlockRange) -> tuple[BlockRange, Session] | None:
        """The longest ready range that begins at this block and can be a part of the wanted range."""
        fitting = [ready for ready in list(self._ready) if ready.start == start and ready.covers(wanted)]
        longest = max(fitting, default=None, key=lambda block_range: block_range.stop)
        return None if longest is None else (longest, self._ready[longest])

    def holds(self, wanted: BlockRange) -> bool:
        """Whether ready ranges make up the wanted one. A session of its own would hold all weights a second time."""
        block = wanted.start
        while block < wanted.stop and (longest := self.longest_from(block, wanted)):
            block = longest[0].stop
        return block == wanted.stop

    def make(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        """Export a block range and open its session; returns when it is ready."""
        if block_range not in self._ready:
            if len(self._ready) >= MAX_SESSIONS:  # the oldest session goes, and may be requested again
                first = next(iter(self._ready))
                self.requested.pop(first, None)
                del self._ready[first]
            with EXCLUSIVE:
                self._ready[block_range] = Session(self._file(block_range, inputs), self.source.device, self.records)

    def request(self, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> None:
        """Export a block range in the background, once. Torch runs the range until then, or for good if this fails."""
        if block_range not in self.requested:
            example = {name: tensor[:1].clone() for name, tensor in inputs.items()}
            self.requested[block_range] = self._thread.submit(self._try, block_range, example)

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


DTYPES = (torch.float32, torch.float16)  # precisions that ONNX Runtime runs
# Bands of texts in every graph, used or not: more bands cost small launches more than they save in large ones.
BANDS = 2


class OnnxModel(TorchModel):
    """The same network with the same answers. All blocks of a launch are one graph, wherever the plan cuts."""

    backend = "onnx"
    exports = True

    def __init__(
        self, inner: TorchModel, fingerprint: str, int8: bool = False, cache: Path | None = None, records: bool = False
    ) -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner = inner
        source = GraphSource(fingerprint, inner.device, inner.dtype, int8)
        self._warms_up = False
        self._bands = 1 if records else BANDS  # a recording has one shape
        self.exported = ExportedRanges(inner.compute, source, cache or cache_directory() / "onnx", records)

    @property
    def exact(self) -> TorchModel:
        return self.inner.exact

    def _spans(self, lengths: Integers) -> Spans:
        """A fixed number of bands, so that one graph serves texts of any lengths."""
        return in_bands(lengths, self.device, self._bands)

    @torch.inference_mode()
    def prepare(self, block_ranges: Iterable[BlockRange], example: Batch) -> None:
        wanted = sorted(each for each in set(block_ranges) if not self.exported.get(each))
        for block_range in show(wanted, "exporting to ONNX"):
            inputs = graph_inputs(*self._enter(self._made_up(block_range.start, example)))
            self.exported.make(block_range, inputs)
        self.anatomy.release()  # sessions have weights of their own

    def warm_up(self, start: int, stops: Iterable[int], ramps: Collection[int], example: Batch) -> None:
        """Also export the block ranges of these launches, which a plan will have, in the background."""
        self._warms_up = True
        try:
            super().warm_up(start, stops, ramps, example)
        finally:
            self._warms_up = False

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Export all blocks first, so that the features do not depend on how far exporting has come."""
        self.prepare([BlockRange(block, block + 1) for block in range(self.num_blocks)], batch)
        return super().features(batch)

    def through(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        inputs = graph_inputs(arrays, spans)
        if session := self.exported.get(block_range):
            return range_output(session.run(inputs), block_range)
        if self._warms_up or self.exported.records or not self.exported.holds(block_range):
            self.exported.request(block_range, inputs)
        return self._piecewise(block_range, arrays, spans)

    def _piecewise(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        """Run a block range with the exported ranges that are ready, and with torch in between."""
        block, logits, head = block_range.start, dict[int, Tensor](), None
        while block < block_range.stop:
            output, block = self._next(block_range, block, arrays, spans)
            logits |= {ramp: ramp_logits for ramp, ramp_logits in output.ramps.items() if ramp in block_range.ramps}
            arrays, head = {} if output.hidden is None else {HIDDEN: output.hidden}, output.head
        return RangeOutput(arrays.get(HIDDEN), logits, head)

    def _next(
        self, block_range: BlockRange, start: int, arrays: Mapping[str, Tensor], spans: Spans | None
    ) -> tuple[RangeOutput, int]:
        """The output of the longest exported range from here, or of the next block on torch, and where it ends."""
        if longest := self.exported.longest_from(start, block_range):
            exported, session = longest
            return range_output(session.run(graph_inputs(arrays, spans)), exported), exported.stop
        block = BlockRange(start, start + 1, tuple(ramp for ramp in block_range.ramps if ramp == start))
        return self.inner.through(block, arrays, spans), start + 1


def unexportable(model: TorchModel, int8: bool) -> str | None:
    """Why ONNX Runtime cannot run a network in this precision on this device."""
    if model.dtype not in DTYPES:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"ONNX Runtime does not run {dtype}: use float16 or float32, or backend: torch"
    if int8 and model.device.type != "cpu":
        return f"dtype int8 is for CPUs, not for {model.device.type}: use float16"
    return None


ONNX = Backend(lambda model, fingerprint, int8: OnnxModel(model, fingerprint(model), int8), unexportable)


def range_output(outputs: Mapping[str, Tensor], block_range: BlockRange) -> RangeOutput:
    ramps = {block: outputs[ramp_name(block)] for block in block_range.ramps}
    return RangeOutput(outputs.get(AFTER), ramps, outputs.get(HEAD))


def record_exported(model: OnnxModel, block_range: BlockRange, buffers: Callable[[], RangeInputs]) -> Recording | None:
    """Record a block range as soon as it is exported, on a session that is bound to fixed memory and replayed there.
    Until then the model serves it unrecorded."""
    session = model.exported.get(block_range)
    if session is None or not EXCLUSIVE.acquire(blocking=False):
        return None
    try:
        if not session.records:
            raise RuntimeError("ONNX Runtime cannot record it: part of it runs on the host")
        range_inputs = buffers()
        inputs = graph_inputs(range_inputs.arrays, range_inputs.spans)
        fixed = session.fixed(inputs)
    finally:
        EXCLUSIVE.release()
    return Recording(
        RangeInputs(*split_graph_inputs({**inputs, **fixed.inputs})),
        range_output(fixed.outputs, block_range),
        fixed.replay,
    )


def _serve(model: TorchModel, fingerprint: Fingerprint, int8: bool) -> GraphModel:
    exported = OnnxModel(model, fingerprint(model), int8, records=True)
    return GraphModel(exported, partial(record_exported, exported))


ONNX_GRAPHS = Backend(
    _serve, lambda model, int8: without_cuda(model, "onnx-graphs", "onnx") or unexportable(model, int8)
)
