"""A double of CUDA: it notes what is called, in which order and on which stream. Its memory is that of the host."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobatch.deployments.transport import device_copies

GPU = torch.device("cuda", 0)
LAUNCHES = "launches"  # the name of the stream on which launches compute


OF_VALUES = {"numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"}
OF_COPIES = {"new_tensor"}
OF_SIZES = {"nonzero", "masked_select", "unique", "argwhere", "unique_consecutive", "bincount"}


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    device = GPU

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.__name__ == "index_select":
            on_gpu = {isinstance(each, OnGpu) for each in tensors(args)}
            assert on_gpu == {True}, "rows must be on the device of what they select"
        return super().__torch_function__(function, types, args, kwargs or {})

    def record_stream(self, stream: "Stream") -> None:
        stream.cuda.calls.append(f"memory is kept for {stream.name}")


class Pinned(Tensor):
    """Host memory, of which copies to and from a GPU are noted."""

    cuda: "RecordedCuda"

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(source, OnGpu):
            assert non_blocking, "the host would wait"
            self.cuda.calls.append(f"copy to the host on {self.cuda.current}")
        self.as_subclass(Tensor).copy_(source.as_subclass(Tensor))
        return self

    def to(self, device: Any, *, non_blocking: bool) -> Tensor:
        assert device == GPU
        assert non_blocking, "the host would wait"
        self.cuda.calls.append(f"copy to the device on {self.cuda.current}")
        return self.as_subclass(Tensor).clone().as_subclass(OnGpu)


class Stream:
    def __init__(self, cuda: "RecordedCuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.calls.append(f"{self.name} follows {other.name}")

    def synchronize(self) -> None:
        self.cuda.calls.append(f"host waits for {self.name}")


class RecordedCuda:
    """`streams` are the names of streams that will be made, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, *streams: str) -> None:
        self.calls: list[str] = []
        self.current, names = LAUNCHES, iter(streams)
        device_copies.side_stream.cache_clear()
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self, next(names)))
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, LAUNCHES))
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=self._recorded, synchronize=self._waited))
        patch.setattr(device_copies, "pinned", self._pinned)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def _recorded(self, stream: Stream) -> None:
        self.calls.append(f"event on {stream.name}")

    def _waited(self) -> None:
        self.calls.append("host waits for an event")

    def _pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        memory = torch.full(shape if isinstance(shape, tuple) else (shape,), 42, dtype=dtype).as_subclass(Pinned)
        memory.cuda = self
        return memory


class Reads(TorchFunctionMode):
    """Notes the calls for which a host must know a value of a tensor, or a size that depends on values, and those that
    copy a list to a tensor's device, from memory that is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = function.__name__, kwargs or {}
        by_mask = name in ("__getitem__", "__setitem__") and any(each.dtype == torch.bool for each in tensors(args[1]))
        by_counts = name == "repeat_interleave" and bool(tensors(args[1:])) and "output_size" not in given
        by_list = name in ("__getitem__", "__setitem__") and any(isinstance(each, list) for each in parts(args[1]))
        if name in OF_VALUES | OF_SIZES | OF_COPIES or by_mask or by_counts or by_list:
            self.found.append(name)
        return function(*args, **given)


def tensors(values: Any) -> Iterable[Tensor]:
    return [each for each in parts(values) if isinstance(each, Tensor)]


def parts(values: Any) -> Iterable[Any]:
    return values if isinstance(values, tuple) else [values]
