"""The copies of launches between host and device. On a GPU they go through pinned memory, so that the host continues
while the GPU copies; on a CPU nothing is copied.

The arrays of a launch itself are copied on the stream of its work. Survivors travel on streams of their own, one each
way, and launches compute meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PendingCopy = Callable[[], NDArray[Any]]  # waits for a copy to the host that has begun
ALIGNMENT = 64  # bytes: kernels may read several elements at once


def to_device(arrays: Sequence[Any], device: torch.device, beside: bool = False) -> list[Tensor]:
    """Arrays in host memory on a device, by one copy for all. The host continues; work queued later finds them there.

    With `beside`, the copy does not wait for launches, and this returns when it is done: other threads may use it then.
    """
    # `from_numpy` takes a third of the time of `as_tensor`.
    tensors = [torch.from_numpy(each) if isinstance(each, np.ndarray) else torch.as_tensor(each) for each in arrays]
    if device.type != "cuda":
        return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]
    starts = np.cumsum([0, *(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)])
    host = pinned(int(starts[-1]), torch.uint8)
    for tensor, part in zip(tensors, _parts(host, starts, tensors), strict=True):
        part.copy_(tensor)
    if not beside:
        return _parts(host.to(device, non_blocking=True), starts, tensors)
    stream = side_stream(device, "in")
    with torch.cuda.stream(stream):
        there = host.to(device, non_blocking=True)
    there.record_stream(torch.cuda.current_stream(device))  # its memory is not used again before launches have read it
    stream.synchronize()
    return _parts(there, starts, tensors)


def _parts(whole: Tensor, starts: NDArray[np.int64], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of these types and shapes in one tensor of bytes."""
    places = zip(starts.tolist(), like, strict=False)
    return [whole[start : start + each.nbytes].view(each.dtype).view(each.shape) for start, each in places]


def to_host(tensor: Tensor, beside: bool = False) -> PendingCopy:
    """Begin a copy into pinned memory. The host continues meanwhile, and work that is queued later runs after the copy.

    With `beside`, work that is queued later does not wait for the copy.
    """
    if tensor.device.type == "cpu":
        return tensor.numpy
    host, launches = pinned(tuple(tensor.shape), tensor.dtype), torch.cuda.current_stream(tensor.device)
    stream = side_stream(tensor.device, "out") if beside else launches
    if beside:
        stream.wait_stream(launches)
        tensor.record_stream(stream)  # its memory is not used again before it has been copied
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(stream)

    def wait() -> NDArray[Any]:
        arrived.synchronize()
        return host.numpy()

    return wait


@cache
def side_stream(device: torch.device, direction: str) -> Any:
    """The stream of all survivors that come to a GPU (`in`) or leave it (`out`): it does both at once."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def pinned(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU reads and writes by itself. Only the first allocation takes long: torch uses the memory
    again, once the copies that were queued with it are done."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
