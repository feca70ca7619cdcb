"""What came of a burst: how much was answered in time, and how soon another plan ran. Only arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.cluster.load.generator import LoadRecord

REFUSED = 503


@dataclass(frozen=True)
class Burst:
    """Times are in seconds since 1970. `rolled_out_s`: when fronts followed another plan, meanwhile."""

    good_per_s: float
    refused_s: float | None  # the first refusal
    ended_s: float
    rolled_out_s: Sequence[float] = ()
    on_a_small_plan: bool = False  # when it began

    @classmethod
    def of(
        cls, record: LoadRecord, began_s: float, slo_ms: float, rolled_out_s: Sequence[float] = (), small: bool = False
    ) -> "Burst":
        seconds = float(record.due_s.max(initial=0.0))
        good = (record.status == 200) & (1e3 * (record.ended_s - record.due_s) <= slo_ms)
        refused_s = record.ended_s[record.status == REFUSED]
        first_s = began_s + float(refused_s.min()) if len(refused_s) else None
        return cls(float(good.sum()) / max(seconds, 1e-9), first_s, began_s + seconds, rolled_out_s, small)


def share_of(mine: Sequence[Burst], theirs: Sequence[Burst]) -> float:
    """
    >>> share_of([Burst(97.0, None, 0.0)], [Burst(100.0, None, 0.0)])
    0.97
    """
    return sum(each.good_per_s for each in mine) / max(1e-9, sum(each.good_per_s for each in theirs))


def reacted_s(burst: Burst) -> float:
    """Seconds from the first refusal until another plan ran; where none did, until the burst ended.

    >>> reacted_s(Burst(9, 100, 120, [101.5])), reacted_s(Burst(9, 100, 120)), reacted_s(Burst(9, None, 120))
    (1.5, 20, 0.0)
    """
    if burst.refused_s is None:
        return 0.0
    return max(0.0, min([*burst.rolled_out_s, burst.ended_s]) - burst.refused_s)


def believed_error(believed: Sequence[float], known: Sequence[float]) -> float:
    """How far off the share is that is believed to enter a block, at the worst block; 1 where nothing is believed.

    >>> believed_error([1.0, 0.5], [1.0, 0.75]), believed_error([], [1.0])
    (0.25, 1.0)
    """
    return float(np.abs(np.subtract(believed, known)).max()) if len(believed) == len(known) else 1.0
