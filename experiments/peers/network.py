"""What every peer serves: the network in full, on ONNX Runtime, one thread, in batches."""

import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobatch.profiles.model import Label

BATCH, WAIT_S = 32, 0.002  # the largest batch, and how long a peer waits for it to fill
READY = "ready"


class FullNetwork:
    """Answers a batch of inputs, each with its label. It loads in the process that serves.

    `exits_dtype`: a precision, in which the network runs on torch with its exits, so that a batch shrinks at each ramp.
    """

    def __init__(self, folder: str, exits_dtype: str = "") -> None:
        import torch

        from isobatch.deployments.models import load
        from isobatch.deployments.models.backends import make_ready, on_backend
        from isobatch.deployments.models.served_model import BlockRange

        torch.set_num_threads(1)
        exact = load(folder, device="cpu", dtype=exits_dtype or "float32")
        self._exits = bool(exits_dtype)
        self._model = exact if exits_dtype else on_backend(exact, folder, "onnx")
        if not exits_dtype:
            make_ready(self._model, folder, [BlockRange(0, self._model.num_blocks)])

    def labels(self, inputs: Sequence[Any]) -> list[Label]:
        from isobatch.deployments.models.predict import predict

        return [answer.label for answer in predict(self._model, list(inputs), self._exits)]


def options(arguments: Sequence[str]) -> tuple[str, int, str]:
    """The options of a peer's program: FOLDER PORT [DTYPE], where a DTYPE means exits inside a call."""
    folder, port, *exits_dtype = arguments
    return str(Path(folder)), int(port), "".join(exits_dtype)


def say_when_ready(url: str) -> None:
    """Print when a server answers, for peers that do not say so themselves."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                print(READY, flush=True)
                return
        except OSError:
            time.sleep(0.05)
