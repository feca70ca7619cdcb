"""Samples the memory, file handles and threads of each process, and tests whether they grow."""

import os
import re
import resource
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.processes import descendants

SETTLING = 1 / 3  # of a process's life, in which it allocates what it needs
LEAST_SAMPLES = 20  # after settling, for a slope


@dataclass(frozen=True)
class Slope:
    """The growth in an hour, with its standard error."""

    per_hour: float
    error: float

    @property
    def grows(self) -> bool:
        return self.grows_by(0.0)

    def grows_by(self, per_hour: float) -> bool:
        """Whether the growth exceeds this by two standard errors."""
        return self.per_hour - 2 * self.error > per_hour


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope by least squares. Its error treats samples as AR(1), since neighbouring samples are similar.

    >>> slope_of([0.0, 1800.0, 3600.0], [1.0, 2.0, 3.0])
    Slope(per_hour=2.0, error=0.0)
    """
    hours, result = np.array(times_s) / 3600.0, np.array(values, np.float64) - values[0]
    centred = hours - hours.mean()
    spread = float((centred**2).sum())
    per_hour = float((centred * result).sum()) / spread
    rest = result - result.mean() - per_hour * centred
    error = float(np.sqrt((rest**2).sum() / max(1, len(rest) - 2) / spread))
    alike = min(0.99, max(0.0, _lag_1(rest)))
    return Slope(per_hour, error * float(np.sqrt((1 + alike) / (1 - alike))))


def _lag_1(rest: NDArray[np.float64]) -> float:
    power = float((rest**2).sum())
    return float((rest[1:] * rest[:-1]).sum()) / power if power > 1e-12 else 0.0


@dataclass(frozen=True)
class Life:
    """One process, and the growth of its memory, file handles and threads after it settled."""

    name: str
    process: int
    samples: int
    quarters_mib: tuple[float, ...]  # the mean memory in each quarter of its life
    memory: Slope  # MiB
    handles: Slope
    threads: Slope


Sample = tuple[float, float, int, int]  # times and samples


class Watch:
    """Samples of this process and of its descendants."""

    def __init__(self) -> None:
        self._samples: dict[int, list[Sample]] = defaultdict(list)  # by process
        # Ray's idle workers have another name, and a name may be read while it is being written.
        self._names: dict[int, Counter[str]] = defaultdict(Counter)

    def look(self, now_s: float) -> None:
        for process in [os.getpid(), *descendants(os.getpid())]:
            with suppress(OSError, IndexError):
                self._samples[process].append((now_s, *_taken(process)))
                self._names[process][_name(process)] += 1

    def lives(self, settled_s: float = 0.0) -> list[Life]:
        """The processes with enough samples, over at least `settled_s` after they settled."""
        result = [_life(self._named(process), process, each, settled_s) for process, each in self._samples.items()]
        return sorted((life for life in result if life), key=lambda life: life.name)

    def _named(self, process: int) -> str:
        """Its most frequent name."""
        return max(self._names[process], key=lambda name: self._names[process][name], default="")


def _life(name: str, process: int, samples: list[Sample], settled_s: float) -> Life | None:
    steady = samples[round(SETTLING * len(samples)) :]
    if len(steady) < LEAST_SAMPLES or steady[-1][0] - steady[0][0] < settled_s:
        return None
    times_s, memory, handles, threads = zip(*steady, strict=True)
    slopes = (slope_of(times_s, each) for each in (memory, handles, threads))
    quarters = tuple(float(part.mean()) for part in np.array_split([sample[1] for sample in samples], 4))
    return Life(name, process, len(steady), quarters, *slopes)


def _name(process: int) -> str:
    """The name of the process in figures: the deployment of a Serve replica, the class of another Ray worker."""
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    line = b" ".join(words).decode(errors="replace")
    if process == os.getpid():
        return "load"
    if result := re.search(r"ray::ServeReplica:[^:]+:(\w+)", line) or re.search(r"ray::(\w+)", line):
        return result[1].lower()
    script = next((word for word in words if word.endswith(b".py")), words[0])
    return re.sub(r"\W", "_", Path(script.decode(errors="replace")).stem)


def _taken(process: int) -> tuple[float, int, int]:
    """Memory in MiB, file handles, threads."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    threads = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[17])
    handles = sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())
    return pages * resource.getpagesize() / 2**20, handles, threads
