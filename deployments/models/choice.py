"""Finds the fastest backend for a network on this machine. It is measured once, and remembered."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from deployments.folders import alone, cache_directory
from deployments.models import checkpoint
from deployments.models.interface import BackedModel, BlockRange, ServedModel
from deployments.models.torch_model import TorchModel
from profiles.measure import device_name, stopwatch_for
from profiles.model import Batch, Exits

log = logging.getLogger(__name__)

SIZES, ROUNDS = (1, 16), 7
WORDS = 32  # of the texts that are measured
APART = 0.02  # of the largest logit: float16 may differ by so much


@dataclass(frozen=True)
class Choice:
    """What was measured: how many times as fast as torch each backend is, over all sizes."""

    over_torch: Mapping[str, float]

    @property
    def backend(self) -> str:
        """
        >>> Choice({"onnx": 1.3, "graphs": 1.2}).backend, Choice({"onnx": 0.9}).backend
        ('onnx', 'torch')
        """
        rates = {"torch": 1.0, **self.over_torch}
        return max(rates, key=lambda backend: rates[backend])


def choose(
    model: TorchModel, others: Mapping[str, Callable[[], BackedModel]], directory: str | Path, fingerprint: str
) -> Choice:
    """The first start with this network on this machine measures; later starts read what it found."""
    path = cache_directory() / "backends" / f"{_machine_key(model, fingerprint, list(others))}.json"
    with alone(path):
        if path.is_file():
            return Choice(**json.loads(path.read_text()))
        found = Choice(dict(_measured(model, others, directory)))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(found)))
        part.replace(path)
    told = ", ".join(f"{backend} {ratio:.2f}" for backend, ratio in found.over_torch.items())
    log.info("%s: times as fast as torch here: %s", directory, told)
    return found


def _measured(
    model: TorchModel, others: Mapping[str, Callable[[], BackedModel]], directory: str | Path
) -> Iterator[tuple[str, float]]:
    """Each backend, and how many times as fast as torch it is. One that fails or gives other answers is left out."""
    for backend, make in others.items():
        try:
            yield backend, over_torch(model, make(), partial(example, model, directory))
        except Exception:
            log.exception("%s: %s cannot run it", directory, backend)


def example(model: ServedModel, directory: str | Path, count: int = 1) -> Batch:
    """A made-up batch to export from and to measure with."""
    if model.reads_text:
        return model.encode([" ".join(["the"] * WORDS)] * count)
    side, channels = checkpoint.image_size(checkpoint.locate(directory))
    return model.encode([np.zeros((side, side, channels), np.float32)] * count)


def over_torch(model: TorchModel, other: BackedModel, batch_of: "partial[Batch]") -> float:
    """How many times as fast as torch the other one runs the whole network, without exits.

    It is the geometric mean over sizes of ratios of medians, measured in turns. Raises ValueError if answers differ.
    """
    other.prepare([BlockRange(0, model.num_blocks)], batch_of())
    stopwatch, ratios = stopwatch_for(str(model.device)), []
    for size in SIZES:
        batch, torch_s, other_s = batch_of(size), list[float](), list[float]()
        for _ in range(ROUNDS):
            expected, took_s = stopwatch(partial(model.run, batch, model.num_blocks, ()))
            torch_s.append(took_s)
            found, took_s = stopwatch(partial(other.run, batch, model.num_blocks, ()))
            other_s.append(took_s)
            _check(found.exits, expected.exits)
        ratios.append(np.median(torch_s) / np.median(other_s))
    return float(np.exp(np.mean(np.log(ratios))))


def _check(found: Exits, expected: Exits) -> None:
    """Refuse a backend whose answers differ, however fast it is."""
    apart, largest = np.abs(found.logits - expected.logits).max(), np.abs(expected.logits).max()
    if not apart <= APART * largest:
        raise ValueError(f"its logits differ from torch's by {apart:.2g}, where the largest is {largest:.2g}")


def _machine_key(model: TorchModel, fingerprint: str, others: list[str]) -> str:
    where = device_name(str(model.device))
    versions = (torch.__version__, ort.__version__)
    parts = [fingerprint, where, model.dtype, others, torch.get_num_threads(), *versions]
    return sha256(repr(parts).encode()).hexdigest()[:32]
