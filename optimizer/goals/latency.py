"""The fastest answer at full load; the value is seconds."""

from collections.abc import Callable

from isobatch.optimizer.effort import Floats, Number
from isobatch.optimizer.goals.goal import Goal, register
from isobatch.optimizer.goals.relaxation import Cut, Relaxation


@register
class Latency(Goal):
    """The shortest latency. The best plan uses all replicas, since an input then waits least."""

    name = "latency"
    about = "the quickest answers"
    best_with = "most"
    needs_latency = True
    best_alone = True
    quickest = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return latency_s

    def most_seconds_per_input(self, value: float) -> float:
        """At least one input waits in every batch, so latency is no shorter than the time per input."""
        return value

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        return latency_s(max(most, 1.0) / loads_s)

    def first_bound(self, relaxation: Relaxation) -> Cut:
        return relaxation.fastest()
