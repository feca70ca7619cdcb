"""Latencies that others measured and published: facts, copied with their sources (published.csv)."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")
COLUMNS = ("kind", "framework", "backend", "dtype", "network", "length", "clock", "ms_by_batch", "source")


@dataclass(frozen=True)
class Published:
    """How long the batches of one network took on one kind of device, by one framework, at one length.

    `clock`: "wall" for whole calls, "device" for the device's own time, which sees nothing of what a call costs.
    """

    kind: str
    framework: str  # with its version, as the source calls it
    backend: str  # ours that does the same
    dtype: str
    network: str  # as `profiles.shapes.known` calls it
    length: int | None  # tokens of an input; None where inputs have one size
    clock: str
    seconds: tuple[tuple[int, float], ...]  # by batch size
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
