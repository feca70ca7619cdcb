"""Answers of a network to inputs of one's own, without any server."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.dispatch.route import stops
from deployments.models.seam import ServedModel
from profiles.errors import UserError
from profiles.model import Batch, Exits

AT_ONCE = 32


@dataclass(frozen=True)
class Predicted:
    """What is answered to one input, and the block after which it left, counted from 0."""

    label: int
    name: str
    score: float  # the probability of `label`, after calibration
    exit_block: int


def predict(model: ServedModel, inputs: Sequence[Any], exits: bool = True) -> list[Predicted]:
    """The answers in the order of the inputs, as they are served; without `exits` all run to the last block."""
    if isinstance(inputs, str):  # a sequence too, of which every letter would be answered
        raise UserError("predict takes a list of inputs, this is one text: predict([text])")
    ramps = model.ramp_blocks if exits else ()
    return [
        one
        for start in range(0, len(inputs), AT_ONCE)
        for one in _answered(model, model.encode(list(inputs[start : start + AT_ONCE])), ramps)
    ]


def _answered(model: ServedModel, batch: Batch, ramps: Collection[int]) -> list[Predicted]:
    found: dict[int, Predicted] = {}
    rows, here = np.arange(len(batch)), batch
    for stop in stops(0, model.num_blocks, ramps):
        launched = model.run(here, stop, ramps)
        found |= dict(_leaving(model.labels, rows, launched.exits))
        rows = np.delete(rows, launched.exits.rows)
        if launched.survivors is None:
            break
        here = launched.survivors
    return [found[row] for row in range(len(batch))]


def _leaving(names: Sequence[str], rows: NDArray[np.int64], exits: Exits) -> Iterator[tuple[int, Predicted]]:
    scores = exits.probabilities.max(axis=1).tolist()
    for row, label, score, block in zip(
        rows[exits.rows].tolist(), exits.labels.tolist(), scores, exits.blocks.tolist(), strict=True
    ):
        yield row, Predicted(label, names[label], score, block)
