"""The goals that a plan can have, one file each. Importing this package registers them by their names."""

from importlib import import_module
from pkgutil import iter_modules

from isobatch.optimizer.goals.goal import GOALS, Goal, register

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

__all__ = ["GOALS", "Goal", "register"]
