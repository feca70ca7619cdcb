"""How sure one can be that inputs not seen yet lose no more than is allowed, when so many were seen to lose so much.

Every input wins (-1), loses (1) or neither. The test is the usual one: the mean loss and `margin` standard errors of it
must be within what is allowed. What is not usual is the margin: it is the least one under which chance passes the test
in at most 1 - confidence of cases, whatever the shares of those who win and lose, if the true loss is what is allowed.
That chance is a sum over all outcomes, so it holds for few inputs as for many. Only the share of inputs that win or
lose is tried at TRIED places between the least and the greatest possible, not at all.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrik, gammaln, xlog1py, xlogy

from profiles.losses import Loss, Metric

TRIED = 48
WIDEST = 64.0  # standard errors: more is no margin but a refusal
STEPS = 20
NEGLIGIBLE = 1e-10


@cache
def margin_of(count: int, max_loss: float, confidence: float, metric: Metric) -> float:
    """Standard errors that the loss of so many inputs must keep from `max_loss`.

    >>> [round(margin_of(count, 0.01, 0.95, "accuracy"), 2) for count in (1000, 4000)]
    [2.05, 1.8]
    """
    outcomes, low, high = _outcomes(count, max_loss, metric), 0.0, WIDEST
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if outcomes.chance(middle) <= 1 - confidence else (middle, high)
    return high


def shown(lost: Loss, max_loss: float, confidence: float, metric: Metric) -> bool:
    """Whether these inputs show that others lose no more than this."""
    return bool(lost.within(max_loss, margin_of(lost.counted, max_loss, confidence, metric)))


def bound(lost: Loss, confidence: float, metric: Metric) -> float:
    """What other inputs lose at most, with this confidence.

    >>> round(bound(Loss(0.0, 0.0, 299), 0.95, "agreement"), 4)
    0.01
    """
    low, high = max(lost.mean, 0.0), 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        margin = float((middle - lost.mean) / lost.error)
        chance = _outcomes(lost.counted, middle, metric).chance(margin)
        low, high = (low, middle) if chance <= 1 - confidence else (middle, high)
    return high


def rows_needed(max_loss: float, confidence: float) -> int:
    """The fewest inputs that can show this, which is more than 0, if none of them loses.

    >>> rows_needed(0.01, 0.95)
    299
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - max_loss))


def least_promise(count: int, confidence: float) -> float:
    """The least loss that so many inputs can show, if none of them loses.

    >>> round(least_promise(299, 0.95), 5)
    0.00997
    """
    return float(1 - (1 - confidence) ** (1 / count))


@dataclass(frozen=True)
class _Outcomes:
    """Every number of inputs that may win, for every share of inputs that wins or loses, if so much is lost on average.

    One row for each: which share it belongs to, how many win, how likely that is, and how likely each of the others
    loses.
    """

    count: int
    max_loss: float
    share: NDArray[np.int64]
    won: NDArray[np.int64]
    likely: NDArray[np.float64]
    losing: NDArray[np.float64]

    def chance(self, margin: float) -> float:
        """How often these inputs at most pass the test, whichever the share."""
        lost = _most_lost(self.won, self.count, self.max_loss, margin)
        few_lost = np.zeros(len(lost))
        some = lost >= 0
        few_lost[some] = bdtr(lost[some], self.count - self.won[some], self.losing[some])
        return float(np.bincount(self.share, self.likely * few_lost).max())


def _outcomes(count: int, max_loss: float, metric: Metric) -> _Outcomes:
    """Numbers that are as good as impossible are left out."""
    shares = np.array([max_loss]) if metric == "agreement" else np.geomspace(max(max_loss, 1 / count), 1.0, TRIED)
    losing, winning = (shares + max_loss) / 2, np.maximum(shares - max_loss, 0.0) / 2
    each = [_likely_numbers(count, float(chance)) for chance in winning]
    share, won = np.repeat(np.arange(len(each)), [len(one) for one in each]), np.concatenate(each)
    of_others = np.minimum(losing / (1 - winning), 1.0)
    return _Outcomes(count, max_loss, share, won, _binomial(won, count, winning[share]), of_others[share])


def _likely_numbers(count: int, chance: float) -> NDArray[np.int64]:
    fewest, most = bdtrik([NEGLIGIBLE, 1 - NEGLIGIBLE], count, chance) if chance else (0, 0)
    return np.arange(math.floor(fewest), math.ceil(most) + 1)


def _binomial(successes: NDArray[np.int64], count: int, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """How likely each number of successes is; `scipy.stats` knows too, but takes each process 0.4 s to import."""
    ways = gammaln(count + 1) - gammaln(successes + 1) - gammaln(count - successes + 1)
    likely: NDArray[np.float64] = np.exp(ways + xlogy(successes, chance) + xlog1py(count - successes, -chance))
    return likely


def _most_lost(won: NDArray[np.int64], count: int, max_loss: float, margin: float) -> NDArray[np.int64]:
    """How many may lose, for each number of those who win, so that the test is passed; -1: none may."""
    low, high = np.full(len(won), -1), np.minimum(count - won, won + math.ceil(count * max_loss))
    while (low < high).any():
        middle = (low + high + 1) // 2
        mean, square = (middle - won) / count, (middle + won) / count
        passed = Loss(mean, square, count).within(max_loss, margin)
        low, high = np.where(passed, middle, low), np.where(passed, high, middle - 1)
    return low
