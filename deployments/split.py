"""Run a batch, and let go of whoever is sure on the way."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from profiles.model import Batch, Exits, SplitModel


def run_through(model: SplitModel, batch: Batch, ramps: Collection[int]) -> Iterator[Exits]:
    """Yield who left at each active ramp as soon as it is known, then the rest; rows count in the batch given.

    The batch shrinks at every stop: nobody is computed who has left, and nobody waits for who has not.
    """
    rows = np.arange(len(batch))
    ahead: Batch | None = batch
    for stop in _stops(model, ramps):
        if ahead is None:
            return
        if stop <= ahead.cursor:
            continue
        launched = model.run(ahead, stop, ramps)
        if len(launched.exits):
            yield replace(launched.exits, rows=rows[launched.exits.rows])
        rows = np.delete(rows, launched.exits.rows)
        ahead = launched.survivors


def _stops(model: SplitModel, ramps: Collection[int]) -> list[int]:
    return [*(block + 1 for block in sorted(ramps)), model.num_blocks]
