"""The copies of launches between host and device. On a GPU they go through pinned memory, for which neither side waits
longer than it must; on a CPU nothing is copied.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PendingCopy = Callable[[], NDArray[np.float32]]  # waits for a copy to the host that has begun
ALIGNMENT = 64  # bytes: kernels may read several elements at once


def to_device(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """The arrays on a device, by one copy for all. The host goes on; work queued later finds them there."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)])
    host = pinned(int(starts[-1]), torch.uint8)
    for start, array in zip(starts, arrays, strict=False):
        host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    parts = (there[start : start + array.nbytes] for start, array in zip(starts, arrays, strict=False))
    return [
        part.view(torch.from_numpy(array).dtype).view(array.shape) for part, array in zip(parts, arrays, strict=True)
    ]


def to_host(tensor: Tensor) -> PendingCopy:
    """Begin a copy into pinned memory. The device writes it while the host goes on, ahead of work queued later."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    host = pinned(tuple(tensor.shape), tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> NDArray[np.float32]:
        arrived.synchronize()
        return host.numpy()

    return wait


def pinned(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU reads and writes by itself. Torch reuses it, so only the first allocation takes long, and
    not before the copies that were queued with it are done."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
