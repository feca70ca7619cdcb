"""What exits bring when survivors of several launches run deep together, by arithmetic.

N sequences are resident. The first part of the network takes the share `f` of its time, and a token goes on with the
probability `p`. The deep part runs once for every `k` launches of the first: then 1 - (1 - p)^k of the sequences wait.
Times are in units of what all rows of one launch cost through all blocks; `fixed` is what a launch costs beside that,
and `fill` is what a row costs that only makes keys and values, compared with one that is needed (1: just as much).
"""

from collections.abc import Iterable
from dataclasses import dataclass

MOST_LAUNCHES = 12


@dataclass(frozen=True)
class DeepRhythm:
    """How often the deep part runs, the share of the residents that then waits, and the gain over full depth."""

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
    """Which of these (f, p) gains most, and its rhythm.

    >>> best_cut([(0.25, 0.9), (0.5, 0.2)], fixed=1.0, fill=0.5)[0]
    1
    """
    found = [rhythm(f, p, fixed, fill) for f, p in shares]
    place = max(range(len(found)), key=lambda each: found[each].gain)
    return place, found[place]
