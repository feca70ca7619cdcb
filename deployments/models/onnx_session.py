"""One ONNX graph ready to run: tensors are read and given where they lie, on host or device, and never copied."""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from deployments.models.streams import SideStream

log = logging.getLogger(__name__)

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
NOT_RECORDED = -1  # a "gpu_graph_id"


@dataclass(frozen=True)
class Fixed:
    """A launch that reads and writes the same memory each time."""

    reads: Mapping[str, Tensor]
    gives: dict[str, Tensor]
    again: Callable[[], None]


class Session:
    """On CUDA for one thread at a time, on a host for any. `records`: fixed launches are replayed as CUDA graphs."""

    def __init__(self, path: Path, device: torch.device, records: bool = False) -> None:
        self._device, self._where, self._side_stream = device, (device.type, device.index or 0), SideStream(device)
        self._session, self.records = self._open(path, records)
        self._reads = {each.name for each in self._session.get_inputs()}
        self._gives = [each.name for each in self._session.get_outputs()]
        self._unrecorded = run_options(device, NOT_RECORDED if self.records else None)
        self._fixed: dict[Hashable, Fixed] = {}
        self._numbers = count(1)  # 0 is ONNX Runtime's own

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = self._read(inputs)
        binding = self._bound(tensors)
        for name in self._gives:
            binding.bind_output(name, *self._where)
        with self._side_stream.in_turn():
            self._session.run_with_iobinding(binding, self._unrecorded)
        values = binding.get_outputs()
        return {name: from_dlpack(value._ortvalue) for name, value in zip(self._gives, values, strict=True)}

    def fixed(self, inputs: Mapping[str, Tensor]) -> Fixed:
        """A launch for inputs of these shapes. ONNX Runtime keeps its recordings for as long as a session lives, and so
        they are kept here: no shape is recorded twice."""
        key = tuple((name, tensor.shape) for name, tensor in sorted(inputs.items()))
        if key not in self._fixed:
            self._fixed[key] = self._fix(inputs)
        return self._fixed[key]

    def _fix(self, inputs: Mapping[str, Tensor]) -> Fixed:
        reads = self._read(inputs)
        gives = {name: torch.empty_like(tensor) for name, tensor in self.run(reads).items()}
        binding = self._bound(reads)
        for name, tensor in gives.items():
            binding.bind_output(name, *self._where, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        options = run_options(self._device, next(self._numbers) if self.records else None)

        def again() -> None:
            with self._side_stream.in_turn():
                self._session.run_with_iobinding(binding, options)

        again()  # ONNX Runtime repeats it until all memory is there, then records it
        return Fixed(reads, gives, again)

    def _read(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.contiguous() for name, tensor in inputs.items() if name in self._reads}

    def _bound(self, tensors: Mapping[str, Tensor]) -> Any:
        binding = self._session.io_binding()
        for name, tensor in tensors.items():
            binding.bind_input(name, *self._where, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        return binding

    def _open(self, path: Path, records: bool) -> tuple[Any, bool]:
        """A graph with a node that only the host can run cannot be recorded, but it can be run."""
        given = providers(self._device, path.parent, self._side_stream.handle, records)
        try:
            return ort.InferenceSession(str(path), _options(), providers=given), records
        except Exception:
            if not records:
                raise
            log.exception("%s is not recorded as CUDA graphs", path)
            return self._open(path, records=False)


def providers(device: torch.device, cache: Path, stream: int, records: bool) -> list[Provider]:
    """Who computes, the best first: each takes the nodes that it can, and leaves the others to the next.

    >>> providers(torch.device("cpu"), Path("cache"), stream=0, records=False)
    [('CPUExecutionProvider', {})]
    """
    host: Provider = ("CPUExecutionProvider", {})
    if device.type != "cuda":
        return [host]
    common = {"device_id": str(device.index or 0), "user_compute_stream": str(stream)}
    cuda = common | {"arena_extend_strategy": "kSameAsRequested"}
    if records:  # a graph is recorded whole, by one provider
        return [("CUDAExecutionProvider", cuda | {"enable_cuda_graph": "1"}), host]
    return [*_tensorrt(common, cache), ("CUDAExecutionProvider", cuda), host]


def run_options(device: torch.device, graph: int | None) -> Any:
    """`graph`: the number of the recording, of a session that records."""
    options = ort.RunOptions()
    if device.type == "cuda":
        # What follows is queued behind it (`SideStream`): nobody has to wait.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if graph is not None:
            options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


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
