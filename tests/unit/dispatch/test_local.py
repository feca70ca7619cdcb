"""Local stages: survivors stay on the replica that computed them, and begin again when it goes."""

from collections import Counter
from random import Random
from statistics import mean

import pytest

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Fault, Launch, Limits, Outcome, Place
from isobatch.deployments.dispatch.route import Route
from isobatch.optimizer.model.limits import BEFORE, KEPT
from tests.helpers.dispatcher_world import Input, World, linear

LOCAL = Route((linear(0, 6, 8, "gpu"), linear(6, 12, 8, "gpu", survival=0.5, local=True)))
APART = Route((linear(0, 6, 8, "gpu"), linear(6, 12, 8, "more", survival=0.5)))
GPUS = {"gpu": ["g1", "g2", "g3"]}


def one_launch(dispatcher: Dispatcher, now_s: float) -> Launch:
    (launch,) = dispatcher.tick(now_s)
    return launch


def kept(*replicas: str, ahead: int = 1) -> tuple[Dispatcher, Launch]:
    """An input has passed the first split, and the launch after which its replica keeps it."""
    dispatcher = Dispatcher(LOCAL, {"gpu": replicas}, Limits(ahead=ahead))
    dispatcher.admit(0.0, 1.0, Place("input", 0))
    first = one_launch(dispatcher, 0.0)
    dispatcher.completed(first.id, 0.01, {0: Place("kept", 0)})
    return dispatcher, first


def test_survivors_stay_on_their_replica_in_full_batches_under_load() -> None:
    world = World(LOCAL, GPUS)
    capacity = 3 * 8 / (0.01 + 0.5 * 0.01)
    world.arrive(*(Input(i / (0.95 * capacity), (4, 12)[i % 2], 1.0) for i in range(3000)))
    world.run()  # it checks that no launch takes from another replica what is kept
    warm = [launch for launch in world.launches if launch.id > 50]
    assert all(launch.keep == (launch.cursor == 0) for launch in world.launches)
    assert mean(len(launch.tickets) for launch in warm if launch.cursor == 6) > 7
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}


@pytest.mark.parametrize(
    ("per_s", "deep", "planned"),
    [(500.0, 0.1, 0.1), (1300.0, 0.04, 0.04)],
    ids=["a third of the capacity", "few survivors"],
)
def test_survivors_do_not_wait_until_they_are_late_while_launches_are_sent_early(
    per_s: float, deep: float, planned: float
) -> None:
    """A replica that computes has its next launch already, so it is never without one."""
    route = Route((linear(0, 6, 16, "gpu"), linear(6, 12, 16, "gpu", survival=planned, local=True)))
    world = World(route, {"gpu": ["g1"]}, Limits(early_s=0.0015))
    every = round(1 / deep)
    world.arrive(*(Input(number / per_s, 12 if number % every == 0 else 4, 0.1) for number in range(2000)))
    world.run()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert len(world.refusals) < 0.02 * 2000


def test_while_two_full_batches_are_inside_a_replica_holds_its_next_order_before_a_launch_ends() -> None:
    """Only where a single batch is inside does its next split wait for the front."""
    for batches, never_waits in ((1, False), (2, True), (3, True)):
        dispatcher = Dispatcher(LOCAL, {"gpu": ["g1"]})
        for number in range(batches * 8):
            dispatcher.admit(0.0, 1e3, Place(number, 0))
        running, now_s, waits = dispatcher.tick(0.0), 0.0, list[bool]()
        while len(waits) < 20:
            launch, now_s = running.pop(0), now_s + 0.01
            waits.append(not running)
            places = {row: Place(launch.id, row) for row in range(len(launch.tickets))} if launch.stop < 12 else {}
            dispatcher.completed(launch.id, now_s, places)
            for ending in dispatcher.endings():  # each answer brings another input
                for ticket in ending.tickets:
                    dispatcher.admit(now_s, 1e6, Place(ticket.id, 0))
            running += dispatcher.tick(now_s)
        assert any(waits) is not never_waits


