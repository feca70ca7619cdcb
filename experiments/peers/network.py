"""What every peer serves: the network in full, on ONNX Runtime, one thread, in batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BATCH, WAIT_S = 32, 0.002  # the largest batch, and how long a peer waits for it to fill
READY = "ready"


class FullNetwork:
    """Answers a batch of inputs, each with its label. It loads in the process that serves."""

    def __init__(self, folder: str) -> None:
        import torch

        from deployments.models import load
        from deployments.models.backends import make_ready, on_backend
        from deployments.models.served_model import BlockRange

        torch.set_num_threads(1)
        exact = load(folder, device="cpu", dtype="float32")
        self._model = on_backend(exact, folder, "onnx")
        make_ready(self._model, folder, [BlockRange(0, self._model.num_blocks)])

    def labels(self, inputs: Sequence[Any]) -> list[int]:
        batch = self._model.encode(list(inputs))
        exits = self._model.run(batch, self._model.num_blocks, ()).exits
        return [int(label) for _, label in sorted(zip(exits.rows, exits.labels, strict=True))]


def folder_and_port(arguments: Sequence[str]) -> tuple[str, int]:
    """What a peer's program is told."""
    folder, port = arguments
    return str(Path(folder)), int(port)
