"""Random exit tables: ramps that are surer of easy inputs, and err on hard ones less the deeper they are."""

from collections.abc import Callable

import numpy as np

from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable, outcome
from isobatch.profiles.losses import Indices, Metric

CANDIDATES = 30


def exit_table(seed: int, ramps: int = 3, count: int = 400, classes: int = 2, rare: float = 0.5) -> ExitTable:
    """A ramp after every block but the last; `rare` is the share of all inputs that are not of class 0."""
    random = np.random.default_rng(seed)
    hardness = random.uniform(size=count)
    sure = 1 - hardness + random.normal(scale=0.15, size=(ramps, count))
    first = np.clip(((1 - sure) * CANDIDATES).astype(int) + 1, 1, CANDIDATES).astype(np.uint8)
    knows = np.linspace(0.5, 1.0, ramps + 1)[:, None]
    wrong = random.uniform(size=(ramps + 1, count)) < hardness * (1.1 - knows)
    truth = np.where(random.uniform(size=count) < rare, random.integers(1, classes, count), 0)
    other = np.where(truth == 0, random.integers(1, classes, (ramps + 1, count)), 0)
    return ExitTable(
        np.arange(CANDIDATES, dtype=float),
        first,
        (~wrong).astype(np.float32),
        np.where(wrong, other, truth),
        truth,
        np.arange(1, ramps + 2) / (ramps + 1),
    )


def check_promises(
    everything: ExitTable, drawn: Callable[[], tuple[Indices, Indices]], metric: Metric, max_loss: float
) -> None:
    """The whole procedure, 60 times: of 5 % that may fail, more than 8 of 60 would be three standard errors off.

    `drawn`: inputs to choose thresholds by, and others to test them on.
    """
    broken = early = 0
    for _ in range(60):
        shape, test = drawn()
        evidence = Evidence(everything.of(shape), everything.of(test), metric, max_loss, 0.95)
        exits = outcome(everything, evidence.prepared, metric)
        broken += exits.lost.mean > max_loss
        early += exits.cost < 1.0
    assert broken <= 8
    assert early > 54
