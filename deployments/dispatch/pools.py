"""Who waits where: inputs before each block, the earliest deadline first."""

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where an input's state is: a row of something that the driver understands (a batch, a reference to one)."""

    payload: Any
    row: int


@dataclass(slots=True)
class Ticket:
    """One admitted input, which exactly one outcome ends."""

    id: int
    deadline_s: float
    place: Place
    origin: Place  # where it was when it came: what it begins again from if a replica takes its state along
    cursor: int = 0
    retries: int = 0  # at this block
    restarts: int = 0
    waiting: bool = False  # in a pool, not in a launch
    ended: bool = False


class Pool:
    """The inputs that wait before one block."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []
        self.size = 0  # those who have not ended

    def __len__(self) -> int:
        return self.size

    def add(self, ticket: Ticket) -> None:
        ticket.waiting = True
        self.size += 1
        heapq.heappush(self._heap, (ticket.deadline_s, ticket.id, ticket))

    def forget(self) -> None:
        """One of those who wait has ended. It stays in the heap until it comes up, but no longer counts."""
        self.size -= 1

    def first(self) -> Ticket | None:
        """The one with the earliest deadline."""
        while self._heap and self._heap[0][2].ended:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def take(self) -> Ticket | None:
        """Remove the one with the earliest deadline."""
        first = self.first()
        if first is not None:
            heapq.heappop(self._heap)
            first.waiting = False
            self.size -= 1
        return first
