"""Systems take turns of seconds in one server, so that a machine whose speed changes is as slow for each of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from rich.console import Console

from experiments.real.served import PlannedSystem, RealCase, ServedNetwork
from experiments.shared.real_network import DTYPE, KIND, WIDTH

FIRST = 0.95  # of what a plan promises on a machine as fast as this one is now: the rate of its first run
STEP, FINE_STEP = 0.06, 0.03  # of the rate: until the outcome of runs changes first, and from then on
LEAD_S = 4.0  # at the same rate before a run, for queues to build up; its inputs do not count
CHAINS, LAYERS, TOKENS = 20, 144, 32 * 13  # of plain layers: as much arithmetic as BERT-base's; tokens of a batch
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


@dataclass(frozen=True)
class Sustained:
    """What a system sustained, and how many times as slow as at its profile the machine was beside its runs."""

    per_s: float
    slower: float


async def in_turns(
    served: ServedNetwork, planned: Sequence[PlannedSystem], slower: Callable[[], float], turns: int, seconds: float,
    seed: int,
) -> Mapping[str, Sustained]:  # fmt: skip
    """What each system sustains, by runs of so many seconds, in every other turn the other way round.

    `slower`: how many times as slow as at the profile the machine is now.
    """
    now = slower()
    stairs = {system.name: Staircase(FIRST * system.promised_per_s / now) for system in planned}
    speeds: dict[str, list[float]] = {name: [] for name in stairs}
    for turn in range(turns):
        for system in planned if turn % 2 == 0 else planned[::-1]:
            await served.follow(system)
            own = stairs[system.name]
            speeds[system.name].append(slower())
            own.add(await served.server.sustains(own.per_s, seconds, turns * seed + turn, LEAD_S))
        ran = ", ".join(f"{name} {own.runs[-1][0]:.0f}/s {'+-'[not own.runs[-1][1]]}" for name, own in stairs.items())
        console.print(f"turn {turn + 1} of {turns}: {ran}")
    return {name: Sustained(own.sustained_per_s, median(speeds[name])) for name, own in stairs.items()}


def chain_s(case: RealCase) -> float:
    """The time of a chain of plain layers on one thread: how fast this machine is now, beside its neighbours.

    Only of a CPU: a GPU has none. In int8 the chain computes as fast as this processor can.
    """
    if case.size.device != KIND:
        return 1.0
    torch.set_num_threads(1)
    dtype = getattr(torch, DTYPE if case.dtype == "int8" else case.dtype)
    layers = [torch.randn(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)]  # each has memory of its own
    hidden, times = torch.randn(TOKENS, WIDTH, dtype=dtype), list[float]()
    with torch.inference_mode():
        for _ in range(CHAINS):
            began_s, each = time.perf_counter(), hidden
            for layer in layers:
                each = torch.nn.functional.linear(each, layer)
            times.append(time.perf_counter() - began_s)
    return median(times)
