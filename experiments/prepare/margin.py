"""Measures how far a measured loss must keep from the allowed one: `python -m experiments.prepare.margin MODEL DATA`.

Ramps are trained once. Then, again and again, thresholds are chosen on a few inputs and tried on all others, with 0, 1
and 2 standard errors of margin: the least of many noisy losses is too good to be true, and this says by how much.
"""

import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from deployments.exits import entropy
from deployments.folders import cache_directory
from deployments.models import checkpoint, load
from deployments.prepare.data import rows
from deployments.prepare.features import features
from deployments.prepare.measuring import look, targets_of
from deployments.prepare.sample import Indices, LabelNames, draw
from deployments.prepare.thresholds import Replay, replay, search, tradeoff
from deployments.prepare.training import train

MAX_LOSS = 0.01
MARGINS = (0.0, 1.0, 2.0)
COUNTS = (500, 1000, 2000, 4000)
TRIALS = 50


def recorded(source: Path, data: Path, most: int = 20_000) -> Replay:
    """What the policy would do at calibrated ramps, for every input that these were not trained on."""
    sample = draw(rows(data), data, LabelNames(checkpoint.label_names(source)), most)
    model = load(source)
    found = features(model, checkpoint.fingerprint(source), sample.values, cache_directory() / "features")
    wanted, truth = targets_of(found, sample)
    heads = train(found.pooled, wanted, sample.parts.train, "light")
    seen = look(heads, found, truth, np.concatenate((sample.parts.calibrate, sample.parts.report)))
    seen = seen.calibrated(seen.temperatures())
    depths = [(block + 1) / model.num_blocks for block in range(len(heads))]
    return replay(entropy, seen.ramps, seen.head, seen.truth, depths)


def only(table: Replay, chosen: Indices) -> Replay:
    return Replay(table.candidates, table.leaves[:, :, chosen], table.right[:, chosen], table.depths)


def tried(table: Replay, count: int, margin: float) -> tuple[list[float], list[float]]:
    """Loss and depth on the inputs that thresholds were not chosen on, for each trial."""
    random = np.random.default_rng(0)
    losses, depths = [], []
    for _ in range(TRIALS):
        order = random.permutation(table.right.shape[1])
        result = tradeoff(only(table, order[count:]), search(only(table, order[:count]), MAX_LOSS, margin))
        losses.append(result.lost)
        depths.append(result.depth)
    return losses, depths


def main(source: str, data: str) -> None:
    everything = recorded(Path(source), Path(data))
    result = Table(
        "chosen on", "margin", "lost on average", "lost too much in", "mean depth", title=f"allowed: {MAX_LOSS:.0%}"
    )
    for count in COUNTS:
        for margin in MARGINS:
            losses, depths = tried(everything, count, margin)
            exceeded = np.mean([loss > MAX_LOSS for loss in losses])
            cells = (f"{np.mean(losses):.2%}", f"{exceeded:.0%}", f"{np.mean(depths):.1%}")
            result.add_row(str(count), f"{margin:g}", *cells)
    Console().print(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
