"""CUDA graphs that ONNX Runtime records: a session is bound to fixed memory, and replayed there."""

from collections.abc import Callable

from isobatch.deployments.models.cuda_graphs import GraphModel, RangeInputs, Recording, without_cuda
from isobatch.deployments.models.interface import Backend, Fingerprint
from isobatch.deployments.models.onnx_export import graph_inputs, split_graph_inputs
from isobatch.deployments.models.onnx_model import OnnxModel, range_output, unexportable
from isobatch.deployments.models.onnx_ranges import EXCLUSIVE
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel


class OnnxRecorder:
    """Records a block range as soon as it is exported; until then the model serves it unrecorded."""

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
