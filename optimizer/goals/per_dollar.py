"""The most inputs per dollar; the value is dollars per hour for each input per second."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from optimizer.goals.goal import Floats, Goal, Number, register

if TYPE_CHECKING:
    from optimizer.search.bounds import Cut
    from optimizer.search.multipliers import Relaxation


@register
class GoodputPerDollar(Goal):
    """More replicas cost as much more as they bring, so that any number of them may be the best."""

    name = "goodput-per-dollar"

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return cost_per_hour / goodput_per_s

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        return price * loads_s

    def first_bound(self, relaxation: "Relaxation") -> "Cut":
        return relaxation.plain_cut(relaxation.valuation.prices)

    def cuts(self, relaxation: "Relaxation") -> "list[Cut]":
        """dollars per input >= price . loads + nu * (latency - budget): only lateness has a multiplier."""

        def solve(multipliers: Floats) -> "tuple[Cut, Floats]":
            found, path = relaxation.cut(relaxation.valuation.prices, float(multipliers[0]))
            return found, np.array([relaxation.late(path)])

        return relaxation.ascend(np.zeros(1), relaxation.at_least_0, solve)
