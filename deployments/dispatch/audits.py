"""Shadows: audited inputs that have their answer and run on to the end, to show what the full network says.

They wait apart from all others, so that no promise, deadline or decision knows of them, and fill the places of launches
that stay empty. What that costs is paid from an allowance, a share of the seconds that replicas compute: nothing where
a launch takes as long with them. From it launches of shadows alone are paid too, on a replica that nobody wants.
Whatever becomes of a shadow, nobody waits for it: it is given up rather than tried again.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from deployments.dispatch.groups import Replica
from deployments.dispatch.lanes import Lane
from deployments.dispatch.messages import NOWHERE, Audit, Launch, Limits, RowKind
from deployments.dispatch.queues import Queue, Ticket
from deployments.dispatch.route import Stage

# What a launch computed is held for as long as one of its shadows waits, so few may wait, and not for long.
MOST = 64  # shadows that wait; whoever waits longest is given up for another
OLDEST_S = 5.0  # how long one waits at most
ALONE_AFTER_S = 1.0  # how long shadows wait for company, unless they fill a launch by themselves
SAVED_S = 1.0  # of the allowance that was not spent
FREE_S = 1e-12  # a launch that takes longer by less is as long


class _Waiting(NamedTuple):
    since_s: float
    ticket: Ticket


class Audits:
    """The shadows of one dispatcher. `chance` draws who is audited, from 0 to 1."""

    def __init__(self, limits: Limits, chance: Callable[[], float], num_blocks: int) -> None:
        self._limits, self._chance, self._num_blocks = limits, chance, num_blocks
        self._waiting: dict[Queue, deque[_Waiting]] = {}  # beside the inputs of each queue
        self._lanes: dict[Queue, Lane] = {}
        self._count = 0
        self._allowed_s = 0.0
        self._done: list[Audit] = []

    def limit(self, limits: Limits) -> None:
        self._limits = limits

    def draw(self, ticket: Ticket) -> None:
        if self._limits.answers_early:
            ticket.kind = RowKind.EARLY
        elif self._chance() < self._limits.audit_share:
            ticket.kind = RowKind.AUDITED

    # What shadows may cost

    def earn(self, computed_s: float) -> None:
        self._allowed_s = min(SAVED_S, self._allowed_s + self._limits.audit_cost * computed_s)

    def pay(self, seconds: float) -> None:
        self._allowed_s -= seconds

    @property
    def waiting(self) -> int:
        return self._count

    def kinds(self, tickets: list[Ticket], crowded: bool = False) -> bytes:
        """What the inputs of a launch are; audited ones only as long as the allowance is not overdrawn.

        `crowded`: others wait for its replica. Where answers are early, most inputs then leave with theirs, so that
        these come sooner: only a share runs on, as audits.
        """
        if crowded and self._limits.answers_early:
            for ticket in tickets:
                if ticket.kind is RowKind.EARLY and self._chance() >= self._limits.audit_share:
                    ticket.kind = RowKind.PLAIN
        kinds = bytes([ticket.kind for ticket in tickets])
        if not any(kinds):
            return b""
        if self._allowed_s < 0.0 and RowKind.AUDITED in kinds:
            for ticket in tickets:
                if ticket.kind is RowKind.AUDITED:
                    ticket.kind = RowKind.PLAIN
            return self.kinds(tickets)
        return kinds

    # How shadows come and go

    def hear(self, ticket: Ticket, block: int, label: object, launch: Launch, stage: Stage) -> None:
        """The network's answer to any input of a launch, at a ramp or, at the end, in full."""
        is_full = block + 1 == launch.stop and launch.stop == self._num_blocks
        if ticket.told and is_full:
            at, told = ticket.told
            self._done.append(Audit(at, _agree(told, label, self._chance)))
        elif ticket.kind in (RowKind.AUDITED, RowKind.EARLY) and not ticket.ended and not is_full:
            if ticket.kind is RowKind.AUDITED:
                self._pay_rest(ticket, block, launch, stage)
            ticket.told, ticket.kind = (block, label), RowKind.SHADOW

    def _pay_rest(self, ticket: Ticket, block: int, launch: Launch, stage: Stage) -> None:
        """What a shadow costs in the rest of the launch in which it had its answer."""
        others = launch.weight - (1 if launch.length is None else ticket.weight)
        if others:
            rest = (launch.stop - 1 - block) / (launch.stop - launch.cursor)
            self.pay(rest * (stage.seconds(launch.weight) - stage.seconds(others)))

    def give_up(self, tickets: list[Ticket]) -> bool:
        """Audit none of these any more; returns whether any was. Where answers are early, shadows are no guests."""
        if self._limits.answers_early:
            return False
        aboard = [ticket for ticket in tickets if ticket.kind in (RowKind.AUDITED, RowKind.SHADOW)]
        for ticket in aboard:
            ticket.kind, ticket.told = RowKind.PLAIN, None
        return bool(aboard)

    def done(self) -> list[Audit]:
        """The audits that have come to their end since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, lane: Lane, tickets: list[Ticket], now_s: float) -> None:
        self._forget_old(now_s)
        for ticket in tickets:
            if self._count == MOST:
                longest = min(self._waiting, key=lambda queue: self._waiting[queue][0].since_s)
                self._take(longest).place = NOWHERE
            ticket.origin = NOWHERE
            queue = lane.queue(ticket.cursor, ticket.kept_by)
            self._waiting.setdefault(queue, deque()).append(_Waiting(now_s, ticket))
            self._lanes[queue] = lane
            self._count += 1

    def joining(self, queue: Queue, weight: int) -> list[Ticket]:
        """Shadows for the empty places of a launch of this weight, as far as they are free or paid for."""
        waiting, joining, stage = self._waiting.get(queue), list[Ticket](), queue.stage
        while waiting:
            heavier = weight + (1 if stage.length is None else waiting[0].ticket.weight)
            if heavier > stage.room:
                break
            cost_s = stage.seconds(heavier) - stage.seconds(weight)
            if cost_s > FREE_S and cost_s > self._allowed_s:
                break
            self.pay(cost_s)
            joining.append(self._take(queue))
            weight, waiting = heavier, self._waiting.get(queue)
        return joining

    def alone(self, now_s: float) -> Iterator[tuple[Lane, Queue, Replica, list[Ticket]]]:
        """Launches of shadows only, of those who have waited for long or fill one, on replicas that are idle.

        Not where nobody knows what a launch takes.
        """
        self._forget_old(now_s)
        for queue in list(self._waiting):
            waiting, replica = self._waiting[queue], queue.keeper or queue.owner.group.idle(now_s)
            if replica is None or replica.pending_s:
                continue
            fit, weight = _fitting(queue, waiting)
            is_full = fit < len(waiting) or weight >= queue.stage.room
            if not is_full and waiting[0].since_s > now_s - ALONE_AFTER_S:
                continue
            if 0.0 < (cost_s := queue.stage.seconds(weight)) <= self._allowed_s:
                self.pay(cost_s)
                yield self._lanes[queue], queue, replica, [self._take(queue) for _ in range(fit)]

    def forget(self, lost: Callable[[Queue], bool] = lambda queue: True) -> None:
        """Give up the shadows of these queues."""
        for queue in [each for each in self._waiting if lost(each)]:
            while queue in self._waiting:
                self._take(queue).place = NOWHERE

    def _forget_old(self, now_s: float) -> None:
        for queue in list(self._waiting):
            while (waiting := self._waiting.get(queue)) and waiting[0].since_s <= now_s - OLDEST_S:
                self._take(queue).place = NOWHERE

    def _take(self, queue: Queue) -> Ticket:
        waiting = self._waiting[queue]
        ticket = waiting.popleft().ticket
        if not waiting:
            del self._waiting[queue], self._lanes[queue]
        self._count -= 1
        return ticket


def _agree(one: object, other: object, chance: Callable[[], float]) -> bool:
    """Whether two answers to an input are the same; where each word is answered, those to one that is drawn."""
    if isinstance(one, tuple) and isinstance(other, tuple) and one:
        word = int(chance() * len(one))
        return bool(one[word] == other[word])
    return one == other


def _fitting(queue: Queue, waiting: deque[_Waiting]) -> tuple[int, int]:
    """How many of the first have room in one launch, and what they weigh; one always has."""
    fit = weight = 0
    for each in waiting:
        heavier = weight + (1 if queue.stage.length is None else each.ticket.weight)
        if fit and heavier > queue.stage.room:
            break
        fit, weight = fit + 1, heavier
    return fit, weight
