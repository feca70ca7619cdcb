"""Counts broken promises: thresholds are chosen on some rows of a file, and tried on all other rows.

They are chosen as in `isobatch prepare`, and on one part of the rows without a test (before.py).
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from experiments.promise.before import searched
from experiments.promise.recordings import ROWS, Recorded, read
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import highest, ladder, outcome
from isobatch.profiles.losses import OF_ALL, Indices, Metric

MAX_LOSS, CONFIDENCE = 0.01, 0.95
TEST_SHARE = 0.35  # of the rows, as in `isobatch prepare`
BEFORE_SHARE = 0.2  # of the rows, for thresholds without a test
EXACT, BEFORE = "", "before_"  # the beginnings of the figures' names


def tried(name: str, recording: str, metric: Metric, start: int, stop: int) -> dict[str, list[tuple[float, float]]]:
    """The loss and depth of other rows, for each method and draw."""
    table, rows, seen = read(recording), ROWS[name], defaultdict[str, list[tuple[float, float]]](list)
    for seed in range(start, stop):
        order = np.random.default_rng(seed).permutation(table.known.num_inputs)
        others = table.known.of(order[rows:])
        for method, chosen in _chosen(table.of(order[:rows]), metric).items():
            result = outcome(others, chosen, metric)
            seen[method].append((float(result.lost.mean), float(result.cost)))
    return dict(seen)


def summed(parts: list[dict[str, list[tuple[float, float]]]]) -> Iterator[tuple[str, float]]:
    """For each method, the share of broken promises, and the mean depth and loss of other rows."""
    for method in parts[0]:
        lost, depths = np.array([each for part in parts for each in part[method]]).T
        yield f"{method}exceeded_share", float((lost > MAX_LOSS).mean())
        yield f"{method}depth", float(depths.mean())
        yield f"{method}lost", float(lost.mean())


def drawn(name: str, recording: str, metric: Metric, seed: int = 0) -> tuple[Evidence, Recorded]:
    """The evidence of `isobatch prepare` in one draw, and all other rows."""
    table, rows = read(recording), ROWS[name]
    order = np.random.default_rng(seed).permutation(table.known.num_inputs)
    some, (shape, test) = table.of(order[:rows]), _parts(rows)
    evidence = Evidence(some.believed.of(shape), some.known.of(test), metric, MAX_LOSS, CONFIDENCE)
    return evidence, table.of(order[rows:])


def _parts(rows: int) -> list[Indices]:
    """The rows that make a ladder, and those that test the promise."""
    return np.split(np.arange(rows), [rows - int(rows * TEST_SHARE)])


def _chosen(some: Recorded, metric: Metric) -> dict[str, Indices]:
    rows = np.arange(some.known.num_inputs)
    shape, test = _parts(len(rows))
    evidence = Evidence(some.believed.of(shape), some.known.of(test), metric, MAX_LOSS, CONFIDENCE)
    rungs, tested = ladder(evidence.shape, metric), evidence.test
    chosen = {EXACT: highest(rungs, tested, metric, evidence.shows)}
    if metric not in OF_ALL:
        return chosen
    before = some.known.of(rows[: int(len(rows) * BEFORE_SHARE)])
    return chosen | {BEFORE: searched(before, metric, MAX_LOSS)}
