"""What the ramps are made from: every block's pooled state and the head's logits, computed once and kept on disk."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from deployments.folders import alone, make_room, whole
from deployments.models.seam import BackedModel
from deployments.progress import show
from profiles.errors import UserError

LIMIT_BYTES = 16 << 30
BATCH = 64
FORMAT = "2"

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Features:
    """One row an input, in the order of the sample. `pooled[k]` is what a ramp after block k reads (memory-mapped)."""

    pooled: Sequence[Floats]
    logits: Floats


def features(model: BackedModel, fingerprint: str, values: Sequence[Any], cache: Path) -> Features:
    """Features of these inputs: from the cache when the same network has seen the same inputs before."""
    entry = cache / _key(fingerprint, values)
    with alone(entry):
        if not entry.is_dir():
            needed_bytes = _size_bytes(model, len(values))
            make_room(cache, needed_bytes, LIMIT_BYTES)
            with whole(entry) as draft:
                _compute(model, values, draft)
        entry.touch()
    return _open(entry, len(model.exact.anatomy.pooled_widths) - 1)


def _key(fingerprint: str, values: Sequence[Any]) -> str:
    digest = sha256(f"{FORMAT} {fingerprint}".encode())
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.shape} {value.dtype}".encode() + value.tobytes())
        else:
            digest.update(json.dumps(value).encode())
    return digest.hexdigest()[:32]


def _size_bytes(model: BackedModel, count: int) -> int:
    size_bytes = 4 * count * (sum(model.exact.anatomy.pooled_widths[:-1]) + model.num_labels)
    if size_bytes > LIMIT_BYTES:
        most = count * LIMIT_BYTES // size_bytes
        raise UserError(f"the features of {count} inputs take {size_bytes >> 30} GiB; use --max-rows {most} or fewer")
    return size_bytes


def _compute(model: BackedModel, values: Sequence[Any], folder: Path) -> None:
    names = [_name(block) for block in range(model.num_blocks - 1)] + ["logits"]
    widths = [*model.exact.anatomy.pooled_widths[:-1], model.num_labels]
    maps = [
        open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=(len(values), width))
        for name, width in zip(names, widths, strict=True)
    ]
    for chosen in show(list(_batches(values)), "features"):
        pooled, logits = model.features(model.encode([values[index] for index in chosen]))
        for array, found in zip(maps, [*pooled, logits], strict=True):
            array[chosen] = found.cpu().numpy()
    for array in maps:
        array.flush()


def _batches(values: Sequence[Any]) -> Iterator[NDArray[np.int64]]:
    """Texts of like length together, which attention likes best."""
    order = sorted(range(len(values)), key=lambda index: len(str(values[index])) if _is_text(values[index]) else 0)
    for start in range(0, len(order), BATCH):
        yield np.array(order[start : start + BATCH], np.int64)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | tuple)


def _open(entry: Path, num_ramps: int) -> Features:
    pooled = [np.load(entry / f"{_name(block)}.npy", mmap_mode="r") for block in range(num_ramps)]
    return Features(pooled, np.load(entry / "logits.npy"))


def _name(block: int) -> str:
    return f"block-{block}"
