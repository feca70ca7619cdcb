"""The time of a launch on the paper's V100, by the layout of its texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from isobatch.cluster.simulator.event_loop import Departure, LaunchSchedule
from isobatch.deployments.dispatch.messages import Launch
from isobatch.profiles.datasheet import datasheet_table, encoder
from isobatch.profiles.sweep import whole_s

HIDDEN, LAYERS = 3072, 6  # the paper's model has three encoders and three decoders of this width
Engine = Callable[[Sequence[int]], float]  # seconds of a launch, by the tokens of its texts


@cache
def seconds(rows: float, length: int) -> float:
    """A launch of rows of one length, by the datasheet."""
    shape = encoder("tcb", layers=LAYERS, hidden=HIDDEN, inner=4 * HIDDEN, length=length)
    return float(whole_s(datasheet_table(shape, "v100", dtype="float32", batch_sizes=(rows,)))[0])


def padded(tokens: Sequence[int]) -> float:
    """One row a text, padded to the longest."""
    return seconds(len(tokens), max(tokens))


def padded_to(length: int) -> Engine:
    """One row a text, of a fixed length."""
    return lambda tokens: seconds(len(tokens), length)


def by_length(tokens: Sequence[int]) -> float:
    """Several launches of texts of similar length: the fastest partition of the sorted texts."""
    ordered = sorted(tokens)
    best = [0.0]
    for stop in range(1, len(ordered) + 1):
        best.append(min(best[start] + seconds(stop - start, ordered[stop - 1]) for start in range(stop)))
    return best[-1]


def in_rows(length: int) -> Engine:
    """Several texts in a row, whose tokens attend to the whole row."""
    return lambda tokens: seconds(_bins(tokens, length), length)


def packed(mean: int) -> Engine:
    """No padding; attention has the cost of texts of the mean length."""
    return lambda tokens: seconds(round(sum(tokens) / mean, 2), mean)


def _bins(tokens: Sequence[int], length: int) -> int:
    """The number of rows, each filled before the next one.

    >>> _bins([60, 50, 40, 10], 100)
    2
    """
    rows, used = 0, length
    for count in tokens:
        if used + count > length:
            rows, used = rows + 1, 0
        used += count
    return rows


@dataclass
class OneDevice:
    """The one device of a run: every launch answers all its texts."""

    engine: Engine
    _free_s: float = 0.0

    def begin(self, launch: Launch, now_s: float) -> LaunchSchedule:
        starts_s = max(now_s, self._free_s)
        self._free_s = starts_s + self.engine(launch.weights)
        last = Departure(self._free_s, launch.stop, range(len(launch.places)))
        return LaunchSchedule(starts_s, self._free_s, (), last, {})

    def kind(self, group: str) -> str:
        return "v100"
