"""Inputs with weights: launches have room for a total weight."""

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.dispatch.batching import Queue, Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.groups import Group
from isobatch.deployments.dispatch.lanes import MAX_LATE, Lane
from isobatch.deployments.dispatch.messages import Limits, Place, Refusal
from isobatch.deployments.dispatch.route import Route
from tests.helpers.dispatcher_world import Input, World, linear

LENGTH = 10
TEXTS = Route((linear(0, 4, 4, "a", length=LENGTH), linear(4, 8, 4, "b", survival=0.5, length=LENGTH)))
weights = st.lists(st.integers(1, 70), min_size=1, max_size=40)  # a launch has room for 40


def queue_of(tickets: list[Ticket], route: Route = TEXTS) -> Queue:
    lane = Lane(route, {name: Group(name, Limits()) for name in route.groups}, Limits())
    for ticket in tickets:
        lane.entry.add(ticket)
    return lane.entry


@given(weights, st.randoms(use_true_random=False))
def test_a_launch_takes_the_earliest_deadline_then_what_fits(heavy: list[int], chance: random.Random) -> None:
    """Nothing fits beside an input that is too heavy for any launch."""
    tickets = [Ticket(number, chance.random(), Place(None, 0), weight) for number, weight in enumerate(heavy)]
    queue, waiting = queue_of(tickets), sorted(tickets, key=lambda ticket: ticket.deadline_s)
    while waiting:
        assert (queue.size, queue.weight) == (len(waiting), sum(ticket.weight for ticket in waiting))
        first, *others = waiting
        left, expected = 40 - first.weight, [first]
        for ticket in others:
            if ticket.weight <= left:
                expected.append(ticket)
                left -= ticket.weight
        assert queue.take(40) == expected
        waiting = [ticket for ticket in waiting if ticket not in expected]
    group = queue.owner.group
    assert (queue.size, queue.weight, queue.owner.waiting) == (0, 0, 0)
    assert group.owed_s == pytest.approx(0.0, abs=1e-12)


def texts(seed: int, count: int, rate: float, heavy: int = 70) -> list[Input]:
    chance, at_s, calls = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate)
        calls.append(Input(at_s, chance.choice((4, 8)), chance.uniform(0.05, 0.5), chance.randint(1, heavy)))
    return calls


@given(st.integers(0, 10_000), st.floats(20, 2000))
@settings(max_examples=25, deadline=None)
def test_no_launch_exceeds_its_room_and_every_input_ends(seed: int, rate: float) -> None:
    """`World` checks every launch."""
    world = World(TEXTS, {"a": ["a0", "a1"], "b": ["b0"]}, fails=lambda launch: launch.id % 31 == 7)
    world.arrive(*texts(seed, 300, rate))
    world.run()
    assert len(world.outcomes) + len(world.refusals) == 300
    assert world.dispatcher.inside == 0
    assert all(group.owed_s == pytest.approx(0.0, abs=1e-9) for group in world.dispatcher._groups.values())


@pytest.mark.parametrize("length", [None, LENGTH])
def test_after_an_error_launches_have_as_many_inputs_whether_these_have_lengths_or_not(length: int | None) -> None:
    dispatcher = Dispatcher(Route((linear(0, 8, 16, "a", length=length),)), {"a": ["a0"]}, Limits(ahead=0))
    dispatcher.admit_all(0.0, 9.0, [Place("breaks", row) for row in range(16)], [LENGTH] * 16)
    sizes = list[int]()
    while launches := dispatcher.tick(0.0):
        sizes += [len(launch.tickets) for launch in launches]
        dispatcher.failed(launches[0].id, 0.0, "it broke")
    assert sizes == [16] + 4 * [4] + 16 * [1]


def test_admitted_inputs_are_in_time_at_twice_the_load() -> None:
    in_time: list[bool] = []
    for seed in (3, 4):
        world = World(TEXTS, {"a": ["a0"], "b": ["b0"]})
        world.arrive(*texts(seed, 2000, 2 * 4 * LENGTH / 0.01 / 20, heavy=40))
        world.run()
        assert len(world.outcomes) >= 700
        in_time += [world.ended_s[ticket] <= world.deadlines[ticket] for ticket in world.outcomes]
    assert sum(in_time) >= (1 - MAX_LATE) * len(in_time)


def test_heavy_inputs_do_not_starve_in_a_flood_of_light_ones() -> None:
    """Whoever has waited longest goes next, however badly it fits."""
    world = World(TEXTS, {"a": ["a0"], "b": ["b0"]})
    light = [Input(0.001 * number, 4, 2.0, 3) for number in range(800)]
    world.arrive(*light, *(Input(0.01 * number, 4, 2.0, 39) for number in range(30)))
    world.run()
    assert not world.refusals
    waits_s = {ticket: world.ended_s[ticket] - world.admitted_s[ticket] for ticket in world.outcomes}
    heavy = max(seconds for ticket, seconds in waits_s.items() if world.weights[ticket] == 39)
    assert heavy <= 1.5 * max(seconds for ticket, seconds in waits_s.items() if world.weights[ticket] == 3)


def test_a_request_is_weighed_as_a_whole() -> None:
    dispatcher = Dispatcher(TEXTS, {"a": ["a0"], "b": ["b0"]})
    assert dispatcher.needed_s(0.0, inf, 400) > 3 * dispatcher.needed_s(0.0, inf, 40)
    places = [Place(None, row) for row in range(10)]
    needed_s = dispatcher.needed_s(0.0, inf, 400) * 1.2
    dispatcher.admit(0.0, 10.0, places[0], 5)
    assert isinstance(dispatcher.admit_all(0.0, 0.8 * needed_s, places, [40] * 10), Refusal)
    assert not isinstance(dispatcher.admit_all(0.0, 0.8 * needed_s, places, [4] * 10), Refusal)


def test_the_place_of_a_heavy_text_in_its_request_does_not_matter() -> None:
    """Ten launches' time for one text: it would be late wherever it stands, and the others be computed in vain."""
    eight = {"a": [f"a{number}" for number in range(8)], "b": ["b0"]}
    for weights in ([400, 1], [1, 400], [1, 400, 1]):
        dispatcher = Dispatcher(TEXTS, eight)
        refused = dispatcher.admit_all(0.0, 0.05, [Place(None, row) for row in range(len(weights))], weights)
        assert isinstance(refused, Refusal), weights
    light = Dispatcher(TEXTS, eight)
    assert isinstance(light.admit_all(0.0, 0.05, [Place(None, row) for row in range(3)], [1, 40, 1]), list)


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_a_plan_with_other_weights_can_take_over(seed: int) -> None:
    alike = Route(tuple(replace(stage, length=None) for stage in TEXTS.stages))
    groups = {"a": ["a0"], "b": ["b0"]}
    for first, second in ((TEXTS, alike), (alike, TEXTS)):
        world = World(first, groups)
        world.arrive(*(replace(each, weight=each.weight if first is TEXTS else 1) for each in texts(seed, 200, 900)))
        world.at(0.05, lambda world=world, second=second: world.reroute(second, groups))
        world.at(0.15, lambda world=world, first=first: world.reroute(first, groups))
        world.run()
        assert len(world.outcomes) + len(world.refusals) == 200
        assert all(group.owed_s == pytest.approx(0.0, abs=1e-9) for group in world.dispatcher._groups.values())
