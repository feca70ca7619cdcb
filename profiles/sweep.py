"""Plans a measurement and makes a table of its raw times: the next batch size, and the times of blocks and ramps.

Nothing is measured in this file: measure.py does that, and uses this file to spend its budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from isobatch.profiles.latency import LatencyTable, interpolate

Floats = NDArray[np.float64]
BEND = 0.015  # a curve that is straight to within this share needs no more points
# Sizes further apart than this factor do not determine those between: hardware computes in tiles, and a size that fills
# its last tile is quicker than its neighbours (by 3 to 7 % in bfloat16 with AMX).
FAR_APART = 2.0
NOISY = 0.10  # a measurement with a larger relative spread is not reliable enough for planning
LEAVING = 8  # of this many inputs one leaves at a stop that is timed, and another one
WORTH_DOUBLING = 1.05  # the gain from the last doubling of the batch from which the next one may matter
GOOD_ENOUGH = 0.9  # the knee is the smallest batch that reaches this share of the best rate


@dataclass(frozen=True)
class NetworkFacts:
    """The facts about a network and its device that need no clock."""

    kind: str
    ramp_blocks: tuple[int, ...]
    hidden_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    length: int | None
    source: str
    backend: str | None = None
    repeated_bytes: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.hidden_bytes)


class RoundTimes(NamedTuple):
    """Seconds at one batch size: of each block alone, what each ramp adds to its block, of all blocks and ramps with a
    stop at each ramp (`staying`), and of all blocks at once."""

    blocks: Sequence[float]
    ramps: Sequence[float]
    stopping: float
    whole: float


@dataclass(frozen=True)
class Rounds:
    """The times of all rounds at one batch size (`RoundTimes`), one row per round."""

    blocks: Floats
    ramps: Floats
    stopping: Floats
    whole: Floats

    @classmethod
    def of(cls, rounds: Sequence[RoundTimes]) -> "Rounds":
        return cls(*map(np.asarray, zip(*rounds, strict=True)))

    def __add__(self, other: "Rounds") -> "Rounds":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Rounds(*(np.concatenate(pair) for pair in pairs))

    @property
    def median_s(self) -> float:
        return float(np.median(self.whole))

    @property
    def spread(self) -> float:
        """Half of all rounds lie within this share of the median."""
        low, middle, high = np.quantile(self.whole, [0.25, 0.5, 0.75])
        return float((high - low) / middle)


def next_size(whole_s: Mapping[int, float], largest: int) -> int | None:
    """The next batch size to measure: the middle of the interval with the most doubt; None if the curve is known.

    The doubt about an interval is the distance of the points at its ends from the straight line. Intervals whose ends
    are far apart come first, the largest sizes before the others: most of a device's time goes into large batches.

    >>> next_size({}, 64), next_size({1: 1.0}, 64), next_size({1: 1.0, 8: 2.0}, 64)
    (1, 8, 64)
    >>> next_size({1: 1.0, 8: 8.0, 64: 64.0}, 64)
    23
    >>> next_size({1: 1.0, 2: 1.0, 4: 1.1, 8: 2.0}, 8)
    3
    >>> next_size({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 8) is None
    True
    """
    if len(whole_s) < 3:
        wanted = (1, middle(1, largest) or largest, largest)[len(whole_s)]
        return wanted if wanted not in whole_s else None
    sizes = sorted(whole_s)
    doubts = {
        (low, high): high if high > FAR_APART * low else _doubt(whole_s, sizes, index) * np.log(high / low)
        for index, (low, high) in enumerate(pairwise(sizes))
        if middle(low, high)
    }
    low, high = max(doubts, key=lambda pair: doubts[pair], default=(1, 1))
    return middle(low, high) if doubts and doubts[low, high] > BEND else None


def worth_doubling(whole_s: Mapping[int, float]) -> bool:
    """Whether launches twice as large may answer more, as the largest ones do by far more than those of half their
    size.

    >>> worth_doubling({1: 0.04, 64: 0.17}), worth_doubling({1: 0.003, 64: 0.17})
    (True, False)
    """
    sizes = sorted(whole_s)
    half_s = float(np.interp(sizes[-1] / 2, sizes, [whole_s[size] for size in sizes]))
    return 2 * half_s > WORTH_DOUBLING * whole_s[sizes[-1]]


def affordable(whole_s: Mapping[int, float], largest: int, pass_s: float) -> int:
    """The largest batch size, up to `largest`, whose pass through the network should take at most `pass_s`.

    >>> affordable({1: 0.3, 8: 0.8}, 64, pass_s=2.0), affordable({1: 0.3, 8: 0.8}, 64, pass_s=0.1)
    (20, 8)
    """
    known = max(whole_s)
    return max(known, min(largest, int(pass_s * known / whole_s[known])))


def middle(low: int, high: int) -> int | None:
    """The whole number nearest to the geometric mean, if it lies between the two.

    >>> middle(1, 64), middle(2, 3)
    (8, None)
    """
    mean = round((low * high) ** 0.5)
    return mean if low < mean < high else None


def _doubt(whole_s: Mapping[int, float], sizes: Sequence[int], index: int) -> float:
    """The larger of the relative bends at both ends of interval `index`."""
    bends = []
    for left, at, right in (sizes[at - 1 : at + 2] for at in (index, index + 1) if 0 < at < len(sizes) - 1):
        straight = np.interp(at, [left, right], [whole_s[left], whole_s[right]])
        bends.append(float(abs(straight - whole_s[at]) / max(whole_s[at], straight)))
    return max(bends)


def tabulate(rounds: Mapping[float, Rounds], facts: NetworkFacts) -> LatencyTable:
    """A table of medians. Blocks are scaled so that launch and blocks add up to the time of all blocks at once.

    The cost of a launch is the time that running a block by itself adds, without the work of a replica. The cost of a
    stop is the rest of the time of all blocks and ramps with stops: a launch, the move of inputs, and the next blocks'
    first run at another size. The part of that which grows with the number of inputs is added to the ramp's own time.
    """
    known = {name: value for name, value in vars(facts).items() if name != "ramp_blocks"}
    sizes = sorted(rounds)
    paid = np.concatenate([_launches_s(each) for each in rounds.values()])
    launch_s = max(float(np.median(paid)), 0.0)
    ramps = np.zeros((len(sizes), facts.num_blocks))
    blocks, p95 = np.empty_like(ramps), np.empty_like(ramps)
    for row, size in enumerate(sizes):
        blocks[row] = _block_s(rounds[size], launch_s)
        p95[row] = blocks[row] * np.quantile(rounds[size].whole, 0.95) / np.median(rounds[size].whole)
        ramps[row, list(facts.ramp_blocks)] = np.maximum(np.median(rounds[size].ramps, axis=0), 0.0)
    stop_s, each_input_s = _stop_s(rounds, blocks, ramps, launch_s, facts.ramp_blocks)
    ramps[:, list(facts.ramp_blocks)] += each_input_s * np.array(sizes)[:, None]
    return LatencyTable(
        batch_sizes=tuple(sizes),
        block_s=_rounded(blocks),
        ramp_s=_rounded(ramps),
        launch_s=_digits(launch_s),
        stop_s=_digits(stop_s),
        block_p95_s=_rounded(p95),
        launch_p95_s=_digits(max(launch_s, float(np.quantile(paid, 0.95)))),
        **known,
    )


def _launches_s(rounds: Rounds) -> Floats:
    """The cost of one launch, round by round: running L blocks one by one needs L launches, at once only one."""
    count = rounds.blocks.shape[1]
    extra: Floats = rounds.blocks.sum(axis=1) - rounds.whole
    return extra / (count - 1) if count > 1 else np.zeros_like(extra)


def _stop_s(
    rounds: Mapping[float, Rounds], blocks: Floats, ramps: Floats, launch_s: float, ramp_blocks: Sequence[int]
) -> tuple[float, float]:
    """Seconds of a stop, at least a launch, and seconds that each input before it adds, fitted by least squares.

    `blocks`, `ramps`: seconds by size and block.
    """
    if not ramp_blocks:
        return launch_s, 0.0
    sizes, known, beyond = sorted(rounds), list[tuple[float, float]](), list[float]()
    begins, both = [0, *(ramp + 1 for ramp in ramp_blocks), blocks.shape[1]], blocks + ramps
    for size in sizes:
        count = max(1, round(size))
        between = size * np.array([1.0, *(each / count for each in staying(count, len(ramp_blocks)))])
        taken_s = float(np.median(rounds[size].stopping))
        own_s = launch_s * (1 + len(ramp_blocks)) + sum(
            np.interp(here, sizes, both[:, block])
            for here, blocks_here in zip(between, pairwise(begins), strict=True)
            for block in range(*blocks_here)
        )
        known.append((len(ramp_blocks) / taken_s, float(between[:-1].sum()) / taken_s))  # each size counts the same
        beyond.append((taken_s - own_s) / taken_s)
    if len(sizes) == 1:
        return launch_s + max(0.0, beyond[0] / known[0][0]), 0.0
    (more_s, each_input_s), _ = nnls(np.array(known), np.array(beyond))
    return launch_s + float(more_s), float(each_input_s)


def staying(count: int, stops: int) -> list[int]:
    """In the measurement of stops: the inputs of a batch that remain after each stop.

    >>> staying(32, 11), staying(3, 4), staying(1, 2)
    ([27, 23, 20, 17, 14, 12, 10, 8, 6, 5, 4], [2, 1, 1, 1], [1, 1])
    """
    left = list[int]()
    for _ in range(stops):
        count = max(1, count - 1 - count // LEAVING)
        left.append(count)
    return left


def _block_s(rounds: Rounds, launch_s: float) -> Floats:
    alone = np.median(rounds.blocks, axis=0)
    own = np.maximum(alone - launch_s, 0.05 * alone)
    together = float(np.median(rounds.whole))
    blocks: Floats = own * max(together - launch_s, 0.5 * together) / own.sum()
    return blocks


def _rounded(rows: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(_digits(value) for value in row) for row in rows)


def _digits(value: float) -> float:
    """Rounded to four digits, which is more than any clock gives, and easy to read."""
    return float(f"{value:.4g}")


def whole_s(table: LatencyTable) -> Floats:
    """Seconds of one launch through all blocks, without ramps, at the table's own sizes."""
    seconds: Floats = table.launch_s + np.asarray(table.block_s).sum(axis=1)
    return seconds


def rate_per_s(table: LatencyTable, batch: ArrayLike) -> Floats:
    """Inputs per second in launches of this size through all blocks, without ramps."""
    sizes = np.asarray(batch, float)
    seconds = interpolate(np.asarray(table.batch_sizes, float), whole_s(table)[:, None], sizes)[..., 0]
    return sizes / seconds


def knee(table: LatencyTable) -> int:
    """The smallest batch that nearly reaches the best measured rate."""
    batches = np.arange(1, table.largest + 1)
    rates = rate_per_s(table, batches)
    return int(batches[np.argmax(rates >= GOOD_ENOUGH * rates.max())])
