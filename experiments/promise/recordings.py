"""Keeps recorded inputs on disk, in files whose names are hashes of their contents.

So results depend on their own code and on the contents. If the code that records changes but records the same, results
are still valid.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from isobatch.deployments.folders import cache_directory
from isobatch.profiles.exit_table import ARRAYS, ExitTable
from isobatch.profiles.losses import Indices

ROWS = {"sst2": 10_000, "agnews": 5_000, "demo": 10_000}  # rows of a file; the demo's rows are newly distorted digits


@dataclass(frozen=True)
class Recorded:
    """A table with the true labels, and one with the labels that `isobatch prepare` estimates for its ladder."""

    known: ExitTable
    believed: ExitTable

    def of(self, chosen: Indices) -> "Recorded":
        return Recorded(self.known.of(chosen), self.believed.of(chosen))


def keep(recorded: Recorded) -> str:
    """Write it, and return the name by which it is read."""
    arrays = {
        f"{name}_{key}": np.ascontiguousarray(getattr(table, each))
        for name, table in vars(recorded).items()
        for each, key in ARRAYS.items()
    }
    name = sha256(b"".join(sha256(array.tobytes()).digest() for array in arrays.values())).hexdigest()[:16]
    if not (path := _path(name)).exists():
        beside = path.with_suffix(".part.npz")
        np.savez(beside, **arrays)  # type: ignore[arg-type]
        beside.replace(path)
    return name


@cache
def read(name: str) -> Recorded:
    with np.load(_path(name), allow_pickle=False) as kept:
        known, believed = (
            ExitTable(*(kept[f"{each}_{key}"] for key in ARRAYS.values())) for each in ("known", "believed")
        )
    return Recorded(known, believed)


def _path(name: str) -> Path:
    folder = cache_directory() / "bench-promise"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.npz"
