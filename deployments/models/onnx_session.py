"""One ONNX graph ready to run: tensors are read and given where they lie, on host or device, and never copied."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_BFLOAT16 = 16  # ONNX's number for what numpy does not have
_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: _BFLOAT16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}
Provider = tuple[str, dict[str, str]]


class Session:
    """Must be used from one thread at a time."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._session = ort.InferenceSession(str(path), _options(), providers=providers(device, path.parent))
        self._where = (device.type, device.index or 0)
        self._reads = {each.name for each in self._session.get_inputs()}
        self._gives = [each.name for each in self._session.get_outputs()]
        self._run_options = ort.RunOptions()
        if device.type == "cuda":  # what follows is queued behind it on the same stream: nobody has to wait
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        binding = self._session.io_binding()
        held = {name: tensor.contiguous() for name, tensor in inputs.items() if name in self._reads}
        for name, tensor in held.items():
            shape = tuple(tensor.shape)
            binding.bind_input(name, *self._where, _ELEMENTS[tensor.dtype], shape, tensor.data_ptr())
        for name in self._gives:
            binding.bind_output(name, *self._where)
        self._session.run_with_iobinding(binding, self._run_options)
        values = binding.get_outputs()
        return {name: from_dlpack(value._ortvalue) for name, value in zip(self._gives, values, strict=True)}


def providers(device: torch.device, cache: Path) -> list[Provider]:
    """Who computes, the best first: each takes the nodes that it can, and leaves the others to the next.

    >>> providers(torch.device("cpu"), Path("cache"))
    [('CPUExecutionProvider', {})]
    """
    host: Provider = ("CPUExecutionProvider", {})
    if device.type != "cuda":
        return [host]
    # Torch's own stream: what torch has queued is done before, what it queues next comes after.
    common = {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(torch.cuda.current_stream(device).cuda_stream),
    }
    cuda: Provider = ("CUDAExecutionProvider", common | {"arena_extend_strategy": "kSameAsRequested"})
    return [*_tensorrt(common, cache), cuda, host]


def _tensorrt(common: Mapping[str, str], cache: Path) -> list[Provider]:
    """Where its package is installed; its engines take minutes to build, and are kept beside the graph."""
    if find_spec("tensorrt") is None or "TensorrtExecutionProvider" not in ort.get_available_providers():
        return []
    engines = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(cache), "trt_timing_cache_enable": "1"}
    return [("TensorrtExecutionProvider", {**common, **engines})]


def _options() -> Any:
    """As many threads as torch has: what Ray gives a replica. They sleep when idle, since replicas share cores."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options
