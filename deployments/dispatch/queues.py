"""Who waits where: inputs before each block, the earliest deadline first, and what they will still cost."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from deployments.dispatch.groups import Group, Replica
from deployments.dispatch.messages import Place
from deployments.dispatch.route import Route, Stage

Costs = tuple[tuple[Group, float], ...]  # seconds of each group


class Ticket:
    """One admitted input, which exactly one outcome ends. Most leave at the first block: rare fields have defaults."""

    cursor = 0  # the block before which it stands
    retries = 0  # at this block, after the network failed
    restarts = 0  # from block 0, after the network failed or the input's state was lost
    ended_with: frozenset[str] = frozenset()  # the replicas that hung or ended while they ran it
    ended = False
    kept_by: str | None = None  # the replica that keeps its state; None: any replica can have it
    queue: "Queue | None" = None  # where it waits; None: in a launch

    def __init__(self, id: int, deadline_s: float, place: Place) -> None:
        self.id = id
        self.deadline_s = deadline_s
        self.place = place
        self.origin = place  # where it came in: it begins again from there if its state is lost with a replica

    def begin_again(self) -> None:
        self.cursor, self.place, self.kept_by = 0, self.origin, None

    def attempts(self) -> int:
        """How often the input may have been the cause of a failure.

        A replica that hangs or ends counts once, however many launches fail there until it is replaced.
        """
        return max(self.retries, self.restarts, len(self.ended_with))


class StageQueues:
    """The queues of one stage: inputs wait together, or apart if a replica keeps them (see `Lane.kept`)."""

    def __init__(self, route: Route, stage: Stage, groups: Mapping[str, Group]) -> None:
        self.route, self.stage, self.group = route, stage, groups[stage.group]
        self.waiting = 0  # inputs in all queues of this stage
        self.keep = route.keeps(stage)
        self.shared: dict[int, Queue] = {}  # of inputs that any replica can have, by the block they stand before
        self._groups = groups

    def costs(self, cursor: int) -> tuple[Costs, Costs]:
        """What one input that stands before this block will cost each group; and what of it after its next launch."""
        here, *after = onward = self.route.onward(cursor)
        return self._costs(onward, here), self._costs(after, here)

    def _costs(self, stages: Sequence[Stage], here: Stage) -> Costs:
        seconds: dict[Group, float] = {}
        for stage in stages:
            group = self._groups[stage.group]
            seconds[group] = seconds.get(group, 0.0) + _reach(stage, here) * stage.seconds_per_input
        return tuple(seconds.items())


def _reach(stage: Stage, here: Stage) -> float:
    """The share of the inputs here that will get to a later stage. Where none was expected even here, all do."""
    return min(1.0, stage.survival / here.survival) if here.survival > 0 else 1.0


_DEADLINE = attrgetter("deadline_s")


class Queue:
    """Inputs that wait for the same launch: before one block of one lane and, if a replica keeps them, for that one."""

    def __init__(self, owner: StageQueues, cursor: int, keeper: Replica | None = None) -> None:
        self.owner, self.stage, self.cursor, self.keeper = owner, owner.stage, cursor, keeper
        self.size = 0  # tickets that have not ended
        self.remaining_s = owner.route.remaining_s(cursor)
        self._tickets: list[Ticket] = []
        self._costs, self._costs_after_launch = owner.costs(cursor)

    def costs_s(self, inputs: int) -> dict[Group, float]:
        """What so many inputs that wait here will cost each group."""
        return {group: inputs * seconds for group, seconds in self._costs}

    def add(self, ticket: Ticket) -> None:
        tickets = self._tickets
        tickets.append(ticket)
        if self.size and tickets[-2].deadline_s > ticket.deadline_s:
            tickets.sort(key=_DEADLINE)  # takes one pass: all but the last are in order
        ticket.queue = self
        self.size += 1
        self.owner.waiting += 1
        for group, seconds in self._costs:
            group.owed_s += seconds

    def add_all(self, tickets: list[Ticket]) -> None:
        """Add the survivors of one launch."""
        self._tickets += tickets
        self._tickets.sort(key=_DEADLINE)
        for ticket in tickets:
            ticket.queue = self
        self._count(len(tickets))

    def forget(self, ticket: Ticket) -> None:
        """A ticket ended while it waited. It stays in the list until it comes up, but no longer counts."""
        ticket.queue = None
        self._count(-1)

    def first(self) -> Ticket | None:
        """The ticket with the earliest deadline."""
        while self._tickets and self._tickets[0].ended:
            del self._tickets[0]
        return self._tickets[0] if self._tickets else None

    def take(self, most: int) -> list[Ticket]:
        """Remove up to so many tickets, those with the earliest deadlines."""
        tickets = self._tickets
        if self.size < len(tickets):
            tickets[:] = [ticket for ticket in tickets if not ticket.ended]
        taken = tickets[:most]
        del tickets[:most]
        for ticket in taken:
            ticket.queue = None
        self._count(-len(taken))
        return taken

    def take_late(self, earliest_end_s: float) -> list[Ticket]:
        """Remove the tickets whose deadlines pass before then."""
        late = []
        while (first := self.first()) and first.deadline_s < earliest_end_s:
            late += self.take(1)
        return late

    def launched(self, inputs: int) -> None:
        """So many have gone into a launch (a negative number: have come back): the stages after it still owe them."""
        for group, seconds in self._costs_after_launch:
            group.owed_s += inputs * seconds

    def _count(self, step: int) -> None:
        """So many more wait, and every group on their way owes them its work."""
        self.size += step
        self.owner.waiting += step
        for group, seconds in self._costs:
            group.owed_s += step * seconds
