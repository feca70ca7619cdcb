"""How hard the search tries, and when two numbers count as equal: every constant that was tuned rather than derived."""

from collections.abc import Callable
from dataclasses import dataclass, replace

SAME = 1e-9  # values that differ by a smaller share are one value
LAST_BITS = 1e-12  # what rounding errors add up to
# The share of the network's time that a split seems to cost more, so that of equal plans the shortest is taken.
TIE_BREAK = 1e-12
MOST_GAP = 1e6  # where nothing is proved, as JSON has no infinity
# The bits of a float's 64 that do not count when partial plans are compared: the eleventh digit and beyond.
SPARE_BITS = 18


def never() -> bool:
    return False


@dataclass(frozen=True)
class Effort:
    """More effort takes longer and leaves a smaller gap; no choice of these numbers makes a gap untrue."""

    # Multipliers (search/bounds.py): steps of the ascent, and how far above the best bound each step aims.
    ascent_steps: int = 40
    first_hope: float = 0.1
    last_hope: float = 1e-4
    hope_after_failure: float = 0.7
    cuts: int = 6  # the tightest ones are used

    # Sweeps (search/sweeps.py): how many partial plans are kept before one block.
    narrow: int = 48
    wide: int = 300
    full: int = 2_000  # a problem whose proof needs more is answered with a gap
    crowd: int = 16  # times as many are compared before the best of them are kept
    pairs: int = 2_000_000  # of partial plan and option, looked at in one go
    first_limits: tuple[float, ...] = (1.02, 1.2, 2.0, 4.0)  # times the bound: where to look for a first plan
    near: float = 1.003  # bound and plan this close: time for the proof
    fewer: float = 0.8  # when this share of the options is left, new multipliers are worth their time
    placements_per_kind: int = 16  # on a kind that is too small for the whole network

    # Pipelines side by side (pipelines/): what is tried of many kinds, and the ceiling's multipliers.
    kinds_in_all_sets: int = 4  # of more kinds, only single ones, pairs and the whole fleet are chained
    kinds_in_all_orders: int = 4  # more kinds are used up in one order only: the most inputs per dollar first
    kinds_shared: int = 4  # of more kinds, each belongs to one pipeline
    worthwhile: float = 0.002  # a chain of shared kinds has to sustain this share more than its devices do alone
    ceiling_steps: int = 30
    ceiling_cuts: int = 2
    ceiling_halvings: int = 4

    # Whether the time for planning is over. A first plan is looked for all the same; the best one so far is the answer.
    out_of_time: Callable[[], bool] = never

    @property
    def patient(self) -> "Effort":
        """The same, however long it takes."""
        return replace(self, out_of_time=never)


EFFORT = Effort()
