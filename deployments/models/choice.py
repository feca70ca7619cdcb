"""Finds the fastest backend for a network on this machine. Backends are measured once; the cache keeps the result."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import onnxruntime as ort
import torch

from isobatch.deployments.folders import cache_directory, locked
from isobatch.deployments.models.checkpoint import example
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.files import write_whole
from isobatch.profiles.measure import device_name, stopwatch_for
from isobatch.profiles.model import Batch, Exits

log = logging.getLogger(__name__)

SIZES = (1, 16)  # batch sizes that are timed: a single input, and a batch of a usual size
ROUNDS = 7  # launches per batch size and backend; the median counts
# Largest difference of two backends' logits, as a share of the largest logit: float16 differs by up to this.
LOGIT_TOLERANCE = 0.02


def choose(
    model: TorchModel, others: Mapping[str, Callable[[], BackedModel]], directory: str | Path, fingerprint: str
) -> str:
    """The fastest backend. The first start with this network on this machine measures, later ones read."""
    machine = [torch.get_num_threads(), torch.__version__, ort.__version__]
    parts = [fingerprint, device_name(str(model.device)), model.dtype, list(others), *machine]
    path = cache_directory() / "backends" / f"{sha256(repr(parts).encode()).hexdigest()[:32]}.json"
    with locked(path):
        if not path.is_file():
            speeds = dict(_measured(model, others, directory))
            write_whole(path, json.dumps({"over_torch": speeds}))
            ratios = ", ".join(f"{backend} {ratio:.2f}" for backend, ratio in speeds.items())
            log.info("%s: speed of backends, torch = 1: %s", directory, ratios)
        rates: dict[str, float] = {"torch": 1.0, **json.loads(path.read_text())["over_torch"]}
    return max(rates, key=lambda backend: rates[backend])


def _measured(
    model: TorchModel, others: Mapping[str, Callable[[], BackedModel]], directory: str | Path
) -> Iterator[tuple[str, float]]:
    """Each backend with its speed as a multiple of torch's. A backend that fails or gives other answers is left out."""
    for backend, make in others.items():
        try:
            yield backend, over_torch(model, make(), partial(example, model, directory))
        except Exception:
            log.exception("%s: %s cannot run it", directory, backend)


def over_torch(model: TorchModel, other: BackedModel, batch_of: "partial[Batch]") -> float:
    """The other backend's speed on the whole network without exits, as a multiple of torch's.

    This is the geometric mean over batch sizes of the ratio of median times; both take turns. Raises ValueError if
    their answers differ.
    """
    other.prepare([BlockRange(0, model.num_blocks)], batch_of())
    stopwatch, ratios = stopwatch_for(str(model.device)), []
    for size in SIZES:
        batch, torch_s, other_s = batch_of(size), list[float](), list[float]()
        for _ in range(ROUNDS):
            expected, took_s = stopwatch(partial(model.run, batch, model.num_blocks, ()))
            torch_s.append(took_s)
            actual, took_s = stopwatch(partial(other.run, batch, model.num_blocks, ()))
            other_s.append(took_s)
            _check(actual.exits, expected.exits)
        ratios.append(median(torch_s) / median(other_s))
    return geometric_mean(ratios)


def _check(actual: Exits, expected: Exits) -> None:
    """Raise ValueError for a backend whose answers differ."""
    difference, largest = np.abs(actual.logits - expected.logits).max(), np.abs(expected.logits).max()
    if not difference <= LOGIT_TOLERANCE * largest:
        raise ValueError(f"its logits differ from torch's by {difference:.2g}, where the largest is {largest:.2g}")
