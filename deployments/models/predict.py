"""Answers a list of inputs with a network, without any server."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.tasks import task_of
from isobatch.profiles.errors import UserError, WrongInputError
from isobatch.profiles.model import Batch, Exits, Label, Probability, Sides, Words, probabilities_in

BATCH = 32  # inputs per batch
AT_ONCE = 8 * BATCH  # inputs under way together: survivors of their batches become full batches again


@dataclass(frozen=True)
class PredictedAnswer:
    """The answer to one input, or to each of its words, and the block after which it left, counted from 0."""

    label: Label  # of several labels, 1 or 0 for each of the network's
    name: str | tuple[str, ...]
    score: Probability  # the probability of `label`, after calibration
    exit_block: int
    words: Words | Sides | None = None  # of a text whose words are answered, or of a picture whose points are
    # The calibrated logits of all labels; a row for each word, or of no and yes for each label, that is answered.
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    truncated: bool = False  # the text was longer than the network reads, so its end was cut off
    by_label: bool = False  # each of the network's labels is answered by itself

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Of all labels, in their order; a row for each word where words are answered."""
        assert self.logits is not None, "This is a bug: this answer came from a server."
        probabilities = probabilities_in(np.atleast_2d(self.logits)).reshape(self.logits.shape)
        return probabilities[:, 1] if self.by_label else probabilities


@dataclass(frozen=True)
class _Part:
    """A batch on its way, and the places of its inputs in the list."""

    batch: Batch
    places: NDArray[np.int64]


def predict(model: ServedModel, inputs: Iterable[Any], exits: bool = True) -> list[PredictedAnswer]:
    """Answers in the order of the inputs, as served; without `exits` all inputs run to the last block."""
    if isinstance(inputs, str):  # a string is a sequence too, but of letters
        raise UserError("predict takes a list of inputs, this is one text: predict([text])")
    if not isinstance(inputs, Iterable) or isinstance(inputs, bytes | Mapping):
        raise UserError(f"predict takes a list of inputs, got {type(inputs).__name__}")
    inputs = list(inputs)
    ramps = model.ramp_blocks if exits else ()
    answers = list[PredictedAnswer]()
    for start in range(0, len(inputs), AT_ONCE):
        some = inputs[start : start + AT_ONCE]
        try:
            answers += _answers(model, some, ramps)
        except WrongInputError as error:  # which names the place in a batch
            place = next((start + index for index, each in enumerate(some) if each is error.value), None)
            if place is None:  # the network has read a copy
                raise
            kind = "text" if model.reads_text else "image"
            raise WrongInputError(f"{kind} {place} {error.problem}", error.value, error.problem) from error
    return answers


def _answers(model: ServedModel, inputs: list[Any], ramps: Collection[int]) -> list[PredictedAnswer]:
    """Run all inputs to a ramp before any runs on, so that the survivors of several batches become full ones."""
    starts = range(0, len(inputs), BATCH)
    encoded = [model.encode(inputs[start : start + BATCH]) for start in starts]
    parts = [_Part(batch, np.arange(start, start + len(batch))) for batch, start in zip(encoded, starts, strict=True)]
    answers: dict[int, PredictedAnswer] = {}
    for stop in stops(0, model.num_blocks, ramps):
        survivors = []
        for part in _full(model, parts):
            launched = model.run(part.batch, stop, ramps)
            answers |= _exit_answers(model, encoded, part.places, launched.exits)
            if launched.survivors is not None:
                survivors.append(_Part(launched.survivors, np.delete(part.places, launched.exits.rows)))
        parts = survivors
    return [answers[place] for place in range(len(inputs))]


def _full(model: ServedModel, parts: Sequence[_Part]) -> Iterator[_Part]:
    """The same inputs in batches that are full, except for the last one."""
    yield from (part for part in parts if len(part.batch) == BATCH)
    rest = [part for part in parts if len(part.batch) < BATCH]
    if len(rest) < 2:
        yield from rest
        return
    batch, places = model.merge([part.batch for part in rest]), np.concatenate([part.places for part in rest])
    for start in range(0, len(places), BATCH):
        rows = np.arange(start, min(start + BATCH, len(places)))
        yield _Part(batch if len(rows) == len(places) else model.select(batch, rows), places[rows])


def _exit_answers(
    model: ServedModel, encoded: Sequence[Batch], places: NDArray[np.int64], exits: Exits
) -> Iterable[tuple[int, PredictedAnswer]]:
    task = task_of(model)
    for place, (label, score), block, logits in zip(
        places[exits.rows].tolist(), exits.answers(), exits.blocks.tolist(), exits.logits_by_input, strict=True
    ):
        batch, row = encoded[place // BATCH], place % BATCH
        words = batch.words[row] if batch.words else None
        name, truncated = task.named(label, model.labels), row in batch.truncated
        yield place, PredictedAnswer(label, name, score, block, words, logits, truncated, task.by_label)
