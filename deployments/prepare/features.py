"""The features that ramps are trained on: every block's pooled state and the head's logits, cached on disk."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from isobatch.deployments.folders import locked, make_room, replacing
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.progress import show
from isobatch.deployments.tasks import task_of
from isobatch.deployments.transport.packed import rows_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Words

LIMIT_BYTES = 16 << 30  # the size of the cache; the features of one sample must fit into it
BATCH = 64  # inputs per batch
# Part of every cache key. Raise it when a change to the features changes the files.
FORMAT = "5"
WORDS = ("counts", "numbers")  # names of files that exist if words are answered
TRUNCATED = "truncated.npy"

Floats = NDArray[np.float32]
Mapped = np.memmap[Any, np.dtype[np.float32]]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Features:
    """One row per input, in the order of the sample. `pooled[k]` is the state that a ramp after block k reads.

    The arrays are mapped from files. Where words are answered, there is one row per word: `counts` is the number of
    words of each text, and `numbers` are the numbers of the words in their texts. `truncated`: the number of texts that
    are longer than the network reads.
    """

    pooled: Sequence[Floats]
    logits: Floats
    counts: Indices | None = None
    numbers: Indices | None = None
    truncated: int = 0

    def of(self, inputs: Indices) -> Indices:
        return inputs if self.counts is None else rows_of(self.counts, inputs)


def features(model: BackedModel, fingerprint: str, values: Sequence[Any], cache: Path) -> Features:
    """Features of these inputs, from the cache if this network has run over these inputs before."""
    entry = cache / _key(fingerprint, values)
    with locked(entry):
        if not entry.is_dir():
            words = _words(model, values)
            widths = [*model.exact.anatomy.pooled_widths[:-1], model.num_labels]
            shapes = [(len(words[1]) if words else len(values), width) for width in widths]
            size_bytes = 4 * sum(rows * width for rows, width in shapes)
            if size_bytes > LIMIT_BYTES:
                most = len(values) * LIMIT_BYTES // size_bytes
                raise UserError(
                    f"the features of {len(values)} inputs take {size_bytes >> 30} GiB; use --max-rows {most} or fewer"
                )
            make_room(cache, size_bytes, LIMIT_BYTES)
            with replacing(entry) as draft:
                _compute(model, values, draft, words, shapes)
        entry.touch()
    pooled = [np.load(entry / f"block-{block}.npy", mmap_mode="r") for block in range(model.num_blocks - 1)]
    of_words = {name: np.load(path) for name in WORDS if (path := entry / f"{name}.npy").is_file()}
    return Features(pooled, np.load(entry / "logits.npy"), truncated=int(np.load(entry / TRUNCATED)), **of_words)


def _key(fingerprint: str, values: Sequence[Any]) -> str:
    digest = sha256(f"{FORMAT} {version('transformers')} {fingerprint}".encode())
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.shape} {value.dtype}".encode() + value.tobytes())
        else:
            digest.update(json.dumps(value).encode())
    return digest.hexdigest()[:32]


def _words(model: BackedModel, values: Sequence[Any]) -> tuple[Indices, Indices] | None:
    """The number of answered words of each text, and their numbers; None if whole inputs are answered."""
    if not task_of(model).by_token:
        return None
    counts, numbers = np.zeros(len(values), np.int64), [np.empty(0, np.int64)]
    for start in show(range(0, len(values), BATCH), "reading words"):
        for place, words in enumerate(model.encode(values[start : start + BATCH]).words or (), start=start):
            assert isinstance(words, Words), "This is a bug: texts have words."
            counts[place] = len(words.numbers)
            numbers.append(np.array(words.numbers, np.int64))
    return counts, np.concatenate(numbers)


def _compute(
    model: BackedModel,
    values: Sequence[Any],
    folder: Path,
    words: tuple[Indices, Indices] | None,
    shapes: Sequence[tuple[int, int]],
) -> None:
    for name, numbers in zip(WORDS, words or (), strict=False):
        np.save(folder / f"{name}.npy", numbers)
    names = [f"block-{block}" for block in range(model.num_blocks - 1)] + ["logits"]
    maps = [_mapped(folder / f"{name}.npy", shape) for name, shape in zip(names, shapes, strict=True)]
    truncated = 0
    for chosen in show(list(_batches(values)), "features"):
        batch = model.encode([values[index] for index in chosen])
        truncated += len(batch.truncated)
        pooled, logits = model.features(batch)
        if not torch.isfinite(logits).all():
            raise UserError("the network's answers are not finite (NaN or infinite): are its weights complete?")
        rows = rows_of(words[0], chosen) if words else chosen
        for array, tensor in zip(maps, [*pooled, logits], strict=True):
            array[rows] = tensor.cpu().numpy()
    for array in maps:
        array.flush()
    np.save(folder / TRUNCATED, truncated)


def _mapped(path: Path, shape: tuple[int, int]) -> Mapped:
    """A new file as an array. It takes its room on the disk at once: without room, the first number that is written
    would end the process (SIGBUS)."""
    array: Mapped = open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _batches(values: Sequence[Any]) -> Iterator[NDArray[np.int64]]:
    """Positions of inputs, with texts of similar length in one batch, which attention runs fastest."""
    lengths = [len(str(value)) if isinstance(value, str | tuple | list) else 0 for value in values]
    order = sorted(range(len(values)), key=lengths.__getitem__)
    for start in range(0, len(order), BATCH):
        yield np.array(order[start : start + BATCH], np.int64)
