"""TCB's systems in our dispatcher: the product's queue orders (dispatch/queue_orders.py) for rows, without refusals.

The paper's utility of a text is 1 / tokens. It has no admission: a text that is not launched in time has failed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from isobatch.deployments.dispatch.batching import Queue, QueueOrder, StageQueues, Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits, Place, Refusal
from isobatch.deployments.dispatch.queue_orders import fitting
from isobatch.deployments.dispatch.route import Route


class Arrival(NamedTuple):
    arrived_s: float
    deadline_s: float


class DeadlineDispatcher(Dispatcher):
    """Inputs have their own deadlines; those that would be late are refused."""

    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        return super().admit(now_s, place.payload.deadline_s, place, weight, full)


class OrderedDispatcher(Dispatcher):
    """Its one queue has another order, and no input is refused.

    Inputs are dropped that would be late after a launch of `launch_s`; with 0 only late ones, as in the paper.
    """

    def __init__(
        self,
        route: Route,
        groups: Mapping[str, Collection[str]],
        limits: Limits,
        order: QueueOrder,
        launch_s: float = 0.0,
    ) -> None:
        super().__init__(route, groups, replace(limits, queue_order=order))
        (self._lane,) = self._lanes
        stage = self._lane.stages[0]
        stage.shared[0, 0] = self._lane.entry = _DroppingQueue(stage, launch_s)

    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        expected = self._lane.expected(now_s, weight)
        return self._add(self._lane, expected, place.payload.deadline_s, place, weight, full)


class _DroppingQueue(Queue):
    def __init__(self, owner: StageQueues, launch_s: float) -> None:
        super().__init__(owner, 0, owner.stage.room)
        self._launch_s = launch_s

    def take_late(self, now_s: float) -> list[Ticket]:
        late = []
        while (first := self.first()) and first.deadline_s < now_s + self._launch_s:
            late += self.take_first(1)
        return late


def first_come(most: int) -> QueueOrder:
    """This number of texts, in order of arrival."""
    return lambda waiting, room: sorted(waiting, key=lambda ticket: ticket.id)[:most]


def sorted_by(order: Callable[[Ticket], float]) -> QueueOrder:
    return lambda waiting, room: fitting(sorted(waiting, key=order), room)


def in_rows(order: QueueOrder, rows: int, length: int, most: int | None = None) -> QueueOrder:
    """Rows of one length in tokens, filled in an order; or a number of texts with a row each."""

    def choose(waiting: Sequence[Ticket], room: int) -> list[Ticket]:
        left, taken = list(waiting), list[Ticket]()
        for _ in range(rows):
            row = order(left, length)
            going = set(row)
            left = [ticket for ticket in left if ticket not in going]
            taken += row
            if most and len(taken) >= most:
                return taken[:most]
        return taken

    return choose


SHORTEST = sorted_by(lambda ticket: ticket.weight)
EARLIEST = sorted_by(lambda ticket: ticket.deadline_s)
FIRST = sorted_by(lambda ticket: ticket.id)
