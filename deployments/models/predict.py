"""Answers of a network to inputs of one's own, without any server."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.dispatch.route import stops
from deployments.models.interface import ServedModel
from deployments.tasks import task_of
from profiles.errors import UserError
from profiles.model import Batch, Exits, Label, Probability, Words

AT_ONCE = 32


@dataclass(frozen=True)
class Predicted:
    """What is answered to one input, or to each of its words, and the block after which it left, counted from 0."""

    label: Label
    name: str | tuple[str, ...]
    score: Probability  # the probability of `label`, after calibration
    exit_block: int
    words: Words | None = None  # of a text whose words are answered


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
        found |= dict(_leaving(model, batch.words, rows, launched.exits))
        rows = np.delete(rows, launched.exits.rows)
        if launched.survivors is None:
            break
        here = launched.survivors
    return [found[row] for row in range(len(batch))]


def _leaving(
    model: ServedModel, words: Sequence[Words] | None, rows: NDArray[np.int64], exits: Exits
) -> Iterator[tuple[int, Predicted]]:
    task = task_of(model)
    for row, (label, score), block in zip(rows[exits.rows].tolist(), exits.said(), exits.blocks.tolist(), strict=True):
        yield row, Predicted(label, task.named(label, model.labels), score, block, words[row] if words else None)
