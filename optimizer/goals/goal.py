"""The interface of a goal for the search. A new goal is one file with one registered class."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import ClassVar, Literal

import numpy as np

from isobatch.optimizer.effort import Floats, Number
from isobatch.optimizer.goals.relaxation import Cut, Relaxation


class Goal(ABC):
    """A value to minimise, and bounds on it.

    The value may never get worse when a plan needs fewer device seconds or answers sooner. Everything but `name` and
    `value` has a default that is right for any such goal; better bounds make the search faster.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # what the best plan has, as text
    best_with: ClassVar[Literal["most", "fewest", "any"]] = "any"  # of the replicas that the objective allows
    needs_latency: ClassVar[bool] = False  # latency matters even when no SLO is given
    at_given_goodput: ClassVar[bool] = False  # the objective gives the goodput, and inputs come at that rate
    adds_up: ClassVar[bool] = False  # it is goodput alone: the goodputs of pipelines side by side add up
    best_alone: ClassVar[bool] = False  # without a goodput to reach, one pipeline is as good as several
    quickest: ClassVar[bool] = False  # a controller weighs the time of answers at the expected rate, not `value`

    @property
    def at_expected_rate(self) -> bool:
        """Whether a controller makes plans for the expected rate, and compares their values."""
        return not (self.adds_up or self.quickest)

    @abstractmethod
    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        """The value of a plan that keeps the limits of the objective: 0 or more; the smaller, the better."""

    def saving(self, share: float) -> str:
        """What a plan saves whose value is smaller by this share, as text."""
        return f"is {abs(share):.1%} {'better' if share > 0 else 'worse'} by the goal {self.name}"

    def least_goodput_per_s(self, value: float) -> float:
        """A goodput that every plan sustains whose value is at most this."""
        return 0.0

    def most_dollars(self, value: float) -> float:
        """The most dollars per hour that a plan costs whose value is at most this."""
        return inf

    def most_seconds_per_input(self, value: float) -> float:
        """The inverse of a goodput that every plan sustains whose value is at most this."""
        return inf

    def least_seconds_per_input(self, bound: float) -> float:
        """The inverse of a goodput that no plan exceeds, when no plan's value is below this bound."""
        return 0.0

    def of_one_placement(
        self, loads_s: Floats, fewest: Floats, most: float, price: float, latency_s: Callable[[Floats], Floats]
    ) -> Floats:
        """Values of many plans of one placement each, with the best of `fewest` to `most` replicas.

        `price` is that of one replica, `latency_s` gives the latencies at goodputs.
        """
        replicas = np.arange(1.0, max(most, 1.0) + 1)[:, None]
        goodputs = replicas / loads_s
        values = np.broadcast_to(self.value(goodputs, replicas * price, latency_s(goodputs)), goodputs.shape)
        return np.asarray(np.where(replicas >= fewest, values, inf).min(axis=0))

    def first_bound(self, relaxation: Relaxation) -> Cut:
        """A bound without a search for multipliers; it sets the scale of values."""
        return relaxation.cut(np.zeros(relaxation.kinds))[0]

    def cuts(self, relaxation: Relaxation) -> list[Cut]:
        """Bounds at multipliers that are improved step by step, the tightest last."""
        return [self.first_bound(relaxation)]


GOALS: dict[str, Goal] = {}  # by their names in files, options and the controller's `args:`


def register(goal: type[Goal]) -> type[Goal]:
    """Add a goal to GOALS by its name."""
    GOALS[goal.name] = goal()
    return goal
