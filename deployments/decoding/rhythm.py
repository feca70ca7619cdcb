"""The gain of exits when survivors of several launches run deep together, by arithmetic.

N sequences are resident. The first part of the network takes the share `f` of its time, and a token goes on with
probability `p`. The deep part runs once for every `k` launches of the first: then 1 - (1 - p)^k of the sequences wait.
The unit of time is the cost of all rows of one launch through all blocks. `fixed` is the cost of a launch beside its
rows; `fill` is the cost of a row that only makes keys and values, relative to a row that is needed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MOST_LAUNCHES = 12  # of the first part, for one of the deep part


@dataclass(frozen=True)
class DeepRhythm:
    """The launches of the first part for one of the deep part, the share of residents that then wait, and the gain."""

    launches: int
    share: float
    gain: float


def rhythm(f: float, p: float, fixed: float, fill: float) -> DeepRhythm:
    """The best rhythm for a cut.

    Where a launch costs nothing but its rows, and filling is free, a token costs f + p (1 - f):

    >>> round(rhythm(f=0.25, p=0.3, fixed=0.0, fill=0.0).gain, 2)
    2.11

    Where it costs the same whatever its rows, two or three launches of the first part go before one of the deep part:

    >>> best = rhythm(f=0.25, p=0.3, fixed=1e6, fill=1.0)
    >>> best.launches, round(best.share, 2), round(best.gain, 2)
    (3, 0.66, 1.46)
    """
    if p >= 1.0:
        return DeepRhythm(1, 1.0, 1.0)
    return max((_rhythm(f, p, fixed, fill, k) for k in range(1, MOST_LAUNCHES + 1)), key=lambda each: each.gain)


def _rhythm(f: float, p: float, fixed: float, fill: float, k: int) -> DeepRhythm:
    q = 1.0 - p
    launches = (1.0 + (k - 1) * f) * fixed * (p / (1.0 - q**k) if p else 1.0 / k)
    rows = f + p * (1.0 - f) + fill * q * (1.0 - f)
    return DeepRhythm(k, 1.0 - q**k if p else 1.0, (fixed + 1.0) / (launches + rows))


def best_cut(shares: Iterable[tuple[float, float]], fixed: float, fill: float) -> tuple[int, DeepRhythm]:
    """The index of the pair (f, p) that gains most, and its rhythm.

    >>> best_cut([(0.25, 0.9), (0.5, 0.2)], fixed=1.0, fill=0.5)[0]
    1
    """
    rhythms = [rhythm(f, p, fixed, fill) for f, p in shares]
    place = max(range(len(rhythms)), key=lambda index: rhythms[index].gain)
    return place, rhythms[place]
