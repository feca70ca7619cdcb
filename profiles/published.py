"""Latencies that others measured and published, copied with their sources (published.csv)."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")
COLUMNS = ("kind", "framework", "backend", "dtype", "network", "length", "clock", "ms_by_batch", "source")


@dataclass(frozen=True)
class Published:
    """The times of one network's batches on one kind of device, in one framework, at one length.

    `clock`: "wall" for whole calls, "device" for the device's own time, without the overhead of calls.
    """

    kind: str
    framework: str  # with its version, as in the source
    backend: str  # the backend of isobatch that does the same
    dtype: str
    network: str  # by its name in profiles.datasheet.published_shape
    length: int | None  # tokens of an input; None where inputs have one size
    clock: str
    seconds: tuple[tuple[int, float], ...]  # pairs of batch size and seconds
    source: str


@cache
def published() -> tuple[Published, ...]:
    return tuple(_rows())


def _rows() -> Iterator[Published]:
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            pairs = (pair.split(":") for pair in row["ms_by_batch"].split())
            seconds = tuple((int(batch), float(ms) / 1e3) for batch, ms in pairs)
            yield Published(
                row["kind"],
                row["framework"],
                row["backend"],
                row["dtype"],
                row["network"],
                int(row["length"]) if row["length"] else None,
                row["clock"],
                seconds,
                row["source"],
            )
