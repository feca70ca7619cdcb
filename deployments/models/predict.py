"""Answers a list of inputs with a network, without any server."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.dispatch.route import stops
from deployments.models.served_model import ServedModel
from deployments.tasks import task_of
from profiles.errors import UserError
from profiles.model import Batch, Exits, Label, Probability, Words

BATCH = 32  # inputs per batch


@dataclass(frozen=True)
class PredictedAnswer:
    """The answer to one input, or to each of its words, and the block after which it left, counted from 0."""

    label: Label
    name: str | tuple[str, ...]
    score: Probability  # the probability of `label`, after calibration
    exit_block: int
    words: Words | None = None  # the words of a text whose words are answered


def predict(model: ServedModel, inputs: Sequence[Any], exits: bool = True) -> list[PredictedAnswer]:
    """Answers in the order of the inputs, as served; without `exits` all inputs run to the last block."""
    if isinstance(inputs, str):  # a string is a sequence too, but of letters
        raise UserError("predict takes a list of inputs, this is one text: predict([text])")
    ramps = model.ramp_blocks if exits else ()
    return [
        answer
        for start in range(0, len(inputs), BATCH)
        for answer in _answers(model, model.encode(list(inputs[start : start + BATCH])), ramps)
    ]


def _answers(model: ServedModel, batch: Batch, ramps: Collection[int]) -> list[PredictedAnswer]:
    answers: dict[int, PredictedAnswer] = {}
    rows, inside = np.arange(len(batch)), batch
    for stop in stops(0, model.num_blocks, ramps):
        launched = model.run(inside, stop, ramps)
        answers |= dict(_exit_answers(model, batch.words, rows, launched.exits))
        rows = np.delete(rows, launched.exits.rows)
        if launched.survivors is None:
            break
        inside = launched.survivors
    return [answers[row] for row in range(len(batch))]


def _exit_answers(
    model: ServedModel, words: Sequence[Words] | None, rows: NDArray[np.int64], exits: Exits
) -> Iterator[tuple[int, PredictedAnswer]]:
    task = task_of(model)
    for row, (label, score), block in zip(
        rows[exits.rows].tolist(), exits.answers(), exits.blocks.tolist(), strict=True
    ):
        yield row, PredictedAnswer(label, task.named(label, model.labels), score, block, words[row] if words else None)
