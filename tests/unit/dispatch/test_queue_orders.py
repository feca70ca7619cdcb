"""Orders of a queue: which of the inputs that wait a launch takes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.messages import Limits, Outcome, Place
from isobatch.deployments.dispatch.queue_orders import QUEUE_ORDERS, queue_order_named
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.profiles.errors import UserError
from tests.helpers.dispatcher_world import Input, World, linear

TEXTS = Route((Stage(0, 1, 2, "gpu", (0.01, 0.02), length=10),))


def waiting(weights: list[int], chance: random.Random) -> list[Ticket]:
    tickets = [Ticket(number, chance.random(), Place(None, 0), weight) for number, weight in enumerate(weights)]
    for ticket in tickets:
        ticket.priority = chance.randint(-2, 2)
    return sorted(tickets, key=lambda ticket: ticket.deadline_s)


@given(
    st.sampled_from(sorted(QUEUE_ORDERS)), st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_an_order_fits_and_repeats_no_input(name: str, weights: list[int], room: int, chance: random.Random) -> None:
    order, tickets = queue_order_named(name), waiting(weights, chance)
    assert order is not None
    taken = order(tickets, room)
    assert set(taken) <= set(tickets)
    assert len(set(taken)) == len(taken)
    assert len(taken) == 1 or sum(ticket.weight for ticket in taken) <= room
    assert taken or all(weight > room for weight in weights)
    if sum(weights) <= room and name != "slotted_das":
        assert len(taken) == len(tickets), "all fit"


@given(
    st.sampled_from(sorted(QUEUE_ORDERS)),
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 25), st.floats(0.02, 0.5)), min_size=1, max_size=30),
)
@settings(max_examples=30, deadline=None)
def test_every_input_ends_once_in_any_order(name: str, inputs: list[tuple[float, int, float]]) -> None:
    """Also one that is heavier than a launch, which goes alone."""
    world = AnyOrder(TEXTS, {"gpu": ["g"]}, Limits(queue_order=queue_order_named(name)))
    world.arrive(*(Input(at_s, 1, slack_s, weight) for at_s, weight, slack_s in sorted(inputs)))
    world.run()
    assert len(world.outcomes) + len(world.refusals) == len(inputs)
    assert set(world.outcomes.values()) <= {Outcome.ANSWERED, Outcome.EXPIRED}
    assert world.dispatcher.inside == 0


class AnyOrder(World):
    """A world that does not check that launches are in order of their deadlines."""

    def _check(self, launch):  # type: ignore[no-untyped-def]
        assert launch.weight <= launch.room or len(launch.tickets) == 1
        self.running[launch.replica].add(launch.id)


def test_the_highest_priority_goes_first() -> None:
    one_by_one = Route((linear(0, 1, 1, "gpu"),))
    world = World(one_by_one, {"gpu": ["g"]}, Limits(queue_order=queue_order_named("priority"), ahead=0))
    dispatcher = world.dispatcher
    first = dispatcher.admit(0.0, 9.0, Place("first", 0))
    (launch,) = dispatcher.tick(0.0)
    assert launch.tickets == (first,)
    others = [dispatcher.admit(0.0, 9.0, Place(number, 0)) for number in range(3)]
    assert all(isinstance(ticket, Ticket) for ticket in others)
    others[2].priority, others[1].priority = 5, 1  # type: ignore[union-attr]
    order = []
    for _ in others:
        dispatcher.completed(launch.id, 0.01, {})
        (launch,) = dispatcher.tick(0.01)
        order += launch.tickets
    assert order == [others[2], others[1], others[0]]


def test_a_text_of_the_highest_priority_goes_before_others_though_it_is_heavier_than_any_launch() -> None:
    """Lighter texts, which come all the time, would otherwise always go before it, until its deadline has passed."""
    world = AnyOrder(TEXTS, {"gpu": ["g"]}, Limits(queue_order=queue_order_named("priority"), ahead=0))
    dispatcher = world.dispatcher
    dispatcher.admit(0.0, 9.0, Place("running", 0), 20)
    (launch,) = dispatcher.tick(0.0)
    heavy, *light = [dispatcher.admit(0.0, 9.0, Place(weight, 0), weight) for weight in (25, 10, 10)]
    assert isinstance(heavy, Ticket)
    heavy.priority = 5
    order = []
    for now_s in (0.01, 0.02):
        dispatcher.completed(launch.id, now_s, {})
        (launch,) = dispatcher.tick(now_s)
        order.append(list(launch.tickets))
    assert order == [[heavy], light]


@pytest.mark.parametrize("order", ["das", "slotted_das"])
def test_by_utility_a_text_that_is_heavier_than_any_launch_goes_alone_when_it_is_due_first(order: str) -> None:
    world = AnyOrder(TEXTS, {"gpu": ["g"]}, Limits(queue_order=queue_order_named(order), ahead=0))
    dispatcher = world.dispatcher
    dispatcher.admit(0.0, 9.0, Place("running", 0), 20)
    (launch,) = dispatcher.tick(0.0)
    heavy, *light = [
        dispatcher.admit(0.0, 8.0 + weight / 100, Place(weight, 0), 35 - weight) for weight in (10, 25, 26)
    ]
    dispatcher.completed(launch.id, 0.01, {})
    (launch,) = dispatcher.tick(0.01)
    assert launch.tickets == (heavy,)
    dispatcher.completed(launch.id, 0.02, {})
    (launch,) = dispatcher.tick(0.02)
    assert {*launch.tickets} == {*light}


def test_orders_have_names_in_the_configuration() -> None:
    config = AppConfig(model="demo", order="das")
    assert config.limits(1.0).queue_order is queue_order_named("das")
    assert replace(config.limits(1.0), queue_order=None) == AppConfig(model="demo").limits(1.0)
    with pytest.raises(UserError, match="'my_module:shortest' cannot be imported"):
        queue_order_named("my_module:shortest")


STRANGER = Ticket(99, 9.0, Place(None, 0))


WRONG = {
    "fails": lambda first: 1 / 0,
    "an input twice": lambda first: [first, first],
    "another input": lambda first: [STRANGER],
    "nested lists": lambda first: [[first]],
}


@pytest.mark.parametrize("chosen", WRONG.values(), ids=WRONG)
def test_an_order_that_fails_or_names_wrong_inputs_loses_no_input(chosen: Callable[[Ticket], Any]) -> None:
    def order(waiting: Sequence[Ticket], room: int) -> list[Ticket]:
        wrong: list[Ticket] = chosen(waiting[0])
        return wrong

    world = AnyOrder(TEXTS, {"gpu": ["g"]}, Limits(queue_order=order))
    world.arrive(*(Input(0.0, 1, 9.0, weight=10) for _ in range(3)))
    world.run()
    assert list(world.outcomes.values()) == 3 * [Outcome.ANSWERED]
    assert world.dispatcher.inside == 0


def popping(waiting: list[Ticket], room: int) -> list[Ticket]:
    """An order that takes its choice out of the list."""
    return [waiting.pop()]


def clearing(waiting: list[Ticket], room: int) -> None:
    """An order that forgets to return its choice."""
    waiting.clear()


@pytest.mark.parametrize("own", [popping, clearing])
def test_an_order_that_changes_the_list_it_gets_loses_no_input(own: Callable[..., object]) -> None:
    world = AnyOrder(TEXTS, {"gpu": ["g"]}, Limits(queue_order=queue_order_named(f"{__name__}:{own.__name__}")))
    world.arrive(*(Input(0.0, 1, 9.0, weight=10) for _ in range(3)))
    world.run()
    assert list(world.outcomes.values()) == 3 * [Outcome.ANSWERED]
    assert world.dispatcher.inside == 0
