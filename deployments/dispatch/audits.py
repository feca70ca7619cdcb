"""Shadows: audited inputs that have their answer and run on to the end, to compare it with the full network's answer.

They wait in queues of their own, so that they change no promise, deadline or decision, and fill empty places of
launches. Their cost is paid from an allowance, a share of the seconds that replicas compute; it is zero if a launch
takes no longer with them. The allowance also pays for launches of shadows alone, on idle replicas. No client waits for
a shadow, so it is dropped after a failure.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from isobatch.deployments.dispatch.batching import Queue, Ticket
from isobatch.deployments.dispatch.groups import Replica
from isobatch.deployments.dispatch.lanes import Lane
from isobatch.deployments.dispatch.messages import NOWHERE, Audit, Launch, Limits, RowKind

# Shadows that wait at once, and the longest time that one waits: meanwhile the output of its launch stays in memory. If
# there are more, the oldest is dropped.
MOST_SHADOWS = 64
OLDEST_S = 5.0
# The time that shadows wait for other inputs to join, before they are launched alone. A full launch does not wait.
ALONE_AFTER_S = 1.0
MOST_ALLOWED_S = 1.0  # the largest allowance that is saved up: seconds of compute
ROUNDING_S = 1e-12  # a launch that takes longer by less than this counts as taking the same time (rounding)


class _Shadow(NamedTuple):
    since_s: float
    ticket: Ticket
    lane: Lane


class Audits:
    """The shadows of one dispatcher. `chance` returns random numbers from 0 to 1, to choose audited inputs."""

    def __init__(self, limits: Limits, chance: Callable[[], float], num_blocks: int) -> None:
        self.limits, self._chance, self._num_blocks = limits, chance, num_blocks
        self._by_queue: dict[Queue, deque[_Shadow]] = {}  # by the queue of other inputs for the same launches
        self.waiting = 0  # the number of shadows that wait
        self._allowed_s = 0.0
        self._finished: list[Audit] = []

    def draw(self, ticket: Ticket) -> None:
        """Decide whether a new input is audited."""
        if self.limits.answers_early:
            ticket.kind = RowKind.EARLY
        elif self._chance() < self.limits.audit_share:
            ticket.kind = RowKind.AUDITED

    # The cost of shadows

    def earn(self, computed_s: float) -> None:
        """Raise the allowance by the share of these seconds of compute."""
        self._allowed_s = min(MOST_ALLOWED_S, self._allowed_s + self.limits.audit_cost * computed_s)

    def kinds(self, tickets: list[Ticket], crowded: bool = False) -> bytes:
        """The kinds of a launch's inputs. Audited inputs become plain ones while the allowance is overdrawn.

        `crowded`: other inputs wait for the replica. With early answers, most inputs then leave with their answer to
        make room: only `audit_share` of them run on.
        """
        if crowded and self.limits.answers_early:
            for ticket in tickets:
                if ticket.kind is RowKind.EARLY and self._chance() >= self.limits.audit_share:
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

    # The life of a shadow

    def record(self, ticket: Ticket, block: int, label: object, launch: Launch) -> None:
        """Record the network's answer to an input: an audited one becomes a shadow, a shadow at the end is compared."""
        is_full = block + 1 == launch.stop and launch.stop == self._num_blocks
        if ticket.early_answer and is_full:
            early_block, early_label = ticket.early_answer
            agrees = _agree(early_label, label, self._chance, self.limits.tolerance)
            self._finished.append(Audit(early_block, agrees))
        elif ticket.kind in (RowKind.AUDITED, RowKind.EARLY) and not ticket.ended and not is_full:
            if ticket.kind is RowKind.AUDITED:
                # A new shadow pays for the rest of the launch in which it was answered.
                stage = launch.queue.stage
                self._allowed_s -= stage.staying_s(launch.weight, stage.counted(ticket.weight), behind=block)
            ticket.early_answer, ticket.kind = (block, label), RowKind.SHADOW

    def stop_auditing(self, tickets: Sequence[Ticket]) -> bool:
        """Stop the audits of these inputs; returns whether there were any. With early answers, all inputs run on."""
        if self.limits.answers_early:
            return False
        audited = [ticket for ticket in tickets if ticket.kind in (RowKind.AUDITED, RowKind.SHADOW)]
        for ticket in audited:
            ticket.kind, ticket.early_answer = RowKind.PLAIN, None
        return bool(audited)

    def finished(self) -> list[Audit]:
        """The audits that have finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, lane: Lane, tickets: list[Ticket], now_s: float) -> None:
        self._give_up_old(now_s)
        for ticket in tickets:
            if self.waiting == MOST_SHADOWS:
                longest = min(self._by_queue, key=lambda queue: self._by_queue[queue][0].since_s)
                self._take(longest).place = NOWHERE
            ticket.origin = NOWHERE
            queue = lane.queue(ticket.cursor, ticket.kept_by)
            if (
                queue.stage.local and ticket.kept_by and queue.only_replica is None
            ):  # its replica left the group meanwhile
                ticket.place = NOWHERE
                continue
            self._by_queue.setdefault(queue, deque()).append(_Shadow(now_s, ticket, lane))
            self.waiting += 1

    def take_joining(self, queue: Queue, weight: int) -> list[Ticket]:
        """Take shadows for the empty places of a launch of this weight, if they cost nothing or can be paid for."""
        waiting, joining, stage = self._by_queue.get(queue), list[Ticket](), queue.stage
        while waiting:
            heavier = weight + stage.counted(waiting[0].ticket.weight)
            if heavier > stage.room:
                break
            cost_s = stage.staying_s(heavier, heavier - weight)
            if cost_s > ROUNDING_S and cost_s > self._allowed_s:
                break
            self._allowed_s -= cost_s
            joining.append(self._take(queue))
            weight, waiting = heavier, self._by_queue.get(queue)
        return joining

    def take_alone(self, now_s: float) -> Iterator[tuple[Lane, Queue, Replica, list[Ticket]]]:
        """Take launches of shadows alone, for idle replicas: shadows that have waited for long, or fill a launch.

        Without planned times there are none, since their cost is unknown.
        """
        self._give_up_old(now_s)
        for queue in list(self._by_queue):
            waiting, replica = self._by_queue[queue], queue.only_replica or queue.owner.group.idle(now_s)
            if replica is None or replica.pending_s:
                continue
            count, weight = _fitting(queue, waiting)
            is_full = count < len(waiting) or weight >= queue.stage.room
            if not is_full and now_s < waiting[0].since_s + ALONE_AFTER_S:
                continue
            if 0.0 < (cost_s := queue.stage.staying_s(weight, weight)) <= self._allowed_s:
                self._allowed_s -= cost_s
                yield waiting[0].lane, queue, replica, [self._take(queue) for _ in range(count)]

    def due_s(self, now_s: float) -> float:
        """When the next shadows have waited long enough to be launched alone; inf: all have, or none waits."""
        dues_s = (waiting[0].since_s + ALONE_AFTER_S for waiting in self._by_queue.values())
        return min((due_s for due_s in dues_s if due_s > now_s), default=inf)

    def forget(self, lost: Callable[[Queue], bool] = lambda queue: True) -> None:
        """Drop the shadows of these queues."""
        for queue in [queue for queue in self._by_queue if lost(queue)]:
            while queue in self._by_queue:
                self._take(queue).place = NOWHERE

    def _give_up_old(self, now_s: float) -> None:
        for queue in list(self._by_queue):
            while (waiting := self._by_queue.get(queue)) and waiting[0].since_s <= now_s - OLDEST_S:
                self._take(queue).place = NOWHERE

    def _take(self, queue: Queue) -> Ticket:
        waiting = self._by_queue[queue]
        ticket = waiting.popleft().ticket
        if not waiting:
            del self._by_queue[queue]
        self.waiting -= 1
        return ticket


def _agree(first: object, second: object, chance: Callable[[], float], tolerance: float) -> bool:
    """Whether two answers to an input are the same. Where an input has several, one at random is compared."""
    if isinstance(first, float | complex) and isinstance(second, float | complex):
        return abs(first - second) <= tolerance
    if isinstance(first, tuple) and isinstance(second, tuple) and first:
        part = int(chance() * len(first))
        return _agree(first[part], second[part], chance, tolerance)
    return first == second


def _fitting(queue: Queue, waiting: deque[_Shadow]) -> tuple[int, int]:
    """The number of first shadows that fit into one launch (at least one), and their weight."""
    count = weight = 0
    for shadow in waiting:
        heavier = weight + queue.stage.counted(shadow.ticket.weight)
        if count and heavier > queue.stage.room:
            break
        count, weight = count + 1, heavier
    return count, weight
