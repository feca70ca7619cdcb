"""As many inputs per second as the devices sustain; the value is seconds per input."""

from collections.abc import Callable

import numpy as np

from isobatch.optimizer.effort import Floats, Number
from isobatch.optimizer.goals.goal import Goal, register
from isobatch.optimizer.goals.relaxation import Cut, Relaxation


@register
class Goodput(Goal):
    """The most inputs per second: the best plan takes as many replicas as there are."""

    name = "goodput"
    about = "the most inputs per second"
    best_with = "most"
    adds_up = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return 1 / goodput_per_s

    def least_goodput_per_s(self, value: float) -> float:
        return 1 / value

    def most_seconds_per_input(self, value: float) -> float:
        return value

    def least_seconds_per_input(self, bound: float) -> float:
        return bound

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        return loads_s / max(most, 1.0)

    def first_bound(self, relaxation: Relaxation) -> Cut:
        return relaxation.evenly()

    def cuts(self, relaxation: Relaxation) -> list[Cut]:
        """1 / goodput >= (mu . loads + nu * (latency - budget)) / (the most that mu gives on the devices).

        The multipliers of the kinds sum to 1. A kind that works more than the others gets a larger one.
        """
        counts, fixed_shares = relaxation.counts, relaxation.fixed_shares
        shares = np.full(len(counts), 1 / len(counts)) if relaxation.shares is None else relaxation.shares

        def solve(multipliers: Floats) -> tuple[Cut, Floats]:
            mu = multipliers[:-1] / counts
            cut, path = relaxation.cut(mu / relaxation.most_capacity(mu), multipliers[-1])
            uneven = path.loads / counts * (not fixed_shares)
            return cut, np.append(uneven - uneven.mean(), relaxation.late(path))

        def project(multipliers: Floats) -> Floats:
            return np.append(shares if fixed_shares else onto_simplex(multipliers[:-1]), max(multipliers[-1], 0.0))

        return relaxation.ascend(np.append(shares, relaxation.lateness / relaxation.scale), project, solve)


def onto_simplex(point: Floats) -> Floats:
    """The nearest point whose parts are at least 0 and sum to 1.

    >>> [round(float(part), 2) for part in onto_simplex(np.array([0.9, 0.5, -0.3]))]
    [0.7, 0.3, 0.0]
    """
    point = point - point.max()  # the answer is the same, and the 1 is not lost beside huge numbers
    descending = np.sort(point)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(point) + 1)
    last = np.nonzero(descending > excess)[0][-1]
    projected: Floats = np.maximum(point - excess[last], 0.0)
    return projected
