"""Chooses thresholds on the inputs by which they are judged, with a fixed margin: the baseline of tested promises.

It tries the best single threshold for all ramps, then prices of accuracy from low to high; then it spends the rest of
the allowance, one ramp at a time.
"""

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.exit_table import ExitTable, improved, outcome
from isobatch.profiles.losses import ROUNDING, Indices, Loss, Metric

MULTIPLIERS = np.geomspace(0.5, 5000.0, 41)
MARGIN = 2.0


def searched(table: ExitTable, metric: Metric, max_loss: float) -> Indices:
    """The candidate of each ramp."""

    def judge(chosen: Indices) -> tuple[bool, float]:
        """Orders allowed choices before others, then by cost."""
        result = outcome(table, chosen, metric)
        allowed = bool(result.lost.within(max_loss, MARGIN))
        return not allowed, result.cost if allowed else result.lost.mean

    shared = [np.full(table.num_ramps, candidate) for candidate in range(len(table.candidates))]
    tries = [table.strictest, min(shared, key=judge)]
    for multiplier in MULTIPLIERS:
        tries.append(improved(table, tries[-1], table.costs[:, None] + multiplier * table.losses(metric)))
    return _spent(table, min(tries, key=judge), metric, max_loss)


def _spent(table: ExitTable, chosen: Indices, metric: Metric, max_loss: float) -> Indices:
    """Make the one change that saves most, until no change is allowed."""
    loss = table.losses(metric)
    costs, least = np.broadcast_to(table.costs[:, None], loss.shape), outcome(table, chosen, metric).cost
    while True:
        moves = []
        for ramp in range(table.num_ramps):
            mean, square = _means(table, chosen, ramp, loss), _means(table, chosen, ramp, loss**2)
            allowed = Loss(mean, square, table.num_inputs).within(max_loss, MARGIN)
            saved = np.where(allowed, _means(table, chosen, ramp, costs), np.inf)
            moves.append((float(saved.min()), ramp, int(saved.argmin())))
        cost, ramp, candidate = min(moves)
        if cost >= least - ROUNDING:
            return chosen
        least, chosen = cost, np.where(np.arange(table.num_ramps) == ramp, candidate, chosen)


def _means(table: ExitTable, chosen: Indices, ramp: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of a value for each candidate at this ramp; an input has the value of its exit."""
    leaving = table.first <= chosen[:, None]
    leaving[ramp] = False
    reaches = ~leaving[:ramp].any(axis=0)
    places = np.where(leaving.any(axis=0), leaving.argmax(axis=0), table.num_ramps)
    without = values[places, np.arange(table.num_inputs)]
    gain = np.where(reaches, values[ramp] - without, 0.0)
    sums = np.bincount(table.first[ramp], gain, len(table.candidates) + 1).cumsum()[:-1]
    means: NDArray[np.float64] = (without.sum() + sums) / table.num_inputs
    return means
