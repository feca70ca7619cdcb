"""Notes on the device who leaves during a launch, and tells the host in one copy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.exits import Decision
from deployments.transport.packed import rows_of
from profiles.model import NOBODY, Exits

_INSIDE = -1.0

Copied = Callable[[], NDArray[np.float32]]  # waits for a copy that has begun


@dataclass(frozen=True)
class Tokens:
    """Where every token of a text is answered: whose it is, and whether it is asked for (the first of its word is).

    A text leaves when at most `most_unsure` of those that are asked for would not leave by themselves, and one would.
    """

    lengths: NDArray[np.int64]
    text: Tensor
    asked: Tensor
    most_unsure: int = 0

    def leave(self, sure: Tensor) -> Tensor:
        """Which texts leave."""
        unsure, all_asked = self._counted(self.asked & ~sure), self._counted(self.asked)
        return (unsure <= self.most_unsure) & (unsure < all_asked)

    def _counted(self, tokens: Tensor) -> Tensor:
        """How many of these each text has."""
        return self.text.new_zeros(len(self.lengths)).index_add_(0, self.text, tokens.to(self.text.dtype))


class Departures:
    """One row an input: the block it left at (or `_INSIDE`), then the logits it answers with.

    Inputs at the positions `kept` stay inside, whatever is noted of them; what was noted last counts.
    """

    def __init__(self, memory: Tensor, num_labels: int, kept: NDArray[np.int64] = NOBODY) -> None:
        self.memory = memory
        self._kept = kept
        self._ledger = torch.full((self._rows, 1 + num_labels), _INSIDE, device=memory.device)
        self._anyone_may_have_left = False

    @property
    def _rows(self) -> int:
        return len(self.memory)

    def note(self, block: int, decision: Decision, *, may_leave: bool) -> None:
        """A ramp was looked at; only an active one lets inputs leave, but every one may be remembered."""
        self.memory = decision.memory
        if may_leave:
            self._leave(block, decision.answer, decision.leaves)

    def close(self, block: int, answer: Tensor) -> None:
        """The network ends here: everybody still inside leaves."""
        self._leave(block, answer, torch.ones_like(self._ledger[:, 0], dtype=torch.bool))

    def settle(self) -> tuple[Exits, NDArray[np.int64]]:
        """Who left, and the rows of those that stay. This is the only copy from device to host, if one is needed."""
        if not self._anyone_may_have_left:
            nobody, everybody = np.empty(0, np.int64), np.arange(len(self.memory))
            return self._exits(np.empty((0, self._told().shape[1]), np.float32), nobody), everybody
        ledger = to_host(self._told())()
        inside = ledger[self._firsts, 0] == _INSIDE
        exits = self._exits(ledger, np.flatnonzero(~inside))
        inside[self._kept] = True
        return exits, np.flatnonzero(inside)

    def _leave(self, block: int, answer: Tensor, leaves: Tensor) -> None:
        departure = torch.cat((torch.full_like(answer[:, :1], block), answer), dim=1)
        inside = self._ledger[:, 0] == _INSIDE
        if len(self._kept):
            inside[torch.from_numpy(self._kept_rows).to(inside.device)] = True
        leaves_now = (leaves & inside).unsqueeze(1)
        self._ledger = torch.where(leaves_now, departure, self._ledger)
        self._anyone_may_have_left = True

    def _told(self) -> Tensor:
        """What the host is told."""
        return self._ledger

    @property
    def _firsts(self) -> NDArray[np.int64] | slice:
        """The rows that tell of each input whether it left."""
        return slice(None)

    @property
    def _kept_rows(self) -> NDArray[np.int64]:
        return self._kept

    def _exits(self, ledger: NDArray[np.float32], rows: NDArray[np.int64]) -> Exits:
        left = ledger[rows]
        return Exits(rows, left[:, 0].astype(np.int64), left[:, 1:])


class TokenDepartures(Departures):
    """One row a token, and behind its logits whether it is asked for. A text's tokens leave together."""

    def __init__(self, memory: Tensor, num_labels: int, kept: NDArray[np.int64], tokens: Tokens) -> None:
        self._tokens = tokens
        super().__init__(memory, num_labels, kept)

    @property
    def _rows(self) -> int:
        return len(self._tokens.text)

    def note(self, block: int, decision: Decision, *, may_leave: bool) -> None:
        if may_leave:
            self._leave(block, decision.answer, self._tokens.leave(decision.leaves)[self._tokens.text])

    def _told(self) -> Tensor:
        return torch.cat((self._ledger, self._tokens.asked.unsqueeze(1).to(self._ledger.dtype)), dim=1)

    @property
    def _firsts(self) -> NDArray[np.int64]:
        firsts: NDArray[np.int64] = np.cumsum(self._tokens.lengths) - self._tokens.lengths
        return firsts

    @property
    def _kept_rows(self) -> NDArray[np.int64]:
        return rows_of(self._tokens.lengths, self._kept)

    def _exits(self, ledger: NDArray[np.float32], rows: NDArray[np.int64]) -> Exits:
        left = ledger[rows_of(self._tokens.lengths, rows)]
        asked = left[:, -1] > 0
        lengths = self._tokens.lengths[rows]
        counts = np.add.reduceat(asked.astype(np.int64), np.cumsum(lengths) - lengths)
        return Exits(rows, ledger[self._firsts[rows], 0].astype(np.int64), left[asked, 1:-1], counts)


def to_host(tensor: Tensor) -> Copied:
    """Begin to copy into pinned memory, which the device writes by itself, without waiting for what is queued later."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    here = _pinned(tensor)
    here.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> NDArray[np.float32]:
        arrived.synchronize()
        return here.numpy()

    return wait


def _pinned(tensor: Tensor) -> Tensor:
    """Torch keeps such memory for the next one: only the first takes long."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
