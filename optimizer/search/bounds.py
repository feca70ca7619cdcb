"""Lower bounds by Lagrange multipliers on what is scarce, and multipliers that make them tight.

Let a second of kind c cost `mu[c]` and a second of latency cost `nu`. The cheapest way from block a to the end is then
a shortest path,

    togo(a, c') = min over options from a of  mu[kind] * load + nu * latency + togo(stop, kind),

and no plan that goes through a partial plan at a can be better than what it has spent already plus `togo`. A `Cut` is
one choice of multipliers: value >= mu . loads + nu * latency - offset for every plan that keeps the constraints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.effort import EFFORT, Effort
from optimizer.search.options import Options

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Multipliers, and the cost of the rest: `togo[a, c]` from block a when the batch comes from kind c."""

    mu: Floats
    nu: float
    offset: float
    togo: Floats
    at_s: float  # seconds per input sustained, which turn arrivals into seconds

    @property
    def bound(self) -> float:
        """A lower bound on the value of every plan."""
        return float(self.togo[0, -1]) - self.offset

    def spent(self, loads: Floats, work: Floats, arrivals: Floats) -> Floats:
        """The cost of each partial plan so far; `loads` has a column per kind."""
        paid: Floats = loads @ self.mu + self.nu * (work + arrivals * self.at_s)
        return paid

    def through(self, options: Options, row: int | slice = slice(None), late: Floats | None = None) -> Floats:
        """The cost of every option with the cheapest way behind it. `late`: their latencies, where they are known."""
        paid: Floats = self.mu[options.kind] * options.load_s[row]
        if self.nu:
            late = options.latency_s(self.at_s, row) if late is None else late
            paid += self.nu * late
        paid += self.togo[options.stop, options.kind]
        if options.some_barred:
            paid[options.barred[row]] = np.inf
        return paid


@dataclass(frozen=True)
class Path:
    """The cheapest plan at some multipliers: its loads by kind, and the parts of its latency."""

    loads: Floats
    work: float
    arrivals: float


def cut(
    options: Sequence[Options], mu: Floats, nu: float, offset: float, at_s: float, late: Sequence[Floats] = ()
) -> tuple[Cut, Path]:
    """Shortest paths from the end backwards, and the one from the start. `late`: latencies of the options, if known."""
    blocks, kinds = len(options), len(mu)
    togo = np.full((blocks + 1, kinds + 1), np.inf)
    togo[blocks] = 0.0
    result = Cut(mu, nu, offset, togo, at_s)
    choices = []
    for here in reversed(options):
        paid = result.through(here, late=late[here.start] if late else None)
        best = paid.argmin(axis=1) if len(here) else np.zeros(len(paid), np.int64)
        choices.append(best[here.class_of])
        if len(here):
            togo[here.start] = paid[np.arange(len(paid)), best][here.class_of]
    return result, _walk(options, choices[::-1], kinds)


def _walk(options: Sequence[Options], choices: list[NDArray[np.int64]], kinds: int) -> Path:
    block, came, loads, times = 0, kinds, np.zeros(kinds), np.zeros(2)
    while block < len(options) and len(options[block]):
        here, row, best = options[block], options[block].class_of[came], choices[block][came]
        came, block = int(here.kind[best]), int(here.stop[best])
        loads[came] += here.load_s[row, best]
        times += here.work_s[row, best], here.arrivals[best]
    return Path(loads, *times.tolist())


def ascend(
    start: Floats,
    project: Callable[[Floats], Floats],
    solve: Callable[[Floats], tuple[Cut, Floats]],
    steps: int,
    enough: float = np.inf,
    effort: Effort = EFFORT,
) -> list[Cut]:
    """Multipliers that raise the bound, by subgradients with Polyak's step; every cut holds, the last is the tightest.

    `solve(multipliers)` gives the cut and how much each constraint is overdrawn. Each step aims a little above the best
    bound so far, and lower after steps that did not help.
    """
    multipliers, cuts, best, hope = project(start), [], -np.inf, effort.first_hope
    for _ in range(steps):
        found, overdrawn = solve(multipliers)
        cuts.append(found)
        hope = hope if found.bound > best else hope * effort.hope_after_failure
        best = max(best, found.bound)
        steep = float(overdrawn @ overdrawn)
        arrived = not np.isfinite(best) or best >= enough or steep == 0 or hope < effort.last_hope
        if arrived or effort.out_of_time():
            break
        multipliers = project(multipliers + (best + hope * abs(best) - found.bound) / steep * overdrawn)
    return sorted(cuts, key=lambda each: each.bound)


def fixed(options: Sequence[Options], by: Cut, limit: float) -> list[Options]:
    """The options that some plan of a value up to `limit` may still use."""
    blocks, kinds = len(options), len(by.mu)
    spent = np.full((blocks + 1, kinds + 1), np.inf)
    spent[0, -1] = 0.0
    kept = []
    for here in options:
        arrive = np.full(len(here.load_s), np.inf)
        np.minimum.at(arrive, here.class_of, spent[here.start])
        through = (arrive[:, None] + by.through(here)).min(axis=0)
        keep = (through <= limit + by.offset) & np.isfinite(through)
        left = here.only(keep)
        np.minimum.at(spent, (left.stop, left.kind), through[keep] - by.togo[left.stop, left.kind])
        kept.append(left)
    return kept
