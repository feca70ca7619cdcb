"""CUDA streams: one beside torch's own and in order with it, or one for each thread that computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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


@contextmanager
def beside_others(device: torch.device, threads: int) -> Iterator[None]:
    """Give the current thread its own stream on CUDA, and its number of CPU threads. Torch stores both per thread."""
    torch.set_num_threads(threads)
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def finish(device: torch.device) -> None:
    """Wait for this thread's own stream, so that other threads may use its outputs and free its inputs.

    The default stream needs no wait: the work of all threads is in order there.
    """
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        if current != torch.cuda.default_stream(device):
            current.synchronize()
