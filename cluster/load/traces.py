"""Recorded arrivals, read from the public traces' own formats, at their own mean rate or at any other."""

import csv
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cluster.load.workloads import Floats, Ints, check, following
from profiles.errors import UserError

FORMATS = (
    "a CSV with a column TIMESTAMP, with columns minute_1, minute_2, ... or with the columns minute,count; "
    "or a .tbz2 of counts per second"
)


class CountedArrivals(NamedTuple):
    """Counts of arrivals in stretches of equal length."""

    counts: Ints
    each_s: float


def trace(path: Path, rate_per_s: float | None, seconds: float, seed: int = 0) -> Floats:
    """Arrivals that follow a recorded trace, scaled to a mean rate (None: its own); a trace too short is repeated.

    Counts per second or minute keep their shape while the rate is scaled; within one count, arrivals are Poisson.
    Recorded arrival times keep the proportions of their gaps: time is stretched until the mean rate is right.
    """
    recorded = _recorded(path)
    if isinstance(recorded, CountedArrivals):
        return _counted(recorded, path, rate_per_s, seconds, seed)
    if recorded[-1] == 0:
        raise UserError(f"{path} holds a single moment: a trace needs arrivals at two times at least")
    gaps = np.diff(recorded, prepend=recorded[0] - np.diff(recorded).mean())
    rate = rate_per_s or float(1 / gaps.mean())
    check(rate, seconds)
    stretched = np.cumsum(np.resize(gaps, round(rate * seconds)) * (1 / (rate * gaps.mean())))
    return np.asarray(stretched[stretched < seconds])


def _counted(recorded: CountedArrivals, path: Path, rate_per_s: float | None, seconds: float, seed: int) -> Floats:
    window = np.resize(recorded.counts, max(1, round(seconds / recorded.each_s))).astype(float)
    if not window.any():
        raise UserError(f"{path} holds no arrival in its first {seconds:g} s")
    rate = rate_per_s or float(window.mean()) / recorded.each_s
    check(rate, seconds)
    return following(window, rate, seconds, np.random.default_rng(seed))


def _recorded(path: Path) -> Floats | CountedArrivals:
    try:
        return CountedArrivals(_per_second(path), 1.0) if path.suffix in {".tbz2", ".bz2"} else _table(path)
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror or error}") from None
    except (ValueError, IndexError, tarfile.ReadError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is no trace ({reason}): it must be {FORMATS}") from None


def _table(path: Path) -> Floats | CountedArrivals:
    with path.open(newline="") as file:
        rows = csv.reader(file)
        head = next(rows, [])
        if "TIMESTAMP" in head:
            column = head.index("TIMESTAMP")
            stamps = np.array([row[column][:26] for row in rows], "datetime64[ns]")
            return np.sort((stamps - stamps.min()).astype(float) / 1e9)
        minutes = [index for index, name in enumerate(head) if name.startswith("minute_")]
        if minutes:
            per_function = np.array([[float(row[index] or 0) for index in minutes] for row in rows])
            return CountedArrivals(per_function.sum(0).astype(np.int64), 60.0)
        if head == ["minute", "count"]:
            return CountedArrivals(np.array([int(row[1]) for row in rows], np.int64), 60.0)
    raise ValueError(f"it begins with {','.join(head)[:40]!r}")


@lru_cache(2)
def _per_second(path: Path) -> Ints:
    """Arrivals of each second. Seconds without any are dropped as gaps in the record, at the end of every day."""
    with tarfile.open(path) as archive:
        member = next((each for each in archive if each.isfile()), None)
        file = archive.extractfile(member) if member else None
        counts = np.array(file.read().split() if file else [], np.int64)
    return counts[counts > 0]
