"""The confidence that new inputs lose no more than is allowed, given the losses of tested inputs.

Every input wins (-1), loses (1) or neither. The mean loss plus `margin` standard errors must be within the allowed
loss, as in the usual test. But the margin is the least one with which chance passes the test in at most 1 - confidence
of cases if the true loss is the allowed one, whatever the shares of winning and losing inputs. That chance is a sum
over all outcomes, so it is valid for few inputs, too. Only the share of inputs that win or lose is sampled: at
TRIED_SHARES places between its least and greatest value.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrik, gammaln, xlog1py, xlogy

from isobatch.profiles.losses import Loss, Metric

TRIED_SHARES = 48  # shares of inputs that win or lose, at which the chance of passing is computed
MAX_MARGIN = 64.0  # standard errors: no test needs a larger margin
BISECTION_STEPS = 20  # bisection steps for a margin or a bound
NEGLIGIBLE = 1e-10  # numbers of winning inputs beyond these tails of the distribution are left out


@cache
def margin_of(count: int, max_loss: float, confidence: float, metric: Metric) -> float:
    """The margin in standard errors that the mean loss of `count` inputs must keep from `max_loss`.

    >>> [round(margin_of(count, 0.01, 0.95, "accuracy"), 2) for count in (1000, 4000)]
    [2.05, 1.8]
    """
    outcomes, low, high = _outcomes(count, max_loss, metric), 0.0, MAX_MARGIN
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if outcomes.chance(middle) <= 1 - confidence else (middle, high)
    return high


def shown(lost: Loss, max_loss: float, confidence: float, metric: Metric) -> bool:
    """Whether the loss of these inputs shows that other inputs lose no more than `max_loss`."""
    return bool(lost.within(max_loss, margin_of(lost.counted, max_loss, confidence, metric)))


def bound(lost: Loss, confidence: float, metric: Metric) -> float:
    """The most that other inputs lose, with this confidence.

    >>> round(bound(Loss(0.0, 0.0, 299), 0.95, "agreement"), 4)
    0.01
    """
    low, high = max(lost.mean, 0.0), 1.0
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        margin = float((middle - lost.mean) / lost.error)
        chance = _outcomes(lost.counted, middle, metric).chance(margin)
        low, high = (low, middle) if chance <= 1 - confidence else (middle, high)
    return high


def rows_needed(max_loss: float, confidence: float) -> int:
    """The fewest inputs that can show a loss of at most `max_loss` (above 0), if none of them loses.

    >>> rows_needed(0.01, 0.95)
    299
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - max_loss))


def least_promise(count: int, confidence: float) -> float:
    """The least loss that `count` inputs can show, if none of them loses.

    >>> round(least_promise(299, 0.95), 5)
    0.00997
    """
    return float(1 - (1 - confidence) ** (1 / count))


@dataclass(frozen=True)
class _Outcomes:
    """All numbers of winning inputs, for each tried share of inputs that win or lose, if the mean loss is `max_loss`.

    One row each: the share that it belongs to, the number of winning inputs, the probability of that number, and the
    probability that any of the other inputs loses.
    """

    count: int
    max_loss: float
    share: NDArray[np.int64]
    won: NDArray[np.int64]
    likely: NDArray[np.float64]
    losing: NDArray[np.float64]

    def chance(self, margin: float) -> float:
        """The probability that these inputs pass the test, at the worst share."""
        lost = _most_lost(self.won, self.count, self.max_loss, margin)
        few_lost = np.zeros(len(lost))
        possible = lost >= 0
        few_lost[possible] = bdtr(lost[possible], self.count - self.won[possible], self.losing[possible])
        return float(np.bincount(self.share, self.likely * few_lost).max())


def _outcomes(count: int, max_loss: float, metric: Metric) -> _Outcomes:
    """The outcomes of a test, without numbers of winning inputs of negligible probability."""
    shares = np.array([max_loss])
    if metric != "agreement":
        shares = np.geomspace(max(max_loss, 1 / count), 1.0, TRIED_SHARES)
    losing, winning = (shares + max_loss) / 2, np.maximum(shares - max_loss, 0.0) / 2
    numbers = []
    for chance in winning.tolist():
        fewest, most = bdtrik([NEGLIGIBLE, 1 - NEGLIGIBLE], count, chance) if chance else (0, 0)
        numbers.append(np.arange(math.floor(fewest), math.ceil(most) + 1))
    share, won = np.repeat(np.arange(len(numbers)), [len(each) for each in numbers]), np.concatenate(numbers)
    of_others = np.minimum(losing / (1 - winning), 1.0)
    return _Outcomes(count, max_loss, share, won, _binomial(won, count, winning[share]), of_others[share])


def _binomial(successes: NDArray[np.int64], count: int, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability of each number of successes. `scipy.stats` has it too, but its import takes 0.4 s."""
    ways = gammaln(count + 1) - gammaln(successes + 1) - gammaln(count - successes + 1)
    likely: NDArray[np.float64] = np.exp(ways + xlogy(successes, chance) + xlog1py(count - successes, -chance))
    return likely


def _most_lost(won: NDArray[np.int64], count: int, max_loss: float, margin: float) -> NDArray[np.int64]:
    """The most inputs that may lose for the test to pass, for each number of winning inputs; -1: none may."""
    low, high = np.full(len(won), -1), np.minimum(count - won, won + math.ceil(count * max_loss))
    while (low < high).any():
        middle = (low + high + 1) // 2
        mean, square = (middle - won) / count, (middle + won) / count
        passed = Loss(mean, square, count).within(max_loss, margin)
        low, high = np.where(passed, middle, low), np.where(passed, high, middle - 1)
    return low
