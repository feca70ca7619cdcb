"""Recorded arrivals, read from the formats of public traces, at their own mean rate or at another."""

import bz2
import csv
import re
import tarfile
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from isobatch.cluster.load.workloads import Floats, check, following
from isobatch.profiles.errors import UserError

FORMATS = (
    "times in a column TIMESTAMP; or counts: in columns minute_1, minute_2, ..., in two columns (when, how many), in "
    "one column or in one line; with commas, tabs or spaces between; as it is, or in a .tbz2 or .bz2"
)
UNITS_S = {"second": 1.0, "minute": 60.0, "hour": 3600.0}  # by the name in the header of the column of times
STAMP = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:]+(\.\d{1,9})?)?")
LONGEST_HEAD = 100_000  # characters; csv does not read longer fields


class CountedArrivals(NamedTuple):
    """The numbers of arrivals in consecutive periods of equal length."""

    counts: Floats
    each_s: float
    certain: bool = True  # whether the file itself contains the length of a period


def description(path: Path, each_s: float | None = None) -> str:
    """A sentence on the reading of a trace's file."""
    recorded = _recorded(path, each_s)
    if not isinstance(recorded, CountedArrivals):
        if each_s:
            raise UserError(f"--trace-each-s {each_s:g} is for counts, and {path} has times: leave it out")
        return f"{path.name}: {len(recorded):,} arrival times in {recorded[-1]:,.0f} s"
    mean = recorded.counts.mean() / recorded.each_s
    hint = "" if recorded.certain else " (assumed, as the file does not say it: --trace-each-s sets it)"
    counts = f"{len(recorded.counts):,} counts, each of {recorded.each_s:g} s{hint}"
    return f"{path.name}: {counts}; {mean:,.1f} arrivals a second"


def trace(path: Path, rate_per_s: float | None, seconds: float, seed: int = 0, each_s: float | None = None) -> Floats:
    """Arrivals that follow a recorded trace, scaled to a mean rate (None: its own). A trace that is too short repeats.

    Counts per second or minute keep their shape while the rate is scaled; within a period, arrivals are Poisson.
    Recorded arrival times keep the proportions of their gaps: time is stretched until the mean rate is right.
    `each_s` is the length of a counted period, for files that do not contain it.
    """
    recorded = _recorded(path, each_s)
    if isinstance(recorded, CountedArrivals):
        return _counted(recorded, path, rate_per_s, seconds, seed)
    if recorded[-1] == 0:
        raise UserError(f"all arrivals in {path} have the same time: a trace needs at least two different times")
    gaps = np.diff(recorded, prepend=recorded[0] - np.diff(recorded).mean())
    check(float(1 / gaps.mean()) if rate_per_s is None else rate_per_s, seconds)
    if rate_per_s is None:
        times = np.cumsum(np.tile(gaps, ceil(seconds / gaps.sum())))
    else:
        times = np.cumsum(np.resize(gaps, max(1, round(rate_per_s * seconds))))
        times *= seconds / times[-1]
    return np.asarray(times[times < seconds])


def _counted(recorded: CountedArrivals, path: Path, rate_per_s: float | None, seconds: float, seed: int) -> Floats:
    """Arrivals for so long, which may end within a period of the trace."""
    whole_s = recorded.each_s * ceil(seconds / recorded.each_s)
    window = np.resize(recorded.counts, round(whole_s / recorded.each_s)) / recorded.each_s
    last = window[-1] * (whole_s - seconds)  # the arrivals that come too late
    own_per_s = (float(window.sum()) * recorded.each_s - last) / seconds
    if not own_per_s > 0:
        raise UserError(f"{path} holds no arrival in its first {seconds:g} s")
    rate = own_per_s if rate_per_s is None else rate_per_s
    check(rate, seconds)
    times = following(window, rate / own_per_s * float(window.mean()), whole_s, np.random.default_rng(seed))
    return np.asarray(times[times < seconds])


