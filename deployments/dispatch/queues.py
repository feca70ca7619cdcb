"""Who waits where: inputs before each block, the earliest deadline first, and what they will still cost."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from deployments.dispatch.estimates import ExpectedTimes
from deployments.dispatch.groups import Group, Replica
from deployments.dispatch.messages import Place, RowKind, Unfinished
from deployments.dispatch.route import Route, Stage

Costs = tuple[tuple[Group, float], ...]  # seconds of each group


class Ticket:
    """One admitted input, which exactly one outcome ends. Most leave at the first block: rare fields have defaults."""

    cursor = 0  # the block before which it stands
    reached = 0  # the block before which it stood at most, where that is known to be behind its cursor
    retries = 0  # at this block, after the network failed
    restarts = 0  # from block 0, after the network failed or the input's state was lost
    ended_with: frozenset[str] = frozenset()  # the replicas that hung or ended while they ran it
    ended = False
    kept_by: str | None = None  # the replica that keeps its state; None: any replica can have it
    queue: "Queue | None" = None  # where it waits; None: in a launch
    kind = RowKind.PLAIN
    told: tuple[int, object] | None = None  # of a shadow: the block where it was answered, and what
    risk = 0.0  # the probability to be late, as it was admitted
    expected: ExpectedTimes | None = None  # when it was admitted; None: it has begun again since

    def __init__(self, id: int, deadline_s: float, place: Place, weight: int = 1) -> None:
        self.id = id
        self.weight = weight  # of a text its tokens
        self.deadline_s = deadline_s
        self.place = place
        self.origin = place  # where it came in: it begins again from there if its state is lost with a replica

    def begin_again(self) -> None:
        self.reach(self.cursor)
        self.cursor, self.place, self.kept_by, self.expected = 0, self.origin, None, None

    def reach(self, block: int) -> None:
        """It is known to have stood before this block."""
        self.reached = max(self.reached, block)

    @property
    def unfinished(self) -> Unfinished:
        """What is known of it, if it ends here."""
        return Unfinished(max(self.cursor, self.reached), self.weight)

    def attempts(self) -> int:
        """How often the input may have been the cause of a failure.

        A replica that hangs or ends counts once, however many launches fail there until it is replaced.
        """
        return max(self.retries, self.restarts, len(self.ended_with))


class StageQueues:
    """The queues of one stage: inputs wait together, or apart if a replica keeps them (see `Lane.kept`).

    Inputs are promised what the stages before block `until` do for them. The rest is done as far as time allows, after
    what was promised, and nobody counts on it.
    """

    def __init__(self, route: Route, stage: Stage, groups: Mapping[str, Group], until: int | None = None) -> None:
        self.route, self.stage, self.group = route, stage, groups[stage.group]
        self.waiting = 0  # what the inputs in all queues of this stage weigh
        self.keep = route.keeps(stage)
        self.shared: dict[int, Queue] = {}  # of inputs that any replica can have, by the block they stand before
        self._groups = groups
        self.until = route.num_blocks if until is None else until
        self.is_promised = stage.start < self.until
        self.is_alone = False  # no other stage of the lane wants its group

    def leaves_s(self, at_s: float, weight: int, slowdown: float) -> list[float]:
        """When an input is at each exit point of this stage, if a launch of this weight sets out with it at this time.

        `slowdown`: how many times longer launches take than planned.
        """
        begins_s = at_s + self.stage.transfer_s
        return [begins_s + seconds * slowdown for seconds in self.stage.until_s(weight)]

    def costs(self, cursor: int) -> tuple[Costs, Costs]:
        """What a weight of 1 before this block will cost each group; and what of it after its next launch."""
        promised = [each for each in self.route.onward(cursor) if each.start < self.until]
        return self._costs(promised), self._costs(promised[1:])

    def _costs(self, stages: Sequence[Stage]) -> Costs:
        seconds: dict[Group, float] = {}
        for stage in stages:
            group = self._groups[stage.group]
            seconds[group] = seconds.get(group, 0.0) + _reach(stage, self.stage) * stage.seconds_per_weight
        return tuple(seconds.items())


def _reach(stage: Stage, here: Stage) -> float:
    """The share of the inputs here that will get to a later stage. Where none was expected even here, all do."""
    return min(1.0, stage.survival / here.survival) if here.survival > 0 else 1.0


_DEADLINE = attrgetter("deadline_s")
PASSED = 64  # inputs that are passed over, as they do not fit, before a launch is taken as it is


class Queue:
    """Inputs that wait for the same launch: before one block of one lane and, if a replica keeps them, for that one."""

    def __init__(self, owner: StageQueues, cursor: int, keeper: Replica | None = None) -> None:
        self.owner, self.stage, self.cursor, self.keeper = owner, owner.stage, cursor, keeper
        self.size = self.weight = 0  # of the tickets that have not ended: how many, and what they weigh
        self.goes_first = cursor < owner.until < owner.route.num_blocks
        self.remaining_s = owner.route.remaining_s(cursor)
        if self.goes_first:  # behind what has been sent to the replica for later levels: a launch, and one that waits
            self.remaining_s *= 2
        self._tickets: list[Ticket] = []
        self._costs, self._costs_after_launch = owner.costs(cursor)

    @property
    def is_gone(self) -> bool:
        """Whether the replica that keeps its inputs has gone."""
        return self.keeper is not None and self.owner.group.members.get(self.keeper.name) is not self.keeper

    def costs_s(self, weight: int) -> dict[Group, float]:
        """What inputs of this weight that wait here will cost each group."""
        return {group: weight * seconds for group, seconds in self._costs}

    def add(self, ticket: Ticket) -> None:
        tickets = self._tickets
        tickets.append(ticket)
        if self.size and tickets[-2].deadline_s > ticket.deadline_s:
            tickets.sort(key=_DEADLINE)  # takes one pass: all but the last are in order
        ticket.queue = self
        weight = 1 if self.stage.length is None else ticket.weight
        self.size += 1
        self.weight += weight
        self.owner.waiting += weight
        for group, seconds in self._costs:
            group.owed_s += weight * seconds

    def add_all(self, tickets: list[Ticket]) -> None:
        """Add the survivors of one launch."""
        self._tickets += tickets
        self._tickets.sort(key=_DEADLINE)
        for ticket in tickets:
            ticket.queue = self
        self._count(len(tickets), self.weigh(tickets))

    def forget(self, ticket: Ticket) -> None:
        """A ticket ended while it waited. It stays in the list until it comes up, but no longer counts."""
        ticket.queue = None
        self._count(-1, -self.weigh([ticket]))

    def first(self) -> Ticket | None:
        """The ticket with the earliest deadline."""
        while self._tickets and self._tickets[0].ended:
            del self._tickets[0]
        return self._tickets[0] if self._tickets else None

    def take(self, room: int) -> list[Ticket]:
        """Remove what fits into a launch: the earliest deadline whatever it weighs, then whoever fits, by deadline.

        So nobody starves, and one that is too heavy for any launch goes alone.
        """
        if self.stage.length is None:
            return self.take_first(room)
        taken, passed = list[Ticket](), list[Ticket]()
        for ticket in self._waiting():
            if not taken or ticket.weight <= room:
                taken.append(ticket)
                room -= ticket.weight
            else:
                passed.append(ticket)
            if room <= 0 or len(passed) == PASSED:
                break
        self._tickets[: len(taken) + len(passed)] = passed
        return self._gone(taken)

    def take_first(self, most: int) -> list[Ticket]:
        """Remove up to so many tickets, those with the earliest deadlines."""
        tickets = self._waiting()
        taken = tickets[:most]
        del tickets[:most]
        return self._gone(taken)

    def take_late(self, now_s: float) -> list[Ticket]:
        """Remove the tickets whose deadlines pass before a launch of their own could end."""
        late = []
        while (first := self.first()) and first.deadline_s < now_s + self.stage.seconds(first.weight):
            late += self.take_first(1)
        return late

    def launched(self, weight: int) -> None:
        """So much has gone into a launch (a negative number: has come back): the stages after it still owe it."""
        for group, seconds in self._costs_after_launch:
            group.owed_s += weight * seconds

    def _waiting(self) -> list[Ticket]:
        """The tickets, without those that have ended."""
        if self.size < len(self._tickets):
            self._tickets[:] = [ticket for ticket in self._tickets if not ticket.ended]
        return self._tickets

    def _gone(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            ticket.queue = None
        self._count(-len(tickets), -self.weigh(tickets))
        return tickets

    def _count(self, inputs: int, weight: int) -> None:
        """So many more wait, and every group on their way owes them its work."""
        self.size += inputs
        self.weight += weight
        self.owner.waiting += weight
        for group, seconds in self._costs:
            group.owed_s += weight * seconds

    def weigh(self, tickets: Sequence[Ticket]) -> int:
        """Tickets of another plan's time may weigh tokens where none are counted now."""
        return len(tickets) if self.stage.length is None else sum([ticket.weight for ticket in tickets])
