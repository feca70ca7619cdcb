"""One ONNX graph ready to run: it reads and writes tensors in place, on host or device, without copies."""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from isobatch.profiles.errors import UserError

log = logging.getLogger(__name__)

_BFLOAT16 = 16  # ONNX's number for the type, which numpy does not have
_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: _BFLOAT16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}
Provider = tuple[str, dict[str, str]]
CUDA_PROVIDER = "CUDAExecutionProvider"
NOT_RECORDED = -1  # the "gpu_graph_id" of a launch that ONNX Runtime does not record
# On a CPU, ONNX Runtime 1.31 adds and normalizes in one node several times as slowly as in two.
SLOW_ON_CPU = ["SkipLayerNormFusion"]


class SideStream:
    """A stream for a library that must not queue its work on torch's stream. A CPU has no streams and needs none.

    Torch's stream is usually the default one, whose handle is 0. ONNX Runtime takes 0 for "no stream" and would compute
    on a stream that is not in order with torch's. Also, nothing can be recorded on the default stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream if self._stream else 0

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Work queued inside runs after all work that torch has queued, and before work that it queues later."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            yield
        finally:
            current.wait_stream(self._stream)


@dataclass(frozen=True)
class FixedLaunch:
    """A launch that reads and writes the same memory each time."""

    inputs: Mapping[str, Tensor]
    outputs: dict[str, Tensor]
    replay: Callable[[], None]


class Session:
    """A graph that one thread at a time may run on CUDA, any number on a CPU.

    `records`: fixed launches are replayed as CUDA graphs.
    """

    def __init__(self, path: Path, device: torch.device, records: bool = False) -> None:
        self._device, self._location, self._side_stream = device, (device.type, device.index or 0), SideStream(device)
        self._session, self.records = self._open(path, records)
        self._input_names = {each.name for each in self._session.get_inputs()}
        self._output_names = [each.name for each in self._session.get_outputs()]
        self._unrecorded = run_options(device, NOT_RECORDED if self.records else None)
        self._fixed: dict[Hashable, FixedLaunch] = {}
        self._numbers = count(1)  # ONNX Runtime uses 0 itself

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = self._needed(inputs)
        if self._device.type != "cpu":
            return self._bound(tensors)
        # Arrays of numpy are read and given without copies, too, and cost ONNX Runtime less time than bound tensors.
        arrays = self._session.run(self._output_names, {name: each.numpy() for name, each in tensors.items()})
        return dict(zip(self._output_names, map(torch.from_numpy, arrays), strict=True))

    def _bound(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        binding = self._binding(tensors)
        for name in self._output_names:
            binding.bind_output(name, *self._location)
        with self._side_stream.in_turn():
            self._session.run_with_iobinding(binding, self._unrecorded)
        values = binding.get_outputs()
        outputs = (in_torchs_memory(from_dlpack(value._ortvalue)) for value in values)
        return dict(zip(self._output_names, outputs, strict=True))

    def fixed(self, inputs: Mapping[str, Tensor]) -> FixedLaunch:
        """The launch for inputs of these shapes. Each shape is recorded once, as ONNX Runtime never frees a recording
        while its session lives."""
        key = tuple((name, tensor.shape) for name, tensor in sorted(inputs.items()))
        if key not in self._fixed:
            self._fixed[key] = self._record(inputs)
        return self._fixed[key]

    def _record(self, inputs: Mapping[str, Tensor]) -> FixedLaunch:
        buffers = self._needed(inputs)
        outputs = {name: torch.empty_like(tensor) for name, tensor in self._bound(buffers).items()}
        binding = self._binding(buffers)
        for name, tensor in outputs.items():
            binding.bind_output(name, *self._location, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        options = run_options(self._device, next(self._numbers) if self.records else None)

        def replay() -> None:
            with self._side_stream.in_turn():
                self._session.run_with_iobinding(binding, options)

        replay()  # ONNX Runtime repeats the first launch until all memory is allocated, then records it
        return FixedLaunch(buffers, outputs, replay)

    def _needed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.contiguous() for name, tensor in inputs.items() if name in self._input_names}

    def _binding(self, tensors: Mapping[str, Tensor]) -> Any:
        binding = self._session.io_binding()
        for name, tensor in tensors.items():
            binding.bind_input(name, *self._location, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        return binding

    def _open(self, path: Path, records: bool) -> tuple[Any, bool]:
        """A graph with a node that only the host can run cannot be recorded, but it can be run."""
        given = providers(self._device, self._side_stream.handle, records)
        try:
            slow = SLOW_ON_CPU if self._device.type == "cpu" else []
            session = ort.InferenceSession(str(path), _options(), providers=given, disabled_optimizers=slow)
        except Exception:
            if not records:
                raise
            log.exception("%s is not recorded as CUDA graphs", path)
            return self._open(path, records=False)
        check_providers(self._device, session.get_providers())
        return session, records


def in_torchs_memory(output: Tensor) -> Tensor:
    """An output of ONNX Runtime, on a GPU as a copy: ONNX Runtime uses freed memory again at once, and `record_stream`
    does not keep memory that is not torch's. A copy of survivors that leave on another stream could come too late."""
    return output.clone() if output.device.type == "cuda" else output


def providers(device: torch.device, stream: int, records: bool) -> list[Provider]:
    """ONNX Runtime's execution providers, the fastest first: each runs the nodes that it can, the next one the others.

    TensorRT is not among them: it builds an engine for each new shape, which takes tens of seconds.

    >>> providers(torch.device("cpu"), stream=0, records=False)
    [('CPUExecutionProvider', {})]
    """
    host: Provider = ("CPUExecutionProvider", {})
    if device.type != "cuda":
        return [host]
    cuda = {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",  # in float32, torch does not round factors to TF32 either
    }
    if records:  # only a graph that a single provider runs can be recorded
        cuda["enable_cuda_graph"] = "1"
    return [(CUDA_PROVIDER, cuda), host]


def check_providers(device: torch.device, loaded: Sequence[str]) -> None:
    """Raise UserError where ONNX Runtime would compute on the host: it does so silently if CUDA cannot be loaded."""
    if device.type == "cuda" and CUDA_PROVIDER not in loaded:
        raise UserError(
            f"ONNX Runtime cannot use {device}: it loaded only {', '.join(loaded)}. 'isobatch doctor' says what is "
            "missing; backend: torch runs without it"
        )


def run_options(device: torch.device, graph: int | None) -> Any:
    """Options of a launch. `graph`: the number of its recording, in a session that records."""
    options = ort.RunOptions()
    if device.type == "cuda":
        # The host need not wait: later work is queued behind this launch (`SideStream`).
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if graph is not None:
            options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def _options() -> Any:
    """As many threads as torch has, which Ray sets for a replica. Idle threads sleep, as replicas share cores."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options
