"""Lower bounds by Lagrange multipliers on what is scarce, found by shortest paths.

Let a second of kind c cost `mu[c]` and a second of latency cost `nu`. The cheapest way from block a to the end is then
a shortest path,

    togo(a, c') = min over options from a of  mu[kind] * load + nu * latency + togo(stop, kind),

and no plan that completes a partial plan at a can cost less than the partial plan has spent plus `togo`. A `Cut`
(goals/relaxation.py) is one choice of multipliers.
"""

from collections.abc import Sequence

import numpy as np

from isobatch.optimizer.effort import Floats, Ints
from isobatch.optimizer.goals.relaxation import Cut, Path
from isobatch.optimizer.search.options import Options


def through(by: Cut, options: Options, row: int | slice = slice(None), late: Floats | None = None) -> Floats:
    """The cost of every option with the cheapest way after it. `late`: the latencies of the options, if known."""
    paid: Floats = by.mu[options.kind] * options.load_s[row]
    if by.nu:
        late = options.latency_s(by.at_s, row) if late is None else late
        paid += by.nu * late
    paid += by.togo[options.stop, options.kind]
    if options.some_barred:
        paid[options.barred[row]] = np.inf
    return paid


def cut(
    options: Sequence[Options], mu: Floats, nu: float, offset: float, at_s: float, late: Sequence[Floats] = ()
) -> tuple[Cut, Path]:
    """The cut at these multipliers, by shortest paths from the end backwards, and the cheapest plan.

    `late`: the latencies of the options by their start, if known.
    """
    blocks, kinds = len(options), len(mu)
    togo = np.full((blocks + 1, kinds + 1), np.inf)
    togo[blocks] = 0.0
    result = Cut(mu, nu, offset, togo, at_s)
    choices = []
    for starting in reversed(options):
        paid = through(result, starting, late=late[starting.start] if late else None)
        best = paid.argmin(axis=1) if len(starting) else np.zeros(len(paid), np.int64)
        choices.append(best[starting.class_of])
        if len(starting):
            togo[starting.start] = paid[np.arange(len(paid)), best][starting.class_of]
    return result, _walk(options, choices[::-1], kinds)


def _walk(options: Sequence[Options], choices: list[Ints], kinds: int) -> Path:
    block, came, loads, times = 0, kinds, np.zeros(kinds), np.zeros(2)
    while block < len(options) and len(options[block]):
        starting, row, best = options[block], options[block].class_of[came], choices[block][came]
        came, block = int(starting.kind[best]), int(starting.stop[best])
        loads[came] += starting.load_s[row, best]
        times += starting.work_s[row, best], starting.arrivals[best]
    return Path(loads, *times.tolist())


def fixed(options: Sequence[Options], by: Cut, limit: float) -> list[Options]:
    """The options that a plan of a value up to `limit` may still use."""
    blocks, kinds = len(options), len(by.mu)
    spent = np.full((blocks + 1, kinds + 1), np.inf)
    spent[0, -1] = 0.0
    usable = []
    for starting in options:
        arrive = np.full(len(starting.load_s), np.inf)
        np.minimum.at(arrive, starting.class_of, spent[starting.start])
        costs = (arrive[:, None] + through(by, starting)).min(axis=0)
        keep = (costs <= limit + by.offset) & np.isfinite(costs)
        left = starting.only(keep)
        np.minimum.at(spent, (left.stop, left.kind), costs[keep] - by.togo[left.stop, left.kind])
        usable.append(left)
    return usable
