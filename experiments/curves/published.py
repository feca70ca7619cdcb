"""Reads the published latencies to which the curves of profiles/curves.py are fitted."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PUBLISHED_FILE = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class Published:
    """The times of one network's batches on one kind of device, in one framework, at one length.

    `clock`: "wall" for whole calls, "device" for the device's own time, without the overhead of calls.
    """

    kind: str
    framework: str  # with its version, as in the source
    backend: str  # the equivalent backend of isobatch
    dtype: str
    network: str  # by its name in experiments.planner.networks.published_shape
    length: int | None  # tokens of an input; None where inputs have one size
    clock: str
    seconds: tuple[tuple[int, float], ...]  # pairs of batch size and seconds
    source: str


@cache
def published() -> tuple[Published, ...]:
    rows = []
    with PUBLISHED_FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            pairs = (pair.split(":") for pair in row.pop("ms_by_batch").split())
            seconds = tuple((int(batch), float(ms) / 1e3) for batch, ms in pairs)
            length = row.pop("length")
            rows.append(Published(**row, length=int(length) if length else None, seconds=seconds))
    return tuple(rows)
