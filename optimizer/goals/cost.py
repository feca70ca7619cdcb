"""The cheapest devices for a given goodput; the value is dollars per hour."""

from collections.abc import Callable

import numpy as np

from isobatch.optimizer.effort import LAST_BITS, Floats, Number
from isobatch.optimizer.goals.goal import Goal, register
from isobatch.optimizer.goals.relaxation import Cut, Relaxation, at_least_0


@register
class Cost(Goal):
    """The least dollars: the best plan takes the fewest replicas that keep the limits."""

    name = "cost"
    about = "the fewest dollars that sustain a rate"
    best_with = "fewest"
    at_given_goodput = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return cost_per_hour

    def most_dollars(self, value: float) -> float:
        return value * (1 + LAST_BITS)

    def saving(self, share: float) -> str:
        return f"costs {abs(share):.1%} {'less' if share > 0 else 'more'}"

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        return price * np.minimum(fewest, most)

    def first_bound(self, relaxation: Relaxation) -> Cut:
        return relaxation.plain_cut(relaxation.goodput_per_s * relaxation.prices)

    def cuts(self, relaxation: Relaxation) -> list[Cut]:
        """dollars >= goodput * (price + eta) . loads - eta . counts + nu * (latency - budget).

        The multipliers eta make scarce kinds dearer than they are.
        """
        counts, goodput_per_s = relaxation.counts, relaxation.goodput_per_s

        def solve(multipliers: Floats) -> tuple[Cut, Floats]:
            eta = multipliers[:-1] * relaxation.scale / counts
            mu = goodput_per_s * (relaxation.prices + eta)
            cut, path = relaxation.cut(mu, multipliers[-1], float(eta @ counts))
            overdrawn = (goodput_per_s * path.loads / counts - 1) * relaxation.scale
            return cut, np.append(overdrawn, relaxation.late(path))

        return relaxation.ascend(np.zeros(relaxation.kinds + 1), at_least_0, solve)
