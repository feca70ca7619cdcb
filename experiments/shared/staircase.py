"""What systems sustain that take turns of seconds, so that a machine whose speed changes is as slow for each of them.

Each has a rate of its own, which rises after a run that passes and falls after one that fails. An overload shows only
once its queue is as long as a request may wait. So the first seconds at a rate do not count, and yet a run that lasts n
times as long, with these, passes a rate that is up to 1 / n too high.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from numpy.typing import NDArray
from rich.console import Console

from isobatch.cluster.load.generator import Floats, LoadGenerator, LoadRecord

FIRST = 0.95  # of what a plan promises: the rate of its first run
STEP, FINE_STEP = 0.06, 0.03  # of the rate: until the outcome of runs changes first, and from then on
LEAD_S = 4.0  # at the same rate before a run, for queues to build up; its requests do not count
LOOK_S = 0.5  # how often a run is looked at, which ends as soon as too many requests are lost
console = Console(stderr=True, width=140)


@dataclass
class Staircase:
    """A rate that rises after each run that passes and falls after each that fails, so that about half of them pass.

    >>> stairs = Staircase(100.0)
    >>> for _ in range(9):
    ...     stairs.add(passed=stairs.per_s < 120)
    >>> 117 < stairs.sustained_per_s < 123
    True
    """

    per_s: float  # of the next run
    runs: list[tuple[float, bool]] = field(default_factory=list)

    def add(self, passed: bool) -> None:
        self.runs.append((self.per_s, passed))
        step = FINE_STEP if self._recent else STEP
        self.per_s *= 1 + step if passed else 1 / (1 + step)

    @property
    def _recent(self) -> list[float]:
        """The rates since a run first had another outcome than the first one."""
        outcomes = [passed for _, passed in self.runs]
        changed = next((at for at, passed in enumerate(outcomes) if passed != outcomes[0]), len(outcomes))
        return [rate for rate, _ in self.runs[changed:]]

    @property
    def sustained_per_s(self) -> float:
        return fmean([*self._recent, self.per_s])


async def in_turns(
    stairs: Mapping[str, Staircase], turns: int, passes: Callable[[str, float, int], Awaitable[bool]]
) -> None:
    """A run of each system in each turn, in every other turn the other way round.

    `passes` gets the name of a system, its rate, and the number of the turn.
    """
    for turn in range(turns):
        for name in list(stairs)[:: 1 if turn % 2 == 0 else -1]:
            stairs[name].add(await passes(name, stairs[name].per_s, turn))
        ran = ", ".join(f"{name} {own.runs[-1][0]:.4g}/s {'+-'[not own.runs[-1][1]]}" for name, own in stairs.items())
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

    running = asyncio.ensure_future(load.at(due_s, patience_s))
    while not running.done():
        await asyncio.wait({running}, timeout=LOOK_S)
        if too_many():
            load.stop()
    record = await running
    return len(record.status) == len(due_s) and not too_many()
