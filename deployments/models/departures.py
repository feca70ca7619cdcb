"""Collects on the device which inputs leave during a launch, and copies the result to the host once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.exits import Decision
from deployments.transport.packed import rows_of
from profiles.model import NOBODY, Exits

_INSIDE = -1.0  # the block number of an input that has not left

PendingCopy = Callable[[], NDArray[np.float32]]  # waits for a copy to the host that has begun


@dataclass(frozen=True)
class AnsweredTokens:
    """The tokens of a batch whose texts are answered word by word, at the first token of each word.

    `text` is the number of each token's text, and `answered` says whether the token is answered. A text leaves when at
    most `most_unsure` of its answered tokens would not leave by themselves, and at least one would.
    """

    lengths: NDArray[np.int64]
    text: Tensor
    answered: Tensor
    most_unsure: int = 0

    def leave(self, sure: Tensor) -> Tensor:
        """Which texts leave."""
        unsure, total = self._count_by_text(self.answered & ~sure), self._count_by_text(self.answered)
        return (unsure <= self.most_unsure) & (unsure < total)

    def _count_by_text(self, tokens: Tensor) -> Tensor:
        """The number of these tokens in each text."""
        return self.text.new_zeros(len(self.lengths)).index_add_(0, self.text, tokens.to(self.text.dtype))


class Departures:
    """One row per input: the block that it left at (or `_INSIDE`), then the logits of its answer.

    Inputs at the positions `kept` stay inside even if they leave; their last departure replaces earlier ones.
    """

    def __init__(self, memory: Tensor, num_labels: int, kept: NDArray[np.int64] = NOBODY) -> None:
        self.memory = memory
        self._kept = kept
        self._departures = torch.full((self._rows, 1 + num_labels), _INSIDE, device=memory.device)
        self._anyone_may_have_left = False

    @property
    def _rows(self) -> int:
        return len(self.memory)

    def note(self, block: int, decision: Decision, *, may_leave: bool) -> None:
        """Add a ramp's decision. Inputs leave at active ramps only, but a policy may remember every ramp."""
        self.memory = decision.memory
        if may_leave:
            self._leave(block, decision.answer, decision.leaves)

    def close(self, block: int, answer: Tensor) -> None:
        """End the network after this block: all inputs that are still inside leave."""
        self._leave(block, answer, torch.ones_like(self._departures[:, 0], dtype=torch.bool))

    def finish(self) -> tuple[Exits, NDArray[np.int64]]:
        """The exits, and the rows of inputs that stay. At most one copy from device to host is made."""
        if not self._anyone_may_have_left:
            nobody, everybody = np.empty(0, np.int64), np.arange(len(self.memory))
            return self._exits(np.empty((0, self._output().shape[1]), np.float32), nobody), everybody
        departures = to_host(self._output())()
        inside = departures[self._first_rows, 0] == _INSIDE
        exits = self._exits(departures, np.flatnonzero(~inside))
        inside[self._kept] = True
        return exits, np.flatnonzero(inside)

    def _leave(self, block: int, answer: Tensor, leaves: Tensor) -> None:
        departure = torch.cat((torch.full_like(answer[:, :1], block), answer), dim=1)
        inside = self._departures[:, 0] == _INSIDE
        if len(self._kept):
            inside[torch.from_numpy(self._kept_rows).to(inside.device)] = True
        leaves_now = (leaves & inside).unsqueeze(1)
        self._departures = torch.where(leaves_now, departure, self._departures)
        self._anyone_may_have_left = True

    def _output(self) -> Tensor:
        """The rows that are copied to the host."""
        return self._departures

    @property
    def _first_rows(self) -> NDArray[np.int64] | slice:
        """The row of each input whose first column says whether the input left."""
        return slice(None)

    @property
    def _kept_rows(self) -> NDArray[np.int64]:
        return self._kept

    def _exits(self, departures: NDArray[np.float32], rows: NDArray[np.int64]) -> Exits:
        left = departures[rows]
        return Exits(rows, left[:, 0].astype(np.int64), left[:, 1:])


class TokenDepartures(Departures):
    """One row per token, and in its last column whether the token is answered. A text's tokens leave together."""

    def __init__(self, memory: Tensor, num_labels: int, kept: NDArray[np.int64], tokens: AnsweredTokens) -> None:
        self._tokens = tokens
        super().__init__(memory, num_labels, kept)

    @property
    def _rows(self) -> int:
        return len(self._tokens.text)

    def note(self, block: int, decision: Decision, *, may_leave: bool) -> None:
        if may_leave:
            self._leave(block, decision.answer, self._tokens.leave(decision.leaves)[self._tokens.text])

    def _output(self) -> Tensor:
        return torch.cat((self._departures, self._tokens.answered.unsqueeze(1).to(self._departures.dtype)), dim=1)

    @property
    def _first_rows(self) -> NDArray[np.int64]:
        firsts: NDArray[np.int64] = np.cumsum(self._tokens.lengths) - self._tokens.lengths
        return firsts

    @property
    def _kept_rows(self) -> NDArray[np.int64]:
        return rows_of(self._tokens.lengths, self._kept)

    def _exits(self, departures: NDArray[np.float32], rows: NDArray[np.int64]) -> Exits:
        left = departures[rows_of(self._tokens.lengths, rows)]
        answered = left[:, -1] > 0
        lengths = self._tokens.lengths[rows]
        counts = np.add.reduceat(answered.astype(np.int64), np.cumsum(lengths) - lengths)
        return Exits(rows, departures[self._first_rows[rows], 0].astype(np.int64), left[answered, 1:-1], counts)


def to_host(tensor: Tensor) -> PendingCopy:
    """Begin a copy into pinned memory. The device writes it while the host goes on, ahead of work queued later."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    host = _pinned(tensor)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> NDArray[np.float32]:
        arrived.synchronize()
        return host.numpy()

    return wait


def _pinned(tensor: Tensor) -> Tensor:
    """Pinned memory for a copy of this tensor. Torch reuses such memory, so only the first allocation takes long."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