@lru_cache(2)
def _recorded(path: Path, each_s: float | None) -> Floats | CountedArrivals:
    """Ascending times of arrivals in seconds from the first, or counts of arrivals."""
    if each_s is not None and not each_s > 0:
        raise UserError(f"--trace-each-s {each_s:g} must be above 0")
    try:
        recorded = _parsed(_text(path))
        if isinstance(recorded, CountedArrivals) and not (np.isfinite(recorded.counts) & (recorded.counts >= 0)).all():
            raise ValueError("a count is below 0 or no number")
    except (ValueError, IndexError, EOFError, tarfile.ReadError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is not a trace ({reason}): it must be {FORMATS}") from None
    except OSError as error:
        if path.suffix == ".bz2" and error.errno is None:  # bz2's error for data that it did not write
            raise UserError(f"{path} is not a trace ({error}): it must be {FORMATS}") from None
        raise UserError(f"cannot read the trace {path}: {error.strerror or error}") from None
    if isinstance(recorded, CountedArrivals) and each_s:
        return recorded._replace(each_s=each_s, certain=True)
    return recorded


def _text(path: Path) -> str:
    """The text of a file, or of the first file in an archive."""
    if path.suffix != ".tbz2":
        content = path.read_bytes()
        return (bz2.decompress(content) if path.suffix == ".bz2" else content).decode("utf-8-sig")
    with tarfile.open(path) as archive:
        member = next((each for each in archive if each.isfile()), None)
        file = archive.extractfile(member) if member else None
        return file.read().decode("utf-8-sig") if file else ""


def _parsed(text: str) -> Floats | CountedArrivals:
    first, _, rest = text.partition("\n")
    head = next(csv.reader([first[:LONGEST_HEAD]]), [])
    rows = csv.reader(line for line in rest.splitlines() if line.strip())
    if "TIMESTAMP" in head:
        column = head.index("TIMESTAMP")
        stamps = np.array([_stamp(row[column]) for row in rows], "datetime64[ns]")
        return np.sort((stamps - stamps.min()).astype(float) / 1e9)
    if any(name.startswith("minute_") for name in head):
        minutes = [index for index, name in enumerate(head) if name.startswith("minute_")]
        return CountedArrivals(np.array([[float(row[index] or 0) for index in minutes] for row in rows]).sum(0), 60.0)
    names = _cells(first)
    if not names or any(_is_number(name) for name in names):
        return _table([], text, first)
    return _table(names, rest, first)


def _stamp(cell: str) -> str:
    """A time without its zone, which numpy would warn about."""
    if not (stamp := STAMP.match(cell.strip())):
        raise ValueError(f"a time must look like 2023-11-16 18:00:00.0, not {cell!r}")
    return stamp[0]


def _table(names: list[str], text: str, first: str) -> CountedArrivals:
    """Counts in one line, in one column, or beside the times at which their periods begin."""
    lines = [_cells(line) for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and not names:  # as Twitter's trace, in which seconds with 0 are gaps of the recording
        counts = np.array(lines[0], float)
        return CountedArrivals(counts[counts != 0], 1.0, certain=False)
    if not lines or len(lines[0]) not in (1, 2):
        raise ValueError(f"it begins with {first[:40]!r}")
    if any(len(line) != len(lines[0]) for line in lines):
        raise ValueError("its lines have different numbers of columns")
    table = np.array(lines, float)
    if len(lines[0]) == 1:
        return CountedArrivals(table[:, 0], 1.0, certain=False)
    return _beside_times(names, table)


def _beside_times(names: list[str], table: Floats) -> CountedArrivals:
    """The first column counts in the unit that its name contains, or in seconds."""
    steps = np.diff(table[:, 0])
    if not (steps > 0).all():
        raise ValueError("its first column does not ascend")
    unit_s = next((each_s for name, each_s in UNITS_S.items() if names and name in names[0].lower()), None)
    step = float(np.median(steps)) if len(steps) else 1.0
    if unit_s is None and step == 1:
        return CountedArrivals(table[:, 1], 60.0, certain=False)
    return CountedArrivals(table[:, 1], step * (unit_s or 1.0))


def _cells(line: str) -> list[str]:
    """
    >>> _cells("0 12"), _cells("0,12"), _cells("0;12")
    (['0', '12'], ['0', '12'], ['0', '12'])
    """
    return [cell for cell in re.split(r"[\s,;]+", line.strip()) if cell]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
