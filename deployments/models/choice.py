"""Which backend is the fastest, for this network on this machine? Measured once, and remembered."""

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
from deployments.models.seam import BackedModel, Stretch
from deployments.models.torch_model import TorchModel
from profiles.measure import device_name, stopwatch_for
from profiles.model import Batch, Exits

log = logging.getLogger(__name__)

SIZES, ROUNDS = (1, 16), 7
WORDS = 32  # of the texts that are measured
APART = 0.02  # of the largest logit: float16 may differ by so much


@dataclass(frozen=True)
class Choice:
    """What was measured: by how much each backend is faster than torch, over all sizes."""

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
    """Measured at the first start with this network on this machine; later ones read what was found."""
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
    """One that fails, or gives other answers, is not for this network."""
    for backend, make in others.items():
        try:
            yield backend, over_torch(model, make(), partial(example, model, directory))
        except Exception:
            log.exception("%s: %s cannot run it", directory, backend)


def example(model: BackedModel, directory: str | Path, count: int = 1) -> Batch:
    """A batch to export from and to measure with: nobody's inputs."""
    if model.reads_text:
        return model.encode([" ".join(["the"] * WORDS)] * count)
    side, channels = checkpoint.image_size(checkpoint.locate(directory))
    return model.encode([np.zeros((side, side, channels), np.float32)] * count)


def over_torch(model: TorchModel, other: BackedModel, batch_of: "partial[Batch]") -> float:
    """Of the whole network, without exits: the geometric mean over sizes of ratios of medians, taken in turns.

    Raises ValueError if answers differ.
    """
    other.prepare([Stretch(0, model.num_blocks)], batch_of())
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
    """Nobody is served by a backend that errs, however fast it is."""
    apart, largest = np.abs(found.logits - expected.logits).max(), np.abs(expected.logits).max()
    if not apart <= APART * largest:
        raise ValueError(f"its logits differ from torch's by {apart:.2g}, where the largest is {largest:.2g}")


def _machine_key(model: TorchModel, fingerprint: str, others: list[str]) -> str:
    where = device_name(str(model.device))
    versions = (torch.__version__, ort.__version__)
    parts = [fingerprint, where, model.dtype, others, torch.get_num_threads(), *versions]
    return sha256(repr(parts).encode()).hexdigest()[:32]
