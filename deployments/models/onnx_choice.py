"""Is ONNX Runtime faster than torch, for this network on this machine? Measured once, and remembered."""

import json
import logging
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from deployments.folders import alone, cache_directory
from deployments.models import checkpoint
from deployments.models.onnx_model import OnnxModel
from deployments.models.stretch import Stretch
from deployments.models.torch_model import TorchModel
from profiles.measure import device_name, stopwatch_for
from profiles.model import Batch

log = logging.getLogger(__name__)

SIZES, ROUNDS = (1, 16), 7
WORDS = 32  # of the texts that are measured


@dataclass(frozen=True)
class Choice:
    """What was measured: by how much ONNX Runtime is faster than torch, over all sizes."""

    onnx_over_torch: float

    @property
    def backend(self) -> str:
        """
        >>> Choice(1.3).backend, Choice(0.9).backend
        ('onnx', 'torch')
        """
        return "onnx" if self.onnx_over_torch > 1 else "torch"


def choose(served: OnnxModel, directory: str | Path) -> Choice:
    """Measured at the first start with this network on this machine; later ones read what was found."""
    path = cache_directory() / "backends" / f"{_machine_key(served)}.json"
    with alone(path):
        if path.is_file():
            return Choice(**json.loads(path.read_text()))
        found = Choice(onnx_over_torch(served, partial(example, served, directory)))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(found)))
        part.replace(path)
    log.info("%s: ONNX Runtime is %.2f times as fast as torch here", directory, found.onnx_over_torch)
    return found


def example(model: TorchModel, directory: str | Path, count: int = 1) -> Batch:
    """A batch to export from and to measure with: nobody's inputs."""
    if model.reads_text:
        return model.encode([" ".join(["the"] * WORDS)] * count)
    side, channels = checkpoint.image_size(checkpoint.locate(directory))
    return model.encode([np.zeros((side, side, channels), np.float32)] * count)


def onnx_over_torch(served: OnnxModel, batch_of: "partial[Batch]") -> float:
    """Of the whole network, without exits: the geometric mean over sizes of ratios of medians, taken in turns."""
    served.prepare([Stretch(0, served.num_blocks)], batch_of())
    stopwatch, ratios = stopwatch_for(str(served.device)), []
    for size in SIZES:
        batch, torch_s, onnx_s = batch_of(size), list[float](), list[float]()
        for _ in range(ROUNDS):
            torch_s.append(stopwatch(partial(served.inner.run, batch, served.num_blocks, ()))[1])
            onnx_s.append(stopwatch(partial(served.run, batch, served.num_blocks, ()))[1])
        ratios.append(np.median(torch_s) / np.median(onnx_s))
    return float(np.exp(np.mean(np.log(ratios))))


def _machine_key(served: OnnxModel) -> str:
    where = device_name(str(served.device))
    versions = (torch.__version__, ort.__version__)
    parts = [served.pieces.origin.fingerprint, where, served.dtype, torch.get_num_threads(), *versions]
    return sha256(repr(parts).encode()).hexdigest()[:32]
