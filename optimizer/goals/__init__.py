"""The goals that a plan can have. Importing this package registers the four goals by their names."""

from optimizer.goals.cost import Cost
from optimizer.goals.goal import GOALS, Goal, register
from optimizer.goals.goodput import Goodput
from optimizer.goals.latency import Latency
from optimizer.goals.per_dollar import GoodputPerDollar

__all__ = ["GOALS", "Cost", "Goal", "Goodput", "GoodputPerDollar", "Latency", "register"]
