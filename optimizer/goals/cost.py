"""The cheapest devices for a given goodput; the value is dollars per hour."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from optimizer.goals.goal import Floats, Goal, Number, register

if TYPE_CHECKING:
    from optimizer.search.bounds import Cut
    from optimizer.search.multipliers import Relaxation


@register
class Cost(Goal):
    """The least dollars: the best plan takes the fewest replicas that keep what is asked."""

    name = "cost"
    best_with = "fewest"
    at_given_goodput = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return cost_per_hour

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        return price * np.minimum(fewest, most)

    def first_bound(self, relaxation: "Relaxation") -> "Cut":
        valuation = relaxation.valuation
        return relaxation.plain_cut(valuation.objective.goodput_per_s * valuation.prices)

    def cuts(self, relaxation: "Relaxation") -> "list[Cut]":
        """dollars >= goodput * (price + eta) . loads - eta . counts + nu * (latency - budget).

        The multipliers eta make scarce kinds dearer than they are.
        """
        valuation, goodput_per_s = relaxation.valuation, relaxation.valuation.objective.goodput_per_s

        def solve(multipliers: Floats) -> "tuple[Cut, Floats]":
            eta = multipliers[:-1] * relaxation.scale / valuation.counts
            mu = goodput_per_s * (valuation.prices + eta)
            found, path = relaxation.cut(mu, multipliers[-1], float(eta @ valuation.counts))
            overdrawn = (goodput_per_s * path.loads / valuation.counts - 1) * relaxation.scale
            return found, np.append(overdrawn, relaxation.late(path))

        return relaxation.ascend(np.zeros(relaxation.kinds + 1), relaxation.at_least_0, solve)
