"""Times how a split's survivors move: kept on the device, or through the host, as between replicas."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.transport.packed import pack, unpack_on
from isobatch.profiles.model import Batch

REPEATS = 15


def hop_ms(model: BackedModel, batch: Batch) -> dict[str, float]:
    """Milliseconds for one batch before block 1, and its bytes on the wire."""
    hidden = model.run(batch, 1, ()).survivors
    assert hidden is not None, "This is a bug: no ramp is active, so all go on."
    half = np.arange(len(hidden))[::2]
    packed = pack(hidden)
    return {
        "bytes": float(packed.size_bytes),
        "gather_on_device": _median_ms(model, lambda: model.select(hidden, half)),
        "merge_on_device": _median_ms(model, lambda: model.merge([hidden, hidden])),
        "device_to_host": _median_ms(model, lambda: pack(hidden)),
        "host_to_device": _median_ms(model, lambda: unpack_on(model.device, [packed])),
    }


def _median_ms(model: BackedModel, call: Callable[[], object]) -> float:
    took_s = []
    for _ in range(2 + REPEATS):  # the first two warm up
        _wait(model)
        begun = time.perf_counter()
        call()
        _wait(model)
        took_s.append(time.perf_counter() - begun)
    return 1e3 * median(took_s[2:])


def _wait(model: BackedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
