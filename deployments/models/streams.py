"""CUDA streams: beside torch's own, in order with it on the device; or one for each thread that computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream for a library that must not queue its work on torch's; on the host there is none, and none is needed.

    Torch's stream is mostly the default one, whose handle is 0. ONNX Runtime takes 0 for "none given" and would compute
    on a stream that is not in order with torch's; and nothing can be recorded on the default stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream if self._stream else 0

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Work that is queued inside comes after all that torch has queued, and before all that it will queue."""
        if self._stream is None:
            yield
            return
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        try:
            yield
        finally:
            here.wait_stream(self._stream)


@contextmanager
def beside_others(device: torch.device, threads: int) -> Iterator[None]:
    """Give a thread that computes while others do a stream of its own, or on the host so many threads to compute with.

    Torch keeps both for each thread.
    """
    torch.set_num_threads(threads)
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def finish(device: torch.device) -> None:
    """Wait for the stream of this thread, so that other threads may use what was made there, and free what was read.

    On the default stream all is in order, whoever queues it.
    """
    if device.type == "cuda":
        here = torch.cuda.current_stream(device)
        if here != torch.cuda.default_stream(device):
            here.synchronize()
