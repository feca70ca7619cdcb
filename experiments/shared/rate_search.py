"""Searches the sustained rates of systems that take turns of seconds, so that a machine's changes of speed hit each.

Each system has its own rate, which rises after runs that pass and falls after others. An overload shows only when its
queue is as long as a request may wait, so the first seconds at a rate do not count. If these and the run together last
n times as long as a request may wait, a rate that passes may still be 1 / n too high.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from isobatch.cluster.load.generator import Floats, LoadGenerator, LoadRecord
from isobatch.profiles.errors import UserError

FIRST = 0.95  # the first guess, over the promise
AWAY = 0.2  # the standard deviation of the first belief, in logarithms of the rate over the first guess
MOST_AWAY = 0.7  # the same of the farthest candidates
CANDIDATES = 281  # rates at distances of half a percent
STEEPNESS = 25.0  # of all runs, half pass at the sustained rate, 88 % pass 8 % below it, and 12 % pass 8 % above it
BY_CHANCE = 0.05  # the share of runs that pass or fail at any rate
LEAD_S = 4.0  # before a run at its rate, so that queues build up; these requests do not count
LOOK_S = 0.5  # between checks of a run, which ends when too many requests are lost
console = Console(stderr=True, width=140)


class RateSearch:
    """Finds the rate at which half of the runs pass. The next run has the likeliest rate by all runs so far.

    A run may fail by chance far below that rate, if the machine is slow for some seconds, or pass far above it.

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
    """Run each system in each turn; every other turn has the opposite order.

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
    """Whether at most this share of the requests due after `lead_s` is refused or late.

    `lost` gets the record of sent requests and the time, and marks the lost requests.
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
