"""What a run under the controller lost, and what came of a burst: only arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isobatch.cluster.load.generator import LoadRecord
from isobatch.cluster.load.workloads import Floats, Ints

HARM = 0.02  # the goodput that a change may cost in a window
ERRORS = 2.0  # standard errors that are chance


@dataclass(frozen=True)
class PlayedChange:
    """A change of plan, and the plan that ran before, by its number among those that stay."""

    at_s: float
    before: int


@dataclass(frozen=True)
class Replay:
    """Inputs of each window that came and that were answered in time: under the controller, and under plans that stay.

    `staying` has a row for each plan. A change is judged for `hold_s` at most, since later ones are new decisions.
    """

    window_s: float
    arrived: Ints
    controlled: Ints
    staying: Ints
    changes: Sequence[PlayedChange] = ()
    hold_s: float = 1800.0

    @cached_property
    def best(self) -> int:
        """The plan that stays with the most answers in time over the whole run."""
        return int(self.staying.sum(axis=1).argmax())

    @property
    def regret(self) -> float:
        """The share of the best fixed plan's goodput that is lost; below 0 where more is answered than by any of them.

        >>> Replay(60.0, np.array([9, 9]), np.array([9, 8]), np.array([[9, 1], [7, 9]])).regret
        -0.0625
        """
        return lost_share(int(self.controlled.sum()), int(self.staying[self.best].sum()))

    @property
    def worst_hour(self) -> float:
        """The same in the hour in which most was lost, wherever it begins."""
        windows = min(len(self.controlled), max(1, round(3600.0 / self.window_s)))
        mine, theirs = (_rolling(each, windows) for each in (self.controlled, self.staying[self.best]))
        return max(lost_share(one, other) for one, other in zip(mine.tolist(), theirs.tolist(), strict=True))

    @property
    def hindsight_share(self) -> float:
        """Of what one could answer that knew the best of the fixed plans for every window before it came."""
        possible = int(self.staying.max(axis=0).sum())
        return 1.0 - lost_share(int(self.controlled.sum()), possible)

    @cached_property
    def judged(self) -> dict[int, int]:
        """The windows that a change is responsible for, and the plan that ran before that change."""
        result: dict[int, int] = {}
        for number, change in enumerate(self.changes):
            later = self.changes[number + 1].at_s if number + 1 < len(self.changes) else np.inf
            first, until_s = int(change.at_s // self.window_s), min(later, change.at_s + self.hold_s)
            for window in range(first, min(len(self.arrived), int(np.ceil(until_s / self.window_s)))):
                result[window] = change.before
        return result

    @cached_property
    def harmed(self) -> tuple[int, ...]:
        """The windows in which the plan before would have answered clearly more."""
        arrived, controlled = self.arrived.astype(float), self.controlled.astype(float)
        return tuple(
            window
            for window, plan in self.judged.items()
            if is_harm(arrived[window], controlled[window], float(self.staying[plan, window]))
        )


def lost_share(mine: float, theirs: float) -> float:
    """
    >>> lost_share(98, 100), lost_share(0, 0)
    (0.02, 0.0)
    """
    return (theirs - mine) / theirs if theirs else 0.0


def is_harm(arrived: float, mine: float, theirs: float) -> bool:
    """Whether one answers over 2 % less than the other, and by more than two standard errors of such shares.

    No more than what came counts: the rest are answers to inputs of the window before, which ended late by chance.

    >>> is_harm(1000, 1000, 1000), is_harm(1000, 900, 1000), is_harm(10, 8, 9), is_harm(27, 30, 31)
    (False, True, False, False)
    >>> is_harm(1546, 1462, 1518)
    True
    """
    mine, theirs = min(mine, arrived), min(theirs, arrived)
    shares = [each / max(arrived, 1.0) for each in (mine, theirs)]
    error = float(np.sqrt(arrived * sum(share * (1 - share) for share in shares)))
    return theirs - mine > HARM * theirs + ERRORS * error


def figures(replays: Mapping[str, Replay]) -> dict[str, float]:
    """By the name of each run. `harm_share` is of the windows that came after a change."""
    judged = sum(len(each.judged) for each in replays.values())
    return {
        "regret_mean": float(np.mean([each.regret for each in replays.values()])),
        "regret_worst_hour": max(each.worst_hour for each in replays.values()),
        "harm_share": sum(len(each.harmed) for each in replays.values()) / max(1, judged),
        **{f"regret_{name}": each.regret for name, each in replays.items()},
        **{f"worst_hour_{name}": each.worst_hour for name, each in replays.items()},
        **{f"harmed_windows_{name}": float(len(each.harmed)) for name, each in replays.items()},
    }


def scaled(windows: Floats, to_per_s: float, quantile: float) -> float:
    """The factor by which this quantile of the windows' rates becomes that rate.

    >>> scaled(np.array([1.0, 2.0, 4.0]), to_per_s=8.0, quantile=1.0)
    2.0
    """
    return to_per_s / float(np.quantile(windows, quantile))


def _rolling(counts: Ints, windows: int) -> Ints:
    return np.asarray(np.convolve(counts, np.ones(windows, np.int64), "valid"), np.int64)


REFUSED = 503


@dataclass(frozen=True)
class Burst:
    """Times are in seconds since 1970. `rolled_out_s`: when fronts followed another plan, meanwhile."""

    good_per_s: float
    refused_s: float | None  # the first refusal
    ended_s: float
    rolled_out_s: Sequence[float] = ()

    @classmethod
    def of(cls, record: LoadRecord, began_s: float, slo_ms: float, rolled_out_s: Sequence[float] = ()) -> "Burst":
        seconds = float(record.due_s.max(initial=0.0))
        good = (record.status == 200) & (1e3 * (record.ended_s - record.due_s) <= slo_ms)
        refused_s = record.ended_s[record.status == REFUSED]
        first_s = began_s + float(refused_s.min()) if len(refused_s) else None
        return cls(float(good.sum()) / max(seconds, 1e-9), first_s, began_s + seconds, rolled_out_s)


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
