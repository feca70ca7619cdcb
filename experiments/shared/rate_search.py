"""What systems sustain that take turns of seconds, so that a machine whose speed changes is as slow for each of them.

Each has a rate of its own, which rises after runs that pass and falls after those that fail. An overload shows only
once its queue is as long as a request may wait. So the first seconds at a rate do not count. Still, if these and the
run last n times that long together, a rate that passes may be 1 / n too high.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from isobatch.cluster.load.generator import Floats, LoadGenerator, LoadRecord
from isobatch.profiles.errors import UserError

FIRST = 0.95  # of what a plan promises: the first guess
AWAY = 0.2  # from the first guess, in logarithms: the standard deviation of the rates that are believed in at first
MOST_AWAY = 0.7  # the same, of the candidates farthest from it
CANDIDATES = 281  # rates: one every half a percent
STEEPNESS = 25.0  # 8 % below the rate of which half of the runs pass, 88 % do; 8 % above it, 12 %
BY_CHANCE = 0.05  # of the runs pass or fail whatever the rate
LEAD_S = 4.0  # at the same rate before a run, for queues to build up; its requests do not count
LOOK_S = 0.5  # how often a run is looked at, which ends as soon as too many requests are lost
console = Console(stderr=True, width=140)


class RateSearch:
    """Finds the rate at which half of the runs pass. The next run is at the rate that all runs so far make likeliest.

    A run may fail by chance far below that rate, where the machine is slow for some seconds, or pass far above it.

    >>> search = RateSearch(100.0)
    >>> for run in range(10):
    ...     search.add(passed=search.per_s < 130 and run != 1)
    >>> 120 < search.sustained_per_s < 135
    True
    """

    def __init__(self, guess_per_s: float) -> None:
        self.per_s = guess_per_s  # of the next run
        self.runs: list[tuple[float, bool]] = []
        away = np.linspace(-MOST_AWAY, MOST_AWAY, CANDIDATES)
        self._candidates = guess_per_s * np.exp(away)
        self._chances = np.exp(-((away / AWAY) ** 2) / 2)

    def add(self, passed: bool) -> None:
        self.runs.append((self.per_s, passed))
        passes = BY_CHANCE + (1 - 2 * BY_CHANCE) / (1 + (self.per_s / self._candidates) ** STEEPNESS)
        self._chances *= passes if passed else 1 - passes
        self.per_s = float(np.exp(np.average(np.log(self._candidates), weights=self._chances)))

    @property
    def sustained_per_s(self) -> float:
        """The likeliest rate; 0 if no run passed."""
        return self.per_s if any(passed for _, passed in self.runs) else 0.0


async def in_turns(
    searches: Mapping[str, RateSearch], turns: int, passes: Callable[[str, float, int], Awaitable[bool]]
) -> None:
    """A run of each system in each turn, in every other turn the other way round.

    `passes` gets the name of a system, its rate, and the number of the turn.
    """
    for turn in range(turns):
        for name in list(searches)[:: 1 if turn % 2 == 0 else -1]:
            searches[name].add(await passes(name, searches[name].per_s, turn))
        ran = ", ".join(f"{name} {own.runs[-1][0]:.4g}/s {'+-'[not own.runs[-1][1]]}" for name, own in searches.items())
        console.print(f"turn {turn + 1} of {turns}: {ran}")


async def run_passes(
    load: LoadGenerator, due_s: Floats, lead_s: float, share: float,
    lost: Callable[[LoadRecord, float], NDArray[Any]], patience_s: float | None = None,
) -> bool:  # fmt: skip
    """Whether at most this share of the requests due after `lead_s` is lost: refused, or late.

    `lost` gets the record of the requests that were sent and the time, and returns which of them are.
    """
    counted = due_s >= lead_s

    def too_many() -> bool:
        record = load.so_far()
        missed = lost(record, load.now_s()) & counted[: len(record.due_s)]
        return bool(missed.sum() > share * counted.sum())

    if not counted.any():
        raise UserError("no request is due after the lead: runs need more seconds")
    running = asyncio.ensure_future(load.at(due_s, patience_s))
    while not running.done():
        await asyncio.wait({running}, timeout=LOOK_S)
        if too_many():
            load.stop()
    record = await running
    return len(record.status) == len(due_s) and not too_many()
