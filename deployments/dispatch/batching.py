"""Batching: the inputs that wait before each block, the next batch of a group of replicas, and its replica.

An idle replica gets all waiting inputs at once, since a delay gains nothing. Under load replicas are busy, and batches
fill up meanwhile. A full batch may wait at a busy replica, so that it starts when the launch before it ends. A batch
that is not full is sent shortly before that moment, if few inputs wait. If many wait, the launch that ends may fill a
batch of a later stage, which should go first.

When several queues compete for the same replicas,
1. full and urgent queues come first (urgent: with a longer wait, an input would miss its deadline). Of these, the one
   closest to the end of the network comes first, because it finishes inputs and frees their memory;
2. of the other queues, the fullest comes first, since a small launch costs almost as much as a full one. An input that
   waits for long becomes urgent.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any

from isobatch.deployments.dispatch.groups import Group, Replica
from isobatch.deployments.dispatch.messages import Fault, Place, RowKind
from isobatch.deployments.dispatch.route import Route, Stage

log = logging.getLogger(__name__)

# An input is urgent when its remaining time is less than this multiple of the time that full batches need from its
# block to the end. The margin is spent on waiting for these batches.
URGENT = 1.5
# The most inputs that a launch skips because they do not fit: this bounds the search.
MOST_SKIPPED = 64
FILL_RATE = 0.05  # the weight of one launch in the learned fill of a stage: about the last twenty launches matter

Costs = tuple[tuple[Group, float], ...]  # seconds of each group
Queues = dict[tuple[int, int], "Queue"]  # by the block before which inputs wait, and the launches of theirs that broke
KeptQueues = Mapping[Replica, Queues]  # queues of inputs that only this replica has
LaunchRank = tuple[bool, float, float]
Ranked = tuple[LaunchRank, int, "Queue", Replica]  # the rank, and a number that decides between equal ranks
_DEADLINE = attrgetter("deadline_s")


class Ticket:
    """One admitted input, which ends with exactly one outcome.

    It is the only record of an input: `reply` is the driver's part, which the dispatcher never reads. Rare fields have
    defaults in the class: most inputs leave after the first stage, and then cost no more.
    """

    cursor = 0  # the block that it runs next
    reached = 0  # the deepest block that it is known to have reached, even if it began again since
    # The replicas on which the network raised an error while it ran this input. None: the same once more, since only
    # that one kept its state.
    broke_on: "tuple[Replica | None, ...]" = ()
    restarts = 0  # from block 0, after its state was lost
    ended_with: frozenset[str] = frozenset()  # the replicas that hung or ended while they ran it
    ended = False
    kept_by: str | None = None  # the replica that keeps its state; None: any replica can have it
    queue: "Queue | None" = None  # where it waits; None: in a launch
    kind = RowKind.PLAIN
    priority = 0  # for the order by priority: the highest goes first
    early_answer: tuple[int, object] | None = None  # of a shadow: the block where it was answered, and the label
    risk = 0.0  # the probability of being late, computed at its admission
    expected: Any = None  # its `ExpectedTimes` at admission; None: it has begun again since
    reply: Any = None

    def __init__(self, id: int, deadline_s: float, place: Place, weight: int = 1) -> None:
        self.id = id
        self.weight = weight  # the number of tokens of a text
        self.deadline_s = deadline_s
        self.place = place
        self.origin = place  # from here it begins again, if its state is lost with a replica

    def begin_again(self) -> None:
        self.reach(self.cursor)
        self.cursor, self.place, self.kept_by, self.expected = 0, self.origin, None, None

    def is_late(self, now_s: float) -> bool:
        """Whether an answer that comes now is too late."""
        return self.deadline_s < now_s

    def reach(self, block: int) -> None:
        """Note that it reached this block."""
        self.reached = max(self.reached, block)

    def count_failure(self, fault: Fault, replica: Replica, kept: bool) -> None:
        """Count a launch of this input that did not come back. `kept`: only this replica could run it."""
        if fault is Fault.REPLICA:
            self.ended_with |= {replica.name}
        elif fault is Fault.STATE:
            self.restarts += 1
        else:
            self.broke_on += (None if kept and replica in self.broke_on else replica,)

    def attempts(self) -> int:
        """The number of failures that this input may have caused.

        A replica that hangs or ends counts once, however many launches fail there until it is replaced.
        """
        return max(len(self.broke_on), self.restarts, len(self.ended_with))

    @property
    def broken(self) -> int:
        """The failures that make its next launch smaller. A single replica may also end for other reasons."""
        ended = len(self.ended_with)
        return max(len(self.broke_on), ended if ended > 1 else 0)

    def clear_replicas(self, is_cause: bool = False) -> None:
        """Trust the replicas again on which it broke, if it is the cause itself: if it broke on several, it may be."""
        replicas = [replica for replica in self.broke_on if replica]
        if is_cause or len(replicas) > 1:
            for replica in replicas:
                replica.home.trust(replica)


QueueOrder = Callable[[Sequence[Ticket], int], list[Ticket]]  # described in queue_orders.py


class StageQueues:
    """The queues of one stage. Inputs wait together, except those that a replica keeps (`Lane.kept_queues`)."""

    def __init__(
        self, route: Route, stage: Stage, groups: Mapping[str, Group], queue_order: QueueOrder | None = None
    ) -> None:
        self.route, self.stage, self.group, self.queue_order = route, stage, groups[stage.group], queue_order
        self.waiting = 0  # the weight of the inputs in all queues of this stage
        self.keep = route.keeps(stage)
        self.shared: Queues = {}  # queues of inputs that any replica can have
        self._groups = groups
        self.is_alone = False  # no other stage of the lane uses its group
        self.fill = 1.0  # how full recent launches were, as a share of a full one

    def learn_fill(self, weight: int) -> None:
        """Learn how full launches are."""
        self.fill += FILL_RATE * (min(1.0, weight / self.stage.room) - self.fill)

    def exit_times_s(self, at_s: float, weight: int, slowdown: float) -> list[float]:
        """When an input is at each exit point of this stage, if a launch of this weight is sent at `at_s`.

        `slowdown`: the ratio of measured to planned launch times.
        """
        begins_s = at_s + self.stage.transfer_s
        return [begins_s + seconds * slowdown for seconds in self.stage.until_s(weight)]

    def costs(self, cursor: int) -> tuple[Costs, Costs]:
        """The seconds that a weight of 1 before this block will cost each group: in all, and after its next launch."""
        onward = self.route.onward(cursor)
        return self._costs(onward), self._costs(onward[1:])

    def _costs(self, stages: Sequence[Stage]) -> Costs:
        seconds: dict[Group, float] = {}
        for stage in stages:
            group = self._groups[stage.group]
            # Of the inputs before `self.stage`, the share that reaches this one; 1 if the plan expects no inputs there.
            share = min(1.0, stage.survival / survival) if (survival := self.stage.survival) > 0 else 1.0
            seconds[group] = seconds.get(group, 0.0) + share * stage.seconds_per_weight
        return tuple(seconds.items())


class Queue:
    """The inputs that wait for the same launch: before one block of one lane.

    `only_replica`: the one that keeps their state; None: any replica of the group can run them. `room`: the most weight
    of a launch.
    """

    def __init__(self, owner: StageQueues, cursor: int, room: int, only_replica: Replica | None = None) -> None:
        self.owner, self.stage, self.cursor, self.only_replica = owner, owner.stage, cursor, only_replica
        self.room = room
        self.size = self.weight = 0  # the number and the weight of tickets that have not ended
        self.remaining_s = owner.route.remaining_s[cursor]
        self._tickets: list[Ticket] = []
        # The seconds that a weight of 1 that waits here will cost each group.
        self.costs, self._costs_after_launch = owner.costs(cursor)

    @property
    def is_gone(self) -> bool:
        """Whether the replica that keeps its inputs has ended."""
        replica = self.only_replica
        return replica is not None and self.owner.group.members.get(replica.name) is not replica

    def add(self, ticket: Ticket) -> None:
        tickets = self._tickets
        tickets.append(ticket)
        if self.size and tickets[-2].deadline_s > ticket.deadline_s:
            tickets.sort(key=_DEADLINE)  # takes one pass: all but the last are in order
        ticket.queue = self
        weight = self.stage.counted(ticket.weight)
        self.size += 1
        self.weight += weight
        self.owner.waiting += weight
        for group, seconds in self.costs:
            group.owed_s += weight * seconds

    def add_all(self, tickets: list[Ticket]) -> None:
        """Add the survivors of one launch."""
        self._tickets += tickets
        self._tickets.sort(key=_DEADLINE)
        for ticket in tickets:
            ticket.queue = self
        self._count(len(tickets), self.weigh(tickets))

    def forget(self, ticket: Ticket) -> None:
        """Stop counting a ticket that ended while it waited. It stays in the list until it comes up."""
        ticket.queue = None
        self._count(-1, -self.weigh([ticket]))

    def first(self) -> Ticket | None:
        """The ticket with the earliest deadline."""
        while self._tickets and self._tickets[0].ended:
            del self._tickets[0]
        return self._tickets[0] if self._tickets else None

    def take(self, room: int) -> list[Ticket]:
        """Remove a batch for one launch, by the queue order of the limits.

        By default the input with the earliest deadline goes first, however heavy; then, by deadline, those that fit. So
        no input waits for ever, and an input too heavy for any launch runs alone.
        """
        if self.owner.queue_order is not None:
            return self._take_by(self.owner.queue_order, room)
        if self.stage.length is None:
            return self.take_first(room)
        taken, skipped = list[Ticket](), list[Ticket]()
        for ticket in self._waiting():
            if not taken or ticket.weight <= room:
                taken.append(ticket)
                room -= ticket.weight
            else:
                skipped.append(ticket)
            if room <= 0 or len(skipped) == MOST_SKIPPED:
                break
        self._tickets[: len(taken) + len(skipped)] = skipped
        return self._removed(taken)

    def _take_by(self, queue_order: QueueOrder, room: int) -> list[Ticket]:
        """Remove the tickets that this order chooses, or the first one if it chooses none that waits here.

        An order that raises an error is not used again.
        """
        try:
            chosen = {*queue_order(self._waiting(), room)}
        except Exception:  # also if it returns something else than inputs, such as lists of them
            log.exception("the order of the queue raised an error; from now on inputs go by deadline")
            self.owner.queue_order, chosen = None, set[Ticket]()
        going = chosen & {*self._tickets} or {*self._tickets[:1]}
        taken = [ticket for ticket in self._tickets if ticket in going]
        self._tickets[:] = [ticket for ticket in self._tickets if ticket not in going]
        return self._removed(taken)

    def take_first(self, most: int) -> list[Ticket]:
        """Remove up to `most` tickets, those with the earliest deadlines."""
        tickets = self._waiting()
        taken = tickets[:most]
        del tickets[:most]
        return self._removed(taken)

    def take_late(self, now_s: float) -> list[Ticket]:
        """Remove the tickets that even a launch sent now would answer too late.

        Only those that the next launch may take are examined; with a queue order these are all. Inputs that another
        plan left inside this stage need less time than the stage takes, which is not known.
        """
        stage, late, kept = self.stage, list[Ticket](), list[Ticket]()
        if self.cursor != stage.start:
            return late
        room = self.room if self.owner.queue_order is None else inf
        # Admission believes devices that are faster than planned, so they are believed here. Slow ones may recover.
        pace = min(1.0, self.owner.group.slowdown)
        latest_s = now_s + pace * stage.until_s(stage.counted(stage.room))[-1]
        for ticket in self._waiting():
            weight = stage.counted(ticket.weight)
            if ticket.deadline_s < now_s + pace * stage.until_s(weight)[-1 if ticket.kind is RowKind.FULL else 0]:
                late.append(ticket)
                continue
            if weight <= room or not kept:
                room -= weight
            kept.append(ticket)
            if room <= 0 or ticket.deadline_s >= latest_s:
                break
        if late:
            self._tickets[: len(late) + len(kept)] = kept
            self._removed(late)
        return late

    def launched(self, weight: int) -> None:
        """Count inputs that went into a launch: later stages still owe their work (negative: inputs have come back)."""
        for group, seconds in self._costs_after_launch:
            group.owed_s += weight * seconds

    def _waiting(self) -> list[Ticket]:
        if self.size < len(self._tickets):
            self._tickets[:] = [ticket for ticket in self._tickets if not ticket.ended]
        return self._tickets

    def _removed(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            ticket.queue = None
        self._count(-len(tickets), -self.weigh(tickets))
        return tickets

    def _count(self, inputs: int, weight: int) -> None:
        """Change the number and weight of waiting inputs, and the work that groups owe them."""
        self.size += inputs
        self.weight += weight
        self.owner.waiting += weight
        for group, seconds in self.costs:
            group.owed_s += weight * seconds

    def weigh(self, tickets: Sequence[Ticket]) -> int:
        """The weight of tickets under the present plan: 1 each, if it does not count tokens."""
        return len(tickets) if self.stage.length is None else sum([ticket.weight for ticket in tickets])


def choose(
    group: Group, stages: Sequence[StageQueues], kept_queues: KeptQueues, now_s: float
) -> tuple[Queue, Replica] | None:
    """The next queue to launch from, and a replica for it. Most calls find none, so they must be cheap.

    `stages` are the stages of one lane that this group runs.
    """
    choices: list[Ranked] = []
    for stage in stages:
        if stage.waiting:
            for queue in stage.shared.values():
                if queue.size and (replica := _replica_for(queue, group, stages, now_s)):
                    choices.append((_rank(queue, now_s), len(choices), queue, replica))
    if group.may_run_kept:
        _add_kept(choices, group, kept_queues, now_s)
    if not choices:
        return None
    _, _, queue, replica = min(choices) if len(choices) > 1 else choices[0]
    return queue, replica


def _replica_for(queue: Queue, group: Group, stages: Sequence[StageQueues], now_s: float) -> Replica | None:
    if idle := group.idle(now_s):
        return idle
    if queue.weight >= queue.room:
        return group.soonest()
    replica = group.nearly_idle(now_s)
    if replica is None or replica.keeps_inputs:  # what it keeps would wait until it is without a launch
        return None
    return replica if sum(stage.waiting for stage in stages) < queue.stage.room else None


def _add_kept(choices: list[Ranked], group: Group, kept_queues: KeptQueues, now_s: float) -> None:
    """Add the queues of inputs that one replica keeps. Only that replica can run them, benched or not."""
    able = set()
    for replica in group.may_run_kept:
        for queue in kept_queues.get(replica, {}).values():
            if queue.size and (not replica.pending_s or (queue.weight >= queue.room and group.has_room(replica))):
                choices.append((_rank(queue, now_s), len(choices), queue, replica))
                able.add(replica)
    group.may_run_kept = able


def _rank(queue: Queue, now_s: float) -> LaunchRank:
    """The queue with the lowest rank is launched first. Inputs whose launch broke do not wait to fill one."""
    first, room = queue.first(), queue.room
    deadline_s = first.deadline_s if first else inf
    if queue.weight >= room or room < queue.stage.room or deadline_s - now_s <= URGENT * queue.remaining_s:
        return False, -queue.cursor, deadline_s
    return True, -queue.weight / room, deadline_s
