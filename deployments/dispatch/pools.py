"""Who waits where: inputs before each block, the earliest deadline first."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from deployments.dispatch.lane import Station
    from deployments.dispatch.replicas import Replica


class Place(NamedTuple):
    """Where an input's state is: a row of something that the driver understands (a batch, a reference to one)."""

    payload: Any
    row: int


NOWHERE = Place(None, 0)


class Ticket:
    """One admitted input, which exactly one outcome ends. Few reach more than a block: what is rare has a default."""

    cursor = 0
    retries = 0  # at this block
    restarts = 0
    ended = False
    holder: "str | None" = None  # the replica that keeps its state; none: whoever launches it can take it from anywhere
    pool: "Pool | None" = None  # where it waits; none: in a launch

    def __init__(self, id: int, deadline_s: float, place: Place) -> None:
        self.id = id
        self.deadline_s = deadline_s
        self.place = place
        self.origin = place  # what it begins again from if a replica takes its state along

    def begin_again(self) -> None:
        self.cursor, self.place, self.holder = 0, self.origin, None


_DEADLINE = attrgetter("deadline_s")


class Pool:
    """Inputs that wait for the same launch: before one block of one lane and, if it keeps them, on one replica."""

    def __init__(self, station: "Station", cursor: int, keeper: "Replica | None" = None) -> None:
        self.station, self.stage, self.cursor, self.keeper = station, station.stage, cursor, keeper
        self.size = 0  # those who have not ended
        self._queue: list[Ticket] = []
        self._debts, self._onward = station.debts(cursor)

    def add(self, ticket: Ticket) -> None:
        queue = self._queue
        queue.append(ticket)
        if self.size and queue[-2].deadline_s > ticket.deadline_s:
            queue.sort(key=_DEADLINE)  # it is sorted but for the last one: a pass
        ticket.pool = self
        self.size += 1
        self.station.waiting += 1
        for group, each_s in self._debts:
            group.owed_s += each_s

    def add_all(self, tickets: list[Ticket]) -> None:
        """Survivors of one launch."""
        self._queue += tickets
        self._queue.sort(key=_DEADLINE)
        for ticket in tickets:
            ticket.pool = self
        self._count(len(tickets))

    def forget(self, ticket: Ticket) -> None:
        """One of those who wait has ended. It stays in the queue until it comes up, but no longer counts."""
        ticket.pool = None
        self._count(-1)

    def first(self) -> Ticket | None:
        """The one with the earliest deadline."""
        while self._queue and self._queue[0].ended:
            del self._queue[0]
        return self._queue[0] if self._queue else None

    def take(self, most: int) -> list[Ticket]:
        """Remove up to so many, those with the earliest deadlines."""
        queue = self._queue
        if self.size < len(queue):
            queue[:] = [ticket for ticket in queue if not ticket.ended]
        taken = queue[:most]
        del queue[:most]
        for ticket in taken:
            ticket.pool = None
        self._count(-len(taken))
        return taken

    def _count(self, step: int) -> None:
        """What waits here is owed by every group on its way."""
        self.size += step
        self.station.waiting += step
        for group, each_s in self._debts:
            group.owed_s += step * each_s

    def fly(self, size: int) -> None:
        """So many are in a launch from here (or, negative, no more): what comes after it is still owed."""
        for group, each_s in self._onward:
            group.owed_s += size * each_s
