"""Runs any torch network on ONNX Runtime. Torch runs block ranges that are not exported yet, and decides on exits."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from isobatch.deployments.folders import cache_directory
from isobatch.deployments.models.cuda_graphs import GraphModel, RangeInputs, Recording, without_cuda
from isobatch.deployments.models.onnx_export import AFTER, HEAD, HIDDEN, graph_inputs, ramp_name, split_graph_inputs
from isobatch.deployments.models.onnx_ranges import EXCLUSIVE, ExportedRanges, GraphSource
from isobatch.deployments.models.served_model import Backend, BlockRange, Fingerprint, RangeOutput
from isobatch.deployments.models.spans import Integers, Spans, in_bands
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.progress import show
from isobatch.profiles.model import Batch

DTYPES = (torch.float32, torch.float16)  # precisions that ONNX Runtime runs
# Bands of texts in every graph, used or not: more bands cost small launches more than they save in large ones.
BANDS = 2


class OnnxModel(TorchModel):
    """The same network with the same answers. All blocks of a launch are one graph, wherever the plan cuts."""

    backend = "onnx"
    exports = True

    def __init__(
        self,
        inner: TorchModel,
        fingerprint: str,
        int8: bool = False,
        cache: Path | None = None,
        records: bool = False,
    ) -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner = inner
        source = GraphSource(fingerprint, inner.device, inner.dtype, int8)
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
        arrays, spans = self._enter(example)
        block, wanted = 0, sorted(each for each in set(block_ranges) if not self.exported.get(each))
        for block_range in show(wanted, "exporting to ONNX"):
            if block_range.start > block:
                arrays = _hidden(self.inner.through(BlockRange(block, block_range.start), arrays, spans))
                block = block_range.start
            self.exported.make(block_range, graph_inputs(arrays, spans))

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Export all blocks first, so that the features do not depend on how far exporting has come."""
        self.prepare([BlockRange(block, block + 1) for block in range(self.num_blocks)], batch)
        return super().features(batch)

    def through(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        inputs = graph_inputs(arrays, spans)
        if session := self.exported.get(block_range):
            return range_output(session.run(inputs), block_range)
        self.exported.request(block_range, inputs)
        return self._piecewise(block_range, arrays, spans)

    def _piecewise(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        """Run a block range with the exported ranges that are ready, and with torch in between."""
        block, logits, head = block_range.start, dict[int, Tensor](), None
        while block < block_range.stop:
            output, block = self._next(block_range, block, arrays, spans)
            logits |= {ramp: ramp_logits for ramp, ramp_logits in output.ramps.items() if ramp in block_range.ramps}
            arrays, head = _hidden(output), output.head
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
    """The output of a block range from the outputs of its graph."""
    ramps = {block: outputs[ramp_name(block)] for block in block_range.ramps}
    return RangeOutput(outputs.get(AFTER), ramps, outputs.get(HEAD))


def _hidden(output: RangeOutput) -> Mapping[str, Tensor]:
    return {} if output.hidden is None else {HIDDEN: output.hidden}


class OnnxRecorder:
    """Records a block range as soon as it is exported, on a session that is bound to fixed memory and replayed there.
    Until then the model serves it unrecorded."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model

    def __call__(self, block_range: BlockRange, buffers: Callable[[], RangeInputs]) -> Recording | None:
        session = self._model.exported.get(block_range)
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
    return GraphModel(exported, OnnxRecorder(exported))


ONNX_GRAPHS = Backend(
    _serve, lambda model, int8: without_cuda(model, "onnx-graphs", "onnx") or unexportable(model, int8)
)
