"""The interface of a network that can be cut into splits: the vocabulary of all other packages.

A `Batch` is a set of inputs on their way through a network. It carries its own cursor (the next block), so a replica
can run it without knowing the plan.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

# An array of any library (numpy, torch). Its first axis counts inputs, or the tokens of all texts.
Array = Any

# The answer to an input, and its probability; where each word of a text, or each label, is answered, one for each.
Label = int | tuple[int, ...]
Probability = float | tuple[float, ...]


@dataclass(frozen=True)
class Words:
    """The answered words of a text: their start and end positions, and their numbers among the given words."""

    text: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    numbers: tuple[int, ...]


class Sides(NamedTuple):
    """The sides of a picture in pixels."""

    height: int
    width: int


@dataclass(frozen=True)
class Batch:
    """Inputs before block `cursor`.

    `arrays` are the inputs of the next block: the encoded inputs at cursor 0, hidden states afterwards. Texts are
    packed one after another: the arrays have one row per token, and `lengths` are the tokens of each text. Otherwise
    they have one row per input.
    `memory` is the state of a policy for each input (patience counters, votes), which travels with the input.
    """

    cursor: int
    arrays: Mapping[str, Array]
    memory: Array
    # Tokens per text; None: the inputs are not texts. Always on the host.
    lengths: NDArray[np.int64] | None = None
    # Positions of texts that were cut, as they are longer than the network reads; only set by `encode`.
    truncated: frozenset[int] = frozenset()
    # The words of texts whose words are answered, or the sides of pictures whose points are; only set by `encode`.
    words: tuple[Words | Sides, ...] | None = None
    # Of a cascade: the same inputs in the form that the next level reads, before that level's first block.
    ahead: "Batch | None" = None

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def size_bytes(self) -> int:
        """
        >>> Batch(4, {"hidden": np.zeros((2, 8), np.float16)}, np.zeros((2, 1), np.float32)).size_bytes
        40
        """
        own = int(sum(array.nbytes for array in (*self.arrays.values(), self.memory)))
        return own + (self.ahead.size_bytes if self.ahead else 0)


@dataclass(frozen=True)
class Exits:
    """The inputs that left a batch, on the host: `rows` are their positions in the batch that was run.

    Where each word of a text is answered, `counts` are the words of each text, and `logits` has a row per word. Where
    each label is answered by itself, the same holds of labels in place of words, and a row is of no and yes. Of points,
    a row is a heat map, and the label of a point the cell with the largest number.
    """

    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    logits: NDArray[np.float32]
    counts: NDArray[np.int64] | None = None
    numbers: bool = False  # the network's outputs are scores themselves, not the logits of probabilities
    map_width: int = 0  # of heat maps

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: NDArray[np.int64]) -> "Self":
        logits, counts = self.logits, self.counts
        if counts is None:
            logits = logits[places]
        else:
            ends = np.cumsum(counts)
            logits = np.concatenate([logits[:0], *(logits[ends[each] - counts[each] : ends[each]] for each in places)])
            counts = counts[places]
        return replace(self, rows=self.rows[places], blocks=self.blocks[places], logits=logits, counts=counts)

    def answers(self) -> list[tuple[Label, Probability]]:
        """The answer to each input, and its probability."""
        labels, scores = self.labels.tolist(), self.scores.tolist()
        if self.counts is None:
            return list(zip(labels, scores, strict=True))
        return [(tuple(labels[part]), tuple(scores[part])) for part in _parts(self.counts)]

    @property
    def comparable(self) -> list[object]:
        """The values by which two answers to an input are compared: labels, scores where there are no labels, or for
        points the lines and columns of their cells."""
        if self.logits.shape[1] == 1 and self.counts is None:
            return [score for _, score in self.answers()]
        if self.map_width:
            lines, columns = np.divmod(self.labels, self.map_width)
            cells, counts = (lines + 1j * columns).tolist(), np.arange(0) if self.counts is None else self.counts
            return [tuple(cells[part]) for part in _parts(counts)]
        return [label for label, _ in self.answers()]

    @property
    def scores(self) -> NDArray[np.float32]:
        """The probability of each row's label, or the largest number of a row."""
        if not len(self.logits):
            return np.empty(0, np.float32)
        scores: NDArray[np.float32] = (self.logits if self.numbers else self.probabilities).max(axis=1)
        return scores

    @property
    def logits_by_input(self) -> Iterable[NDArray[np.float32]]:
        """The logits of each input: a row, or a row for each of its words or labels."""
        return self.logits if self.counts is None else [self.logits[part] for part in _parts(self.counts)]

    @property
    def labels(self) -> NDArray[np.int64]:
        labels: NDArray[np.int64] = self.logits.argmax(axis=1)
        return labels

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """The probability of every label, row by row."""
        return probabilities_in(self.logits)


def _parts(counts: NDArray[np.int64]) -> list[slice]:
    """The rows of each text, whose words are rows."""
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def probabilities_in(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The probabilities in each row of (already calibrated) logits: their softmax, or of a single one its sigmoid.

    >>> probabilities_in(np.zeros((1, 4), np.float32)), probabilities_in(np.zeros((1, 1), np.float32))
    (array([[0.25, 0.25, 0.25, 0.25]], dtype=float32), array([[0.5]], dtype=float32))
    """
    if logits.shape[1] == 1:
        return probabilities_in(np.concatenate([logits, np.zeros_like(logits)], axis=1))[:, :1]
    powers: NDArray[np.float32] = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


@dataclass(frozen=True)
class Launched:
    """The result of one launch: the inputs that left, and the survivors (None if no input is left)."""

    exits: Exits
    survivors: Batch | None


# The active ramps of a whole network, by the block before them; a mapping also gives thresholds (None: the network's).
OpenRamps = frozenset[int] | Mapping[int, float | None]
NOBODY: NDArray[np.int64] = np.empty(0, np.int64)


class SplitModel(Protocol):
    """A network that can be cut between any two blocks and left at any ramp."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_labels(self) -> int: ...

    @property
    def ramp_blocks(self) -> tuple[int, ...]:
        """The blocks after which an input may leave, ascending; never the last block, which has the head."""

    def encode(self, inputs: Sequence[Any]) -> Batch:
        """Tokenise or preprocess on the host. It makes numpy arrays only, so it can run far from any accelerator."""

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        """Run blocks `batch.cursor .. stop - 1`; `ramps` are the active ramps of the whole network.

        If `ramps` is a mapping, its thresholds replace the network's own; a threshold of None leaves the network's own.

        The batch keeps its size until `stop`: the host learns once per call which inputs leave. To shrink the batch on
        the way, stop at each ramp. At the last block, all inputs leave.

        Inputs at the positions `kept` survive ramps that let them go: their exit is reported, and they stay in the
        batch as well. Of several exits of one input in a call, the last one is reported.
        """

    def merge(self, batches: Sequence[Batch]) -> Batch:
        """One batch of all inputs, in order, on the network's device. All must have the same cursor."""

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        """The inputs at these positions."""


def edges_of(model: SplitModel) -> tuple[int, ...]:
    """The blocks at which the second and later levels of a cascade begin; empty for other networks."""
    edges: tuple[int, ...] = getattr(model, "edges", ())
    return edges


def label_names(model: SplitModel) -> tuple[str, ...]:
    """The names of a network's labels: their numbers if it has no names for them."""
    return tuple(getattr(model, "labels", ()) or map(str, range(model.num_labels)))


def reads_text(model: SplitModel) -> bool:
    """Whether a network reads texts; one that does not say so reads numbers."""
    return bool(getattr(model, "reads_text", False))
