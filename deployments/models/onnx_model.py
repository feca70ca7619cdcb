"""Runs any torch network on ONNX Runtime. Torch serves what is not exported yet, and decides who leaves."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deployments.folders import cache_directory
from deployments.models.interface import BackedModel, BlockRange, Fingerprint, RangeOutput
from deployments.models.onnx_export import AFTER, HEAD, HIDDEN, as_read, ramp_name
from deployments.models.onnx_pieces import Origin, Pieces
from deployments.models.spans import Integers, Spans, in_bands
from deployments.models.torch_model import TorchModel
from deployments.progress import show
from profiles.model import Batch

RUNS = (torch.float32, torch.float16)
BANDS = 2  # in every graph, used or not: a third and fourth cost small launches more than they spare large ones


class OnnxModel(TorchModel):
    """The same network with the same answers; a call's blocks are one graph, whatever the plan has cut."""

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
        origin = Origin(fingerprint, inner.device, inner.dtype, int8)
        self._bands = 1 if records else BANDS  # a recording has one shape
        self.pieces = Pieces(inner.compute, origin, cache or cache_directory() / "onnx", records)

    @property
    def exact(self) -> TorchModel:
        return self.inner.exact

    def twin(self) -> TorchModel:
        """On a host threads share sessions. On CUDA a session has one stream, and weights of its own."""
        if self.device.type != "cuda":
            return self
        origin = self.pieces.origin
        return OnnxModel(self.inner, origin.fingerprint, origin.int8, self.pieces.cache)

    def _spans(self, lengths: Integers) -> Spans:
        """One graph serves texts of any lengths."""
        return in_bands(lengths, self.device, self._bands)

    @torch.inference_mode()
    def prepare(self, stretches: Iterable[BlockRange], example: Batch) -> None:
        arrays, spans = self._enter(example)
        at, wanted = 0, sorted(each for each in set(stretches) if not self.pieces.get(each))
        for stretch in show(wanted, "exporting to ONNX"):
            if stretch.start > at:
                arrays = _hidden(self.inner.through(BlockRange(at, stretch.start), arrays, spans))
                at = stretch.start
            self.pieces.make(stretch, as_read(arrays, spans))

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Exports everything first, since ramps that are made from features must not depend on how far exporting is."""
        self.prepare([BlockRange(block, block + 1) for block in range(self.num_blocks)], batch)
        return super().features(batch)

    def through(self, stretch: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        inputs = as_read(arrays, spans)
        if session := self.pieces.get(stretch):
            return as_passed(session.run(inputs), stretch)
        self.pieces.order(stretch, inputs)
        return self._piecewise(stretch, arrays, spans)

    def _piecewise(self, stretch: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        """Run a stretch by the pieces that are ready, and by torch in between."""
        at, logits, head = stretch.start, dict[int, Tensor](), None
        while at < stretch.stop:
            passed, at = self._next(stretch, at, arrays, spans)
            logits |= {block: each for block, each in passed.ramps.items() if block in stretch.ramps}
            arrays, head = _hidden(passed), passed.head
        return RangeOutput(arrays.get(HIDDEN), logits, head)

    def _next(
        self, stretch: BlockRange, at: int, arrays: Mapping[str, Tensor], spans: Spans | None
    ) -> tuple[RangeOutput, int]:
        if found := self.pieces.within(stretch, at):
            piece, session = found
            return as_passed(session.run(as_read(arrays, spans)), piece), piece.stop
        one = BlockRange(at, at + 1, tuple(ramp for ramp in stretch.ramps if ramp == at))
        return self.inner.through(one, arrays, spans), at + 1


class _OnOnnx:
    """The backend `onnx`: ONNX Runtime, one graph a stretch."""

    tried_by_auto = True

    def obstacle(self, model: TorchModel, int8: bool) -> str | None:
        return unexportable(model, int8)

    def serve(self, model: TorchModel, fingerprint: Fingerprint, int8: bool) -> BackedModel:
        return OnnxModel(model, fingerprint(model), int8)


ONNX = _OnOnnx()


def unexportable(model: TorchModel, int8: bool) -> str | None:
    """Why ONNX Runtime cannot run a network in this precision on this device."""
    if model.dtype not in RUNS:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"ONNX Runtime does not run {dtype}: use float16 or float32, or backend: torch"
    if int8 and model.device.type != "cpu":
        return f"dtype int8 is for CPUs, not for {model.device.type}: use float16"
    return None


def as_passed(given: Mapping[str, Tensor], stretch: BlockRange) -> RangeOutput:
    ramps = {block: given[ramp_name(block)] for block in stretch.ramps}
    return RangeOutput(given.get(AFTER), ramps, given.get(HEAD))


def _hidden(passed: RangeOutput) -> Mapping[str, Tensor]:
    return {} if passed.hidden is None else {HIDDEN: passed.hidden}
