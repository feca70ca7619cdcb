"""CUDA graphs that ONNX Runtime records: a session is bound to fixed memory, and run again."""

from collections.abc import Callable

from deployments.models.cuda_graphs import GraphModel, Inputs, Recording, without_cuda
from deployments.models.interface import BackedModel, BlockRange, Fingerprint
from deployments.models.onnx_export import as_given, as_read
from deployments.models.onnx_model import OnnxModel, as_passed, unexportable
from deployments.models.onnx_pieces import UNDISTURBED
from deployments.models.torch_model import TorchModel


class OnnxRecorder:
    """Records a stretch as soon as it is exported; until then the model serves it unrecorded."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model

    def __call__(self, stretch: BlockRange, buffers: Callable[[], Inputs]) -> Recording | None:
        session = self._model.pieces.get(stretch)
        if session is None or not UNDISTURBED.acquire(blocking=False):
            return None
        try:
            if not session.records:
                raise RuntimeError("ONNX Runtime cannot record it: part of it runs on the host")
            reads = buffers()
            read = as_read(reads.arrays, reads.spans)
            fixed = session.fixed(read)
        finally:
            UNDISTURBED.release()
        return Recording(Inputs(*as_given({**read, **fixed.reads})), as_passed(fixed.gives, stretch), fixed.again)


class _OnnxGraphs:
    """The backend `onnx-graphs`: ONNX Runtime, recorded."""

    tried_by_auto = True

    def obstacle(self, model: TorchModel, int8: bool) -> str | None:
        return without_cuda(model, "onnx-graphs", "onnx") or unexportable(model, int8)

    def serve(self, model: TorchModel, fingerprint: Fingerprint, int8: bool) -> BackedModel:
        exported = OnnxModel(model, fingerprint(model), int8, records=True)
        return GraphModel(exported, OnnxRecorder(exported))


ONNX_GRAPHS = _OnnxGraphs()
