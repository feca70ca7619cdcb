"""Queue orders: which waiting inputs a launch takes. Named by import path, as exit policies are.

A queue order is a function of the inputs that wait, the earliest deadline first, and of the room of the launch, in
weight. It returns the inputs that go. If it returns none, the first input goes alone. Your own may be anywhere on the
import path. The default is by deadline, which admission assumes: with another order, admitted inputs may be late.

DAS and slotted DAS are those of TCB (Fu et al., SC 2022): the utility of a text is 1 / its tokens, so short texts go
first (half of the inputs that fit), then by deadline those that are nearly as useful.
"""

from collections.abc import Sequence
from functools import cache, partial
from operator import attrgetter

from isobatch.deployments.dispatch.batching import QueueOrder, Ticket
from isobatch.deployments.named import function_at, path_of

DEADLINE = "deadline"
QUEUE_ORDERS = {
    name: f"isobatch.deployments.dispatch.queue_orders:{name}" for name in ("priority", "das", "slotted_das")
}
BY_UTILITY = 0.5  # of the inputs that fit, the share that goes by utility alone
USEFUL = 0.5  # the share of their mean utility that an input needs to go by deadline
_weight = attrgetter("weight")


def queue_order_path(name: str) -> str:
    """The import path of an order; empty for the order by deadline.

    >>> queue_order_path("deadline"), queue_order_path("das"), queue_order_path("my_package.my_module:shortest")
    ('', 'isobatch.deployments.dispatch.queue_orders:das', 'my_package.my_module:shortest')
    """
    return "" if name == DEADLINE else path_of(name, QUEUE_ORDERS, "order", DEADLINE)


@cache
def queue_order_named(name: str) -> QueueOrder | None:
    """The order of this name or import path; None: by deadline."""
    path = queue_order_path(name)
    return partial(_of_a_copy, function_at(path)) if path else None


def _of_a_copy(order: QueueOrder, waiting: Sequence[Ticket], room: int) -> list[Ticket]:
    """The choice of an order, which gets a copy: it may sort the list or take inputs out of it."""
    return list(order(list(waiting), room))


def priority(waiting: Sequence[Ticket], room: int) -> list[Ticket]:
    """The highest priority first, and inputs of one priority by deadline. If the first is too heavy for any launch, it
    goes alone: otherwise lighter inputs of lower priorities would always go before it."""
    ordered = sorted(waiting, key=lambda ticket: -ticket.priority)
    return _alone(ordered, room) or fitting(ordered, room)


def das(waiting: Sequence[Ticket], room: int) -> list[Ticket]:
    """DAS for one row of tokens: a launch without padding is one row. A text that is too heavy for any row goes alone
    once it is the first."""
    return _alone(waiting, room) or _das_row(sorted(waiting, key=_weight), waiting, room)


def slotted_das(waiting: Sequence[Ticket], room: int) -> list[Ticket]:
    """Slotted DAS: the row is cut into slots as long as the longest text that goes by utility, and DAS fills each.
    A text that is too heavy for any row goes alone once it is the first."""
    if alone := _alone(waiting, room):
        return alone
    left = sorted(waiting, key=_weight)
    length = max((ticket.weight for ticket in _by_utility(left, room)), default=room)
    taken = list[Ticket]()
    for _ in range(max(1, room // length)):
        gone = set(taken)
        by_weight = [ticket for ticket in left if ticket not in gone and ticket.weight <= length]
        taken += _das_row(by_weight, [ticket for ticket in waiting if ticket not in gone], length)
    return taken


def _alone(waiting: Sequence[Ticket], room: int) -> list[Ticket]:
    """The first input, if it is too heavy for any launch; otherwise none."""
    return [waiting[0]] if waiting and waiting[0].weight > room else []


def _das_row(by_weight: Sequence[Ticket], by_deadline: Sequence[Ticket], room: int) -> list[Ticket]:
    """One row: first the most useful inputs, then useful ones by deadline, then others by deadline."""
    first = _by_utility(by_weight, room)
    if not first or len(first) == len(by_weight):
        return first
    going = set(first)
    heaviest = 1 / (USEFUL * sum(1 / ticket.weight for ticket in first) / len(first))
    others = [ticket for ticket in by_deadline if ticket not in going]
    room -= sum(map(_weight, first))
    useful = fitting([ticket for ticket in others if ticket.weight <= heaviest], room)
    room -= sum(map(_weight, useful))
    return first + useful + fitting([ticket for ticket in others if ticket.weight > heaviest], room)


def _by_utility(by_weight: Sequence[Ticket], room: int) -> list[Ticket]:
    """The lightest inputs that fit: all of them if every input fits, else the share `BY_UTILITY`."""
    fits = fitting(by_weight, room)
    return fits if len(fits) == len(by_weight) or not fits else fits[: max(1, int(BY_UTILITY * len(fits)))]


def fitting(tickets: Sequence[Ticket], room: int) -> list[Ticket]:
    """The inputs that fit into the room, in this order; one that does not fit is skipped."""
    taken = []
    for ticket in tickets:
        if ticket.weight <= room:
            taken.append(ticket)
            room -= ticket.weight
        if room <= 0:
            break
    return taken