@pytest.mark.parametrize("batches", [(16, 1), (1, 16), (8, 8), (5, 3), (3, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_no_more_waits_on_a_replica_than_the_planner_counts(batches: tuple[int, int], seed: int) -> None:
    """In full batches: what survived a launch together stays until the last of it is gone."""
    first, second = batches
    route = Route((linear(0, 6, first, "gpu"), linear(6, 12, second, "gpu", survival=0.7, local=True)))
    dispatcher, random, most, now_s = Dispatcher(route, {"gpu": ["g1"]}), Random(seed), 0, 0.0
    running, inside, held = list[Launch](), dict[int, int](), dict[int, int]()  # the launch that an input survived
    for number in range(5 * (first + second)):
        dispatcher.admit(0.0, 1e3, Place(number, 0))
    for _ in range(400):
        running += dispatcher.tick(now_s)
        launch, now_s = running.pop(0), now_s + 0.01
        rows = [row for row in range(len(launch.tickets)) if launch.keep and random.random() < 0.7]
        for ticket in launch.tickets:
            inside.pop(ticket.id, None)
        inside |= {launch.tickets[row].id: launch.id for row in rows}
        held[launch.id] = len(rows)
        most = max(most, sum(held[each] for each in {*inside.values()}))
        dispatcher.completed(launch.id, now_s, {row: Place(launch.id, row) for row in rows})
        for ending in dispatcher.endings():  # each answer brings another input
            for ticket in ending.tickets:
                dispatcher.admit(now_s, now_s + 1e3, Place(ticket.id, 0))
    assert 0 < most <= KEPT * first + (BEFORE - 1) * second


def test_inputs_whose_state_went_with_a_replica_begin_again() -> None:
    dispatcher = Dispatcher(APART, {"gpu": ["g1"], "more": ["m1"]})
    ticket = dispatcher.admit(0.0, 1.0, Place("input", 0))
    dispatcher.completed(one_launch(dispatcher, 0.0).id, 0.01, {0: Place("survivor", 0)})
    dispatcher.failed(one_launch(dispatcher, 0.01).id, 0.02, "gone", lost=True)
    again = one_launch(dispatcher, 0.02)
    assert (again.cursor, again.tickets, again.places) == (0, (ticket,), (Place("input", 0),))


def test_inputs_kept_by_a_lost_replica_begin_again_on_another() -> None:
    dispatcher, first = kept("g1", "g2")
    dispatcher.failed(one_launch(dispatcher, 0.01).id, 0.02, "gone", lost=True)
    again = one_launch(dispatcher, 0.02)
    assert (again.cursor, {first.replica, again.replica}) == (0, {"g1", "g2"})


def test_a_replica_that_reports_a_loss_is_not_benched() -> None:
    dispatcher = Dispatcher(Route((linear(0, 12, 1, "gpu"),)), {"gpu": ["g1", "g2"]})
    for _ in range(2):
        dispatcher.admit(0.0, 1.0, Place("input", 0))
    for launch in dispatcher.tick(0.0):
        dispatcher.failed(launch.id, 0.01, "somebody else lost it", Fault.STATE)
    assert {launch.replica for launch in dispatcher.tick(0.01)} == {"g1", "g2"}


def test_inputs_that_wait_on_a_replica_begin_again_when_it_goes() -> None:
    dispatcher, first = kept("g1", "g2", ahead=0)
    other = ({"g1", "g2"} - {first.replica}).pop()
    dispatcher.reroute(LOCAL, {"gpu": [other]})
    again = one_launch(dispatcher, 0.01)
    assert (again.cursor, again.replica, again.places) == (0, other, (Place("input", 0),))


def test_a_kept_launch_that_fails_is_tried_from_the_start_on_another_replica() -> None:
    world = World(LOCAL, GPUS, fails=lambda launch: launch.replica == "g1" and launch.cursor == 6)
    world.arrive(*(Input(i / 100, 12, 5.0) for i in range(40)))
    world.run()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}


def test_a_replica_that_broke_twice_with_an_input_is_still_blamed_once_its_client_has_gone() -> None:
    dispatcher, first = kept("g1", "g2")
    for now_s in (0.01, 0.02):
        launch = one_launch(dispatcher, now_s)
        assert (launch.cursor, launch.replica) == (6, first.replica)
        dispatcher.failed(launch.id, now_s + 0.01, "it broke")
    dispatcher.abandon(first.tickets[0])
    for _ in range(8):
        dispatcher.admit(0.03, 9.0, Place("sound", 0))
    assert one_launch(dispatcher, 0.03).replica != first.replica


def test_an_input_that_always_fails_deep_inside_does_not_begin_again_for_ever() -> None:
    world = World(LOCAL, GPUS, fails=lambda launch: launch.cursor == 6)
    world.arrive(Input(0.0, 12, 60.0))
    world.run()
    assert world.outcomes == {0: Outcome.FAILED}
    assert Counter(launch.cursor for launch in world.launches) == {0: 2, 6: 3}


def test_kept_inputs_whose_launch_another_one_broke_go_on_where_they_stand() -> None:
    breaks = lambda launch: launch.cursor == 6 and any(ticket.id == 4 for ticket in launch.tickets)  # noqa: E731
    world = World(LOCAL, {"gpu": ["g1"]}, fails=breaks)
    world.arrive(*(Input(0.0, 12, 9.0) for _ in range(9)))
    world.run()
    assert world.outcomes == {number: Outcome.FAILED if number == 4 else Outcome.ANSWERED for number in range(9)}
    begun = [ticket for launch in world.launches if launch.cursor == 0 for ticket in launch.tickets]
    assert len(begun) - 9 <= 3, "only those that broke with it twice begin again"


def test_when_the_next_stage_moves_to_another_group_the_kept_state_is_handed_over() -> None:
    dispatcher, _ = kept("g1")
    dispatcher.reroute(APART, {"gpu": ["g1"], "more": ["m1"]})
    moved = one_launch(dispatcher, 0.01)
    assert (moved.replica, moved.cursor, moved.places) == ("m1", 6, (Place("kept", 0),))


def test_a_benched_replica_still_runs_the_inputs_that_it_keeps() -> None:
    world = World(LOCAL, GPUS, Limits(probe_every_s=100.0), slow={"g2": 8.0})
    world.arrive(*(Input(i / 600, (4, 12)[i % 2], 3.0) for i in range(1200)))
    world.run()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    share = Counter(launch.replica for launch in world.launches)
    assert share["g2"] < 0.5 * share["g1"]
