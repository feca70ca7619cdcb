"""CUDA graphs that ONNX Runtime records: a session is bound to fixed memory, and run again."""

from collections.abc import Callable

from deployments.models.graphs import Inputs, Recording
from deployments.models.onnx_export import PRESENT
from deployments.models.onnx_model import OnnxModel, as_passed, as_read
from deployments.models.onnx_pieces import UNDISTURBED
from deployments.models.stretch import Stretch


class OnnxRecorder:
    """What is not exported yet is recorded when it is; the model serves it meanwhile."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model

    def __call__(self, stretch: Stretch, buffers: Callable[[], Inputs]) -> Recording | None:
        session = self._model.pieces.get(stretch)
        if session is None or not UNDISTURBED.acquire(blocking=False):
            return None
        try:
            if not session.records:
                raise RuntimeError("ONNX Runtime cannot record it: part of it runs on the host")
            reads = buffers()
            fixed = session.fixed(as_read(reads.arrays, reads.present))
        finally:
            UNDISTURBED.release()
        arrays = {name: tensor for name, tensor in fixed.reads.items() if name != PRESENT}
        return Recording(Inputs(arrays, fixed.reads.get(PRESENT)), as_passed(fixed.gives, stretch), fixed.again)
