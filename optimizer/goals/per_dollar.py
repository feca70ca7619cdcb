"""The most inputs per dollar; the value is dollars per hour for each input per second."""

from collections.abc import Callable

import numpy as np

from isobatch.optimizer.effort import Floats, Number
from isobatch.optimizer.goals.goal import Goal, register
from isobatch.optimizer.goals.relaxation import Cut, Relaxation, at_least_0


@register
class GoodputPerDollar(Goal):
    """Cost grows with the replicas as goodput does, so any number of replicas may be the best."""

    name = "goodput-per-dollar"
    about = "the most inputs per dollar"
    best_alone = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return cost_per_hour / goodput_per_s

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        return price * loads_s

    def first_bound(self, relaxation: Relaxation) -> Cut:
        return relaxation.plain_cut(relaxation.prices)

    def cuts(self, relaxation: Relaxation) -> list[Cut]:
        """dollars per input >= price . loads + nu * (latency - budget): only lateness has a multiplier."""

        def solve(multipliers: Floats) -> tuple[Cut, Floats]:
            cut, path = relaxation.cut(relaxation.prices, float(multipliers[0]))
            return cut, np.array([relaxation.late(path)])

        return relaxation.ascend(np.zeros(1), at_least_0, solve)
