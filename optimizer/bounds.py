"""Lower bounds from prices on what is scarce (a Lagrangian relaxation), and prices that make them tight.

Put a price `mu[c]` on a second of kind c and a price `nu` on a second of latency. The cheapest way from block a to the
end is then a shortest path,

    togo(a, c') = min over options from a of  mu[kind] * load + nu * latency + togo(stop, kind),

and no plan that goes through a partial plan at a can be better than what it has spent already plus `togo`. A `Cut` is
one choice of prices: value >= mu . loads + nu * latency - offset for every plan that keeps the constraints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.options import Options

Floats = NDArray[np.float64]
ROUNDS = 40
FIRST_HOPE, LAST_HOPE = 0.1, 1e-4


@dataclass(frozen=True)
class Cut:
    """Prices, and what they leave to pay: `togo[a, c]` from block a when the batch comes from kind c."""

    mu: Floats
    nu: float
    offset: float
    togo: Floats
    at: "Rates"

    @property
    def bound(self) -> float:
        """No plan at all has a smaller value."""
        return float(self.togo[0, -1]) - self.offset

    def spent(self, loads: Floats, work: Floats, fill: Floats, wait: Floats) -> Floats:
        """By partial plan; `loads` has a column per kind."""
        paid: Floats = loads @ self.mu + self.nu * self.at.latency(work, fill, wait)
        return paid

    def price(self, options: Options, row: int | slice = slice(None), late: Floats | None = None) -> Floats:
        """Of every option, with all that follows it at best. `late`: their latencies, where somebody has them."""
        paid: Floats = self.mu[options.kind] * options.load_s[row]
        if self.nu:
            late = self.at.latency(options.work_s[row], options.fill, options.wait) if late is None else late
            paid += self.nu * late
        paid += self.togo[options.stop, options.kind]
        if options.some_barred:
            paid[options.barred[row]] = np.inf
        return paid


@dataclass(frozen=True)
class Rates:
    """Seconds per arrival and per input sustained: what turns arrivals into seconds."""

    arrival_s: float
    pace_s: float

    def latency(self, work: Floats, fill: Floats, wait: Floats) -> Floats:
        return work + fill * self.arrival_s + wait * self.pace_s

    def of(self, path: "Path") -> float:
        return path.work + path.fill * self.arrival_s + path.wait * self.pace_s


@dataclass(frozen=True)
class Path:
    """The cheapest plan at some prices: its loads by kind, and what its latency is made of."""

    loads: Floats
    work: float
    fill: float
    wait: float


def cut(
    options: Sequence[Options], mu: Floats, nu: float, offset: float, at: Rates, late: Sequence[Floats] = ()
) -> tuple[Cut, Path]:
    """Shortest paths backwards, and the one from the start. `late`: what `at` says of the options, if known."""
    blocks, kinds = len(options), len(mu)
    togo = np.full((blocks + 1, kinds + 1), np.inf)
    togo[blocks] = 0.0
    result = Cut(mu, nu, offset, togo, at)
    choices = []
    for here in reversed(options):
        paid = result.price(here, late=late[here.start] if late else None)
        best = paid.argmin(axis=1) if len(here) else np.zeros(len(paid), np.int64)
        choices.append(best[here.class_of])
        if len(here):
            togo[here.start] = paid[np.arange(len(paid)), best][here.class_of]
    return result, _walk(options, choices[::-1], kinds)


def _walk(options: Sequence[Options], choices: list[NDArray[np.int64]], kinds: int) -> Path:
    block, came, loads, times = 0, kinds, np.zeros(kinds), np.zeros(3)
    while block < len(options) and len(options[block]):
        here, row, best = options[block], options[block].class_of[came], choices[block][came]
        came, block = int(here.kind[best]), int(here.stop[best])
        loads[came] += here.load_s[row, best]
        times += here.work_s[row, best], here.fill[best], here.wait[best]
    return Path(loads, *times.tolist())


def ascend(
    start: Floats,
    project: Callable[[Floats], Floats],
    solve: Callable[[Floats], tuple[Cut, Floats]],
    rounds: int = ROUNDS,
    enough: float = np.inf,
) -> list[Cut]:
    """Prices that raise the bound, by subgradients with Polyak's step; every cut holds, the last is the tightest.

    `solve(prices)` gives the cut and how much each constraint is overdrawn. Each step aims a little above the best
    bound so far, and lower after steps that did not help.
    """
    prices, cuts, best, hope = project(start), [], -np.inf, FIRST_HOPE
    for _ in range(rounds):
        found, overdrawn = solve(prices)
        cuts.append(found)
        hope = hope if found.bound > best else hope * 0.7
        best = max(best, found.bound)
        steep = float(overdrawn @ overdrawn)
        if not np.isfinite(best) or best >= enough or steep == 0 or hope < LAST_HOPE:
            break
        prices = project(prices + (best + hope * abs(best) - found.bound) / steep * overdrawn)
    return sorted(cuts, key=lambda each: each.bound)


def onto_simplex(point: Floats) -> Floats:
    """The nearest point whose parts are at least 0 and sum to 1.

    >>> [round(float(part), 2) for part in onto_simplex(np.array([0.9, 0.5, -0.3]))]
    [0.7, 0.3, 0.0]
    """
    descending = np.sort(point)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(point) + 1)
    last = np.nonzero(descending > excess)[0][-1]
    projected: Floats = np.maximum(point - excess[last], 0.0)
    return projected


def fixed(options: Sequence[Options], by: Cut, limit: float) -> list[Options]:
    """The options that some plan of a value up to `limit` may still use."""
    blocks, kinds = len(options), len(by.mu)
    spent = np.full((blocks + 1, kinds + 1), np.inf)
    spent[0, -1] = 0.0
    kept = []
    for here in options:
        arrive = np.full(len(here.load_s), np.inf)
        np.minimum.at(arrive, here.class_of, spent[here.start])
        through = (arrive[:, None] + by.price(here)).min(axis=0)
        keep = (through <= limit + by.offset) & np.isfinite(through)
        left = here.only(keep)
        np.minimum.at(spent, (left.stop, left.kind), through[keep] - by.togo[left.stop, left.kind])
        kept.append(left)
    return kept
