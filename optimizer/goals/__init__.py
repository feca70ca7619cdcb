"""What a plan can be for. Importing this package makes the four goals known by their names."""

from optimizer.goals.cost import Cost
from optimizer.goals.goal import GOALS, Goal, register
from optimizer.goals.goodput import Goodput
from optimizer.goals.latency import Latency
from optimizer.goals.per_dollar import GoodputPerDollar

__all__ = ["GOALS", "Cost", "Goal", "Goodput", "GoodputPerDollar", "Latency", "register"]
