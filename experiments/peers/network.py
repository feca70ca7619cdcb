"""The network of every peer: batches on one thread, in full or with exits inside a call."""

import time
import urllib.request
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.profiles.model import Label

if TYPE_CHECKING:
    from isobatch.deployments.models.served_model import BlockRange

ONNX = "onnx"
BATCH, WAIT_S = 32, 0.002  # the largest batch, and how long a peer waits for it to fill
READY = "ready"


class PeerNetwork:
    """Answers a batch of inputs with labels. The process that serves loads the network.

    `exits`: "onnx", or a precision of torch, with which the network runs with exits; a batch shrinks at each ramp.
    Empty: the network in full, on ONNX Runtime.
    """

    def __init__(self, folder: str, exits: str = "") -> None:
        from isobatch.deployments.models import load
        from isobatch.deployments.models.backends import compute_with, make_ready, on_backend

        compute_with(1)  # as a replica, which keeps freed memory, too
        self._exits = bool(exits)
        on_onnx = exits in ("", ONNX)
        loaded = load(folder, device="cpu", dtype="float32" if on_onnx else exits)
        self._model = on_backend(loaded, folder, ONNX) if on_onnx else loaded
        if on_onnx:
            make_ready(self._model, folder, _ranges(self._model.num_blocks, self._model.ramp_blocks if exits else ()))

    def labels(self, inputs: Sequence[Any]) -> list[Label]:
        from isobatch.deployments.models.predict import predict

        return [answer.label for answer in predict(self._model, list(inputs), self._exits)]


def _ranges(num_blocks: int, ramps: Collection[int]) -> list["BlockRange"]:
    """The block ranges of a call: up to each ramp, and behind the last ramp."""
    from isobatch.deployments.dispatch.route import stops
    from isobatch.deployments.models.served_model import BlockRange

    return [BlockRange(start, stop) for start, stop in pairwise((0, *stops(0, num_blocks, ramps)))]


@dataclass(frozen=True)
class PeerOptions:
    """The options of a peer's program: FOLDER PORT WORKERS EXITS BATCH."""

    folder: str
    port: int
    workers: int
    exits: str
    batch: int


def options(arguments: Sequence[str]) -> PeerOptions:
    folder, port, workers, exits, batch = arguments
    return PeerOptions(str(Path(folder)), int(port), int(workers), exits, int(batch))


def say_when_ready(url: str) -> None:
    """Print a line when a server answers, for peers that do not print one."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                print(READY, flush=True)
                return
        except OSError:
            time.sleep(0.05)
