"""The constants of the search: its effort, and when two numbers count as equal. They were tuned, not derived.

It also has the types of the arrays that the planner computes with.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Number = Any  # a float or an array of floats: numpy broadcasts

SAME = 1e-9  # values that differ by a smaller share are equal
LAST_BITS = 1e-12  # the size of accumulated rounding errors, as a share
# The extra cost of each split, as a share of the network's time: among equal plans, the one with fewest splits wins.
TIE_BREAK = 1e-12
MOST_GAP = 1e6  # the gap where nothing is proved: JSON has no infinity
# Of the 64 bits of a float, those that are ignored when partial plans are compared: from the eleventh digit on.
SPARE_BITS = 18


def never() -> bool:
    return False


@dataclass(frozen=True)
class Effort:
    """More effort takes longer and leaves a smaller gap. The reported gap is right for any of these numbers."""

    # Multipliers (goals/relaxation.py): steps of the ascent, and how far above the best bound each step aims.
    ascent_steps: int = 40
    first_hope: float = 0.1
    last_hope: float = 1e-4
    hope_after_failure: float = 0.7
    cuts: int = 6  # the tightest of all cuts, which are used

    # Sweeps (search/sweeps.py): the number of partial plans before one block.
    narrow: int = 48
    wide: int = 300
    full: int = 2_000  # if a proof needs more, the plan is returned with a gap
    crowd: int = 16  # times as many partial plans are compared before the best are selected
    pairs: int = 2_000_000  # pairs of partial plan and option in one array
    first_limits: tuple[float, ...] = (1.02, 1.2, 2.0, 4.0)  # limits for a first plan, as multiples of the bound
    near: float = 1.003  # a plan within this factor of the bound is near enough for the proof
    fewer: float = 0.8  # when this share of the options is left, new multipliers are computed for them
    placements_per_kind: int = 16  # on a kind that is too small for the whole network

    # Pipelines side by side (pipelines/): what is tried when there are many kinds, and the ceiling's multipliers.
    kinds_in_all_sets: int = 4  # with more kinds, only single kinds, pairs and the whole fleet are chained
    kinds_in_all_orders: int = 4  # with more kinds, only one order is tried: the most inputs per dollar first
    kinds_shared: int = 4  # with more kinds, each kind belongs to one pipeline
    worthwhile: float = 0.002  # the least gain of a chain of shared kinds over its devices alone, as a share
    ceiling_steps: int = 30
    ceiling_cuts: int = 2
    ceiling_halvings: int = 4

    # Whether the time for planning is over. A first plan is always searched for; after it, the best one is returned.
    out_of_time: Callable[[], bool] = never

    @property
    def patient(self) -> "Effort":
        """The same effort without a time limit."""
        return replace(self, out_of_time=never)


EFFORT = Effort()
