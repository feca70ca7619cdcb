"""What a network must offer to be cut: the vocabulary that every other package speaks.

A `Batch` is a set of inputs on their way through a network. It carries its own cursor (the next block), so a replica
can run it from wherever it stands and never has to know the plan that sent it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

# An array of any library (numpy, torch) whose first axis counts the inputs, or the tokens of all texts.
Array = Any

# What an input is answered, and how probable that is; where each word of a text is answered, one for each.
Label = int | tuple[int, ...]
Probability = float | tuple[float, ...]


@dataclass(frozen=True)
class Words:
    """The words of a text that are answered: where each begins and ends, and its number among those that were given."""

    text: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Inputs that stand before block `cursor`.

    `arrays` holds what the next block reads: the encoded inputs at cursor 0, the hidden states afterwards.
    Texts lie one after another: the arrays have one row per token, and `lengths` tells how many are whose. All others
    have one row per input.
    `memory` is what a policy remembers of each input (patience counters, votes) and travels with it.
    """

    cursor: int
    arrays: Mapping[str, Array]
    memory: Array
    # Tokens per text; None: the inputs are no texts. Always on the host.
    lengths: NDArray[np.int64] | None = None
    # Positions of texts that are longer than the network reads, and were cut; known where they are encoded only.
    truncated: frozenset[int] = frozenset()
    # Of texts whose words are answered; known where they are encoded only.
    words: tuple[Words, ...] | None = None
    # Of a cascade: the same inputs as the next level reads them. It stands before that level's first block.
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
    """What left a batch, on the host: `rows` are positions in the batch that was run.

    Where each word of a text is answered, `counts` says how many words each has, and `logits` has a row for each.
    """

    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    logits: NDArray[np.float32]
    counts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: NDArray[np.int64]) -> "Self":
        """Some of them."""
        logits, counts = self.logits, self.counts
        if counts is None:
            logits = logits[places]
        else:
            ends = np.cumsum(counts)
            logits = np.concatenate([logits[:0], *(logits[ends[each] - counts[each] : ends[each]] for each in places)])
            counts = counts[places]
        return replace(self, rows=self.rows[places], blocks=self.blocks[places], logits=logits, counts=counts)

    def answers(self) -> list[tuple[Label, Probability]]:
        """What each is answered, and the probability of that."""
        labels, scores = self.labels.tolist(), self.probabilities.max(axis=1, initial=0.0).tolist()
        if self.counts is None:
            return list(zip(labels, scores, strict=True))
        ends = np.cumsum(self.counts).tolist()
        parts = [slice(end - count, end) for end, count in zip(ends, self.counts.tolist(), strict=True)]
        return [(tuple(labels[part]), tuple(scores[part])) for part in parts]

    @property
    def labels(self) -> NDArray[np.int64]:
        labels: NDArray[np.int64] = self.logits.argmax(axis=1)
        return labels

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Softmax of the (already calibrated) logits.

        >>> Exits(np.array([0]), np.array([3]), np.zeros((1, 4), np.float32)).probabilities
        array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
        """
        powers: NDArray[np.float32] = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers


@dataclass(frozen=True)
class Launched:
    """One launch: who left, and who goes on (None when nobody is inside any more).

    `meanwhile` is what the levels so far would answer to those who have just come to the edge of a cascade.
    """

    exits: Exits
    survivors: Batch | None
    meanwhile: Exits | None = None


# The active ramps of a whole network, by the block they follow; a mapping gives thresholds, too (None: its own).
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
        """The blocks after which an input may leave, ascending; never the last block, which holds the head."""
        ...

    def encode(self, inputs: Sequence[Any]) -> Batch:
        """Tokenise or preprocess, on the host: numpy arrays only, so that it can run far from any accelerator."""
        ...

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        """Run blocks `batch.cursor .. stop - 1`; `ramps` are the active ramps of the whole network.

        If they are a mapping, its thresholds hold in place of the network's own (None: its own all the same).

        The batch keeps its size until `stop`: who leaves is known to the host once per call. To shrink it on the way,
        stop at each ramp. Reaching the last block, everybody leaves.

        Inputs at the positions `kept` stay inside at ramps that let them go: the exit is told, and they survive as
        well. Of several exits of one input in a call the last is told.
        """
        ...

    def merge(self, batches: Sequence[Batch]) -> Batch:
        """One batch of all inputs, in order, where the network runs. All stand before the same block."""
        ...

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        """The inputs at these positions."""
        ...


@runtime_checkable
class NamesLabels(Protocol):
    """A network that knows what its labels are called. Those of others are called by their numbers."""

    @property
    def labels(self) -> tuple[str, ...]: ...


@runtime_checkable
class KnowsItsInputs(Protocol):
    """A network that says whether it reads texts. Others are taken to read numbers."""

    @property
    def reads_text(self) -> bool: ...


@runtime_checkable
class HasLevels(Protocol):
    """A cascade: several networks as one."""

    @property
    def edges(self) -> tuple[int, ...]:
        """The blocks at which a level begins behind another."""
        ...


def edges_of(model: SplitModel) -> tuple[int, ...]:
    return model.edges if isinstance(model, HasLevels) else ()


def label_names(model: SplitModel) -> tuple[str, ...]:
    named = model.labels if isinstance(model, NamesLabels) else ()
    return tuple(named or map(str, range(model.num_labels)))


def reads_text(model: SplitModel) -> bool:
    return isinstance(model, KnowsItsInputs) and model.reads_text
