"""Apparate's tuner by its paper: every answer is audited, and the latest 16 answers decide when to tune.

At first no input leaves. Each round loosens the ramp that saves most per lost answer. The ramp's step doubles, or
halves if it would break the bound. Candidates are judged on the answers of the window. (Deb et al., SOSP '24, section
3.2; the code of its artifact is not used.)
"""

from typing import TYPE_CHECKING

import numpy as np

from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import Floats, Indices

WINDOW = 16  # answers that decide whether to tune, and by which thresholds are tuned
BOUND = 0.01
FIRST, LEAST = 0.1, 0.01  # steps, as shares of the range of thresholds
LOOKED_AT = 200  # inputs of a window of the day; each 16 may change thresholds


if TYPE_CHECKING:
    from experiments.promise.audited import Fit


def tuned(table: ExitTable) -> Indices:
    """The candidate of every ramp, by these answers alone."""
    top = len(table.candidates) - 1
    chosen, steps = table.strictest, np.full(table.num_ramps, FIRST)
    lost, cost = _judged(table, chosen)
    while (steps >= LEAST).any():
        moves = []
        for ramp in np.flatnonzero(steps >= LEAST):
            step = max(1, round(steps[ramp] * top))
            tried = np.where(np.arange(len(chosen)) == ramp, np.minimum(chosen + step, top), chosen)
            off, after = _judged(table, tried)
            if off > BOUND or (tried == chosen).all():
                steps[ramp] /= 2
            else:
                moves.append(((cost - after) / (off - lost + 1e-9), ramp, tried))
        if moves:
            _, ramp, chosen = max(moves, key=lambda move: move[0])
            steps[ramp] *= 2
            lost, cost = _judged(table, chosen)
    return chosen


def _judged(table: ExitTable, chosen: Indices) -> tuple[float, float]:
    places = table.places(chosen)
    return float((table.answers(places) != table.labels[-1]).mean()), float(table.costs[places].mean())


def greedy(fit: "Fit", shares: Floats) -> tuple[list[float], float]:
    """The mean disagreement in each window of a day, and the mean depth of inputs."""
    random, chosen, windows, depths = np.random.default_rng(0), fit.table.strictest, list[float](), list[float]()
    for share in shares:
        rows, seen = fit.drawn(np.full(LOOKED_AT, share), random), list[float]()
        for start in range(0, LOOKED_AT - WINDOW, WINDOW):
            latest = fit.table.of(rows[start : start + WINDOW])
            lost, depth = _judged(latest, chosen)
            seen.append(fit.disagreement(chosen, float(share)))
            depths.append(depth)
            if lost > BOUND or not windows:
                chosen = tuned(latest)
        windows.append(float(np.mean(seen)))
    return windows, float(np.mean(depths))
