"""Collects on the device which inputs leave in a part of a launch, and copies the result to the host once."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.deployments.exits import Decision
from isobatch.deployments.transport.device_copies import to_host
from isobatch.deployments.transport.packed import rows_of
from isobatch.profiles.model import NOBODY, Exits

Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]


class Departures:
    """What ramps decide in a launch: for each ramp, a column with the inputs that leave, and the logits of the answers.

    The device puts these columns side by side, and the host reads them once. An input leaves at the first ramp that
    lets it go. Inputs at the positions `kept` stay inside even if they leave; they leave at the last such ramp.
    """

    def __init__(self, memory: Tensor, num_labels: int, kept: Integers = NOBODY) -> None:
        self.memory = memory
        self._num_labels, self._kept = num_labels, kept
        self._blocks: list[int] = []
        self._columns: list[Tensor] = []
        self._is_closed = False

    def note(self, block: int, decision: Decision, *, may_leave: bool) -> None:
        """Add a ramp's decision. Inputs leave only at active ramps, but a policy may use its memory of every ramp."""
        self.memory = decision.memory
        if may_leave:
            self._blocks.append(block)
            self._columns += decision.leaves.unsqueeze(1), decision.answer

    def close(self, block: int, answer: Tensor) -> None:
        """End the network after this block: all inputs that are still inside leave."""
        self._is_closed = True
        self._blocks.append(block)
        self._columns += answer.new_ones(len(answer), 1), answer

    def finish(self) -> tuple[Exits, Integers]:
        """The exits, and the rows of inputs that stay. At most one copy from device to host is made."""
        if not self._blocks:
            return Exits(NOBODY, NOBODY, np.empty((0, self._num_labels), np.float32)), np.arange(len(self.memory))
        table = to_host(torch.cat(self._columns, dim=1))().astype(np.float32, copy=False)
        return self._read(table)

    def _read(self, table: NDArray[np.float32]) -> tuple[Exits, Integers]:
        columns = table.reshape(len(table), len(self._blocks), -1)
        rows, ramps, staying = self._sorted_out(columns[:, :, 0] > 0)
        return Exits(rows, np.array(self._blocks)[ramps], columns[rows, ramps, 1:]), staying

    def _sorted_out(self, leaves: Flags) -> tuple[Integers, Integers, Integers]:
        """The inputs that leave, the ramp at which each of them does, and the inputs that stay."""
        left: Flags = np.logical_or.reduce(leaves, axis=1)
        inside, ramps = ~left, leaves.argmax(axis=1)
        if len(self._kept):
            inside[self._kept] = True
            ramps[self._kept] = leaves.shape[1] - 1 - leaves[self._kept, ::-1].argmax(axis=1)
        rows = left.nonzero()[0]
        return rows, ramps[rows], inside.nonzero()[0]


class TokenDepartures(Departures):
    """One row per token, and in its last column whether the token is answered. A text's tokens leave together.
    Where the labels of an input are answered one by one, they are its tokens.

    Texts are answered word by word, at the first token of each word. A text leaves when at most `most_unsure` of its
    answered tokens would not leave by themselves, and at least one would.
    """

    def __init__(
        self, memory: Tensor, num_labels: int, kept: Integers, lengths: Integers, answered: Tensor, most_unsure: int = 0
    ) -> None:
        super().__init__(memory, num_labels, kept)
        self._lengths, self._answered, self._most_unsure = lengths, answered, most_unsure

    def finish(self) -> tuple[Exits, Integers]:
        if self._blocks:
            self._columns.append(self._answered.unsqueeze(1))
        return super().finish()

    def _read(self, table: NDArray[np.float32]) -> tuple[Exits, Integers]:
        lengths, answered = self._lengths, table[:, -1] > 0
        columns = table[:, :-1].reshape(len(table), len(self._blocks), -1)
        starts = np.cumsum(lengths) - lengths
        total = np.add.reduceat(answered, starts, dtype=np.int64)
        unsure = np.add.reduceat(answered[:, None] & (columns[:, :, 0] <= 0), starts, axis=0, dtype=np.int64)
        leaves = (unsure <= self._most_unsure) & (unsure < total[:, None])
        leaves[:, -1] |= self._is_closed
        rows, ramps, staying = self._sorted_out(leaves)
        places = rows_of(lengths, rows)
        logits = columns[places, np.repeat(ramps, lengths[rows]), 1:][answered[places]]
        return Exits(rows, np.array(self._blocks)[ramps], logits, total[rows]), staying
