"""The dispatcher: every input ends once, batches are full, no input waits needlessly, broken replicas heal."""

import random
from collections import Counter
from dataclasses import replace
from math import inf
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Fault, Launch, Limits, Outcome, Place, Refusal
from isobatch.deployments.dispatch.route import Route, Stage
from tests.helpers.dispatcher_world import Input, World, linear

TWO_SPLITS = Route((linear(0, 6, 8, "front"), linear(6, 12, 8, "back", survival=0.5)))
GROUPS = {"front": ["f1", "f2"], "back": ["b1"]}


def steady(rate: float, seconds: float, depths: list[int], slack_s: float = 1.0) -> list[Input]:
    return [Input(i / rate, depths[i % len(depths)], slack_s) for i in range(int(rate * seconds))]


def test_under_load_every_launch_at_every_depth_is_full_of_survivors_of_several_replicas() -> None:
    world = World(TWO_SPLITS, GROUPS)
    capacity = 8 / 0.01 * 2  # two front replicas; the back one gets half as much and keeps up exactly
    world.arrive(*steady(capacity * 0.98, 3.0, depths=[4, 12]))
    world.run()
    warm = [launch for launch in world.launches if launch.id > 50]
    for cursor in (0, 6):
        assert mean(len(launch.tickets) for launch in warm if launch.cursor == cursor) > 7.5
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert not world.refusals
    first = {ticket: launch.replica for launch in world.launches for ticket in launch.tickets if launch.cursor == 0}
    sources = [{first[ticket] for ticket in launch.tickets} for launch in world.launches if launch.cursor == 6]
    assert sum(len(replicas) > 1 for replicas in sources) > 10


def test_a_refusal_says_when_to_come_again() -> None:
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, Limits(max_inside=2, slack=0.0))
    assert dispatcher.admit(0.0, 0.001, Place("x", 0)) == Refusal(
        "the deadline cannot be met with what is ahead", pytest.approx(2 * 0.01 * 0.5625 - 0.001)
    )
    for _ in range(2):
        assert not isinstance(dispatcher.admit(0.0, 1.0, Place("x", 0)), Refusal)
    full = dispatcher.admit(0.0, 1.0, Place("x", 0))
    assert isinstance(full, Refusal)
    assert "2 inputs may be inside" in full.reason
    assert full.retry_after_s > 0


def test_an_input_that_another_plan_left_inside_a_stage_needs_no_time_for_the_whole_stage() -> None:
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS)
    dispatcher.admit(0.0, 0.014, Place("x", 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.completed(launch.id, 0.006, {0: Place("y", 0)})
    whole = Route((linear(0, 12, 8, "front", launch_s=0.02),))
    dispatcher.reroute(whole, {"front": ["f1", "f2", "b1"]})
    (launch,) = dispatcher.tick(0.006)
    assert (launch.cursor, launch.stop) == (6, 12)
    assert dispatcher.endings() == []


def test_the_limit_counts_all_inputs_of_a_request_however_many_lanes_there_are() -> None:
    one, other = (Route((linear(0, 12, 8, name),)) for name in ("a", "b"))
    dispatcher = Dispatcher(replace(one, beside=(other,)), {"a": ["a1"], "b": ["b1"]}, Limits(max_inside=10))
    refusal = dispatcher.admit_all(0.0, 9.0, [Place("x", row) for row in range(12)])
    assert isinstance(refusal, Refusal)
    assert not isinstance(dispatcher.admit_all(0.0, 9.0, [Place("x", row) for row in range(10)]), Refusal)


def test_a_failed_launch_is_retried_on_another_replica_from_the_held_survivors() -> None:
    world = World(TWO_SPLITS, GROUPS, fails=lambda launch: launch.replica == "f1")
    world.arrive(*steady(800, 1.0, depths=[4, 12]))
    world.run()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert Counter(launch.replica for launch in world.launches)["f1"] <= 3, "a broken replica is left alone"


def test_an_input_that_fails_too_often_ends_with_the_reason() -> None:
    world = World(TWO_SPLITS, GROUPS, fails=lambda launch: launch.cursor == 6)
    world.arrive(Input(0.0, 12, 5.0), Input(0.0, 4, 5.0))
    world.run()
    assert world.outcomes == {0: Outcome.FAILED, 1: Outcome.ANSWERED}
    assert sum(launch.cursor == 6 for launch in world.launches) == 1 + Limits().retries


@given(st.sets(st.integers(0, 15), min_size=1, max_size=3), st.sampled_from([0, 6]), st.booleans())
def test_an_input_that_breaks_the_network_fails_alone(broken: set[int], cursor: int, local: bool) -> None:
    names = ["g1", "g2"]
    stages = [linear(0, 6, 8, "front"), linear(6, 12, 8, "front" if local else "back", local=local)]
    fails = lambda launch: launch.cursor == cursor and any(ticket.id in broken for ticket in launch.tickets)  # noqa: E731
    world = World(Route(tuple(stages)), {"front": names} if local else {"front": names, "back": ["b1"]}, fails=fails)
    world.arrive(*(Input(0.0, 12, 9.0) for _ in range(16)), *(Input(1.0, 12, 9.0) for _ in range(16)))
    world.run()
    assert {number for number, outcome in world.outcomes.items() if outcome is not Outcome.ANSWERED} == broken
    late = [launch for launch in world.launches if launch.started_s >= 1.0 and launch.cursor == 0]
    assert {launch.replica for launch in late} == {*names}, "no replica is blamed for inputs that fail on all"


@pytest.mark.parametrize("gone", [False, True])
def test_no_replica_is_blamed_for_an_input_that_broke_on_two_and_then_expired_or_lost_its_client(gone: bool) -> None:
    names = ["g1", "g2", "g3"]
    dispatcher = Dispatcher(Route((linear(0, 12, 1, "gpu"),)), {"gpu": names})
    ticket = dispatcher.admit(0.0, 0.025, Place("breaks", 0))
    assert isinstance(ticket, Ticket)
    for begins_s in (0.0, 0.01):
        (launch,) = dispatcher.tick(begins_s)
        if gone and begins_s:
            dispatcher.abandon(ticket)
        dispatcher.failed(launch.id, begins_s + 0.01, "it broke")
    assert dispatcher.tick(0.02) == []
    for _ in names:
        dispatcher.admit(0.02, 9.0, Place("sound", 0))
    assert {launch.replica for launch in dispatcher.tick(0.02)} == {*names}


def test_a_replica_that_got_an_input_again_as_the_only_free_one_is_not_blamed_either() -> None:
    limits = Limits(ahead=0, probe_every_s=0.01)
    dispatcher = Dispatcher(Route((linear(0, 12, 1, "gpu"),)), {"gpu": ["g1", "g2"]}, limits)
    for name, deadline_s in (("breaks", 0.035), ("sound", 9.0)):
        dispatcher.admit(0.0, deadline_s, Place(name, 0))
    first, _ = dispatcher.tick(0.0)
    dispatcher.failed(first.id, 0.01, "it broke")
    (again,) = dispatcher.tick(0.02)
    assert again.replica == first.replica
    dispatcher.failed(again.id, 0.03, "it broke")
    dispatcher.admit(0.03, 9.0, Place("sound", 0))
    assert [launch.replica for launch in dispatcher.tick(0.036)] == [first.replica]


def alone(names: list[str]) -> Dispatcher:
    """One split on these replicas, with an input inside that leaves in the last block."""
    dispatcher = Dispatcher(Route((linear(0, 12, 1, "gpu"),)), {"gpu": names})
    dispatcher.admit(0.0, 60.0, Place("input", 0))
    return dispatcher


def test_a_replica_that_hangs_several_times_costs_an_input_one_attempt() -> None:
    dispatcher = alone(["g1"])
    for second in range(1, 10):
        (launch,) = dispatcher.tick(second - 1.0)
        dispatcher.failed(launch.id, float(second), "it hangs", Fault.REPLICA)
    assert dispatcher.endings() == []
    dispatcher.reroute(dispatcher.route, {"gpu": ["g2"]})
    (launch,) = dispatcher.tick(10.0)
    dispatcher.completed(launch.id, 10.1, {})
    assert [ending.outcome for ending in dispatcher.endings()] == [Outcome.ANSWERED]


def test_an_input_that_hangs_replicas_is_given_up_before_it_has_hung_all() -> None:
    dispatcher = alone(["g1", "g2", "g3", "g4"])
    hung = []
    for second in range(1, 4):
        (launch,) = dispatcher.tick(second - 1.0)
        hung.append(launch.replica)
        dispatcher.failed(launch.id, float(second), "it hangs", Fault.REPLICA)
    assert [(ending.outcome, ending.reason) for ending in dispatcher.endings()] == [(Outcome.FAILED, "it hangs")]
    assert len(set(hung)) == 3


def test_an_input_that_ends_replicas_is_given_up_alone() -> None:
    dispatcher = Dispatcher(Route((linear(0, 12, 4, "gpu"),)), {"gpu": ["g1", "g2", "g3", "g4"]})
    tickets = dispatcher.admit_all(0.0, 60.0, [Place("input", row) for row in range(4)])
    assert not isinstance(tickets, Refusal)
    for second in range(3):
        for launch in dispatcher.tick(float(second)):
            if tickets[0] in launch.tickets:
                dispatcher.failed(launch.id, second + 0.1, "it ended", Fault.REPLICA)
            else:
                dispatcher.completed(launch.id, second + 0.1, {})
    for launch in dispatcher.tick(3.0):
        dispatcher.completed(launch.id, 3.1, {})
    failed = [ending.tickets for ending in dispatcher.endings() if ending.outcome is Outcome.FAILED]
    assert failed == [(tickets[0],)]


def moved_while_busy() -> tuple[Dispatcher, Launch]:
    """A replica that has run one launch, and runs the second one while it moves to the first group."""
    dispatcher = Dispatcher(TWO_SPLITS, {"front": ["f1"], "back": ["b1"]}, Limits(ahead=0))
    for second in (0.0, 1.0):
        dispatcher.admit(second, 60.0, Place("input", 0))
        (first,) = dispatcher.tick(second)
        dispatcher.completed(first.id, second + 0.01, {0: Place("state", 0)})
        (running,) = dispatcher.tick(second + 0.01)
        if second == 0.0:
            dispatcher.completed(running.id, 0.02, {})
    dispatcher.reroute(TWO_SPLITS, {"front": ["f1", "b1"], "back": ["b2"]})
    return dispatcher, running


def test_a_replica_that_moves_to_another_group_is_known_to_be_warm_and_busy() -> None:
    dispatcher, running = moved_while_busy()
    for number in range(16):
        dispatcher.admit(1.02, 60.0, Place("input", number))
    assert [launch.replica for launch in dispatcher.tick(1.02)] == ["f1"], "the other one still runs its launch"
    dispatcher.completed(running.id, 1.03, {})
    (after,) = dispatcher.tick(1.03)
    assert after.replica == "b1"
    assert after.timeout_s < 2.0, "its first launch was long ago"


def test_a_replica_that_hung_while_it_moved_is_benched_where_it_is_now() -> None:
    dispatcher, running = moved_while_busy()
    dispatcher.failed(running.id, 3.0, "it hangs", Fault.REPLICA)
    for number in range(16):
        dispatcher.admit(3.0, 60.0, Place("input", number))
    assert {launch.replica for launch in dispatcher.tick(3.0) if launch.cursor == 0} == {"f1"}


def test_if_the_last_working_replica_hangs_benched_ones_are_used_again() -> None:
    dispatcher = alone(["g1", "g2"])
    (first,) = dispatcher.tick(0.0)
    dispatcher.failed(first.id, 1.0, "held up for a moment", Fault.REPLICA)
    (second,) = dispatcher.tick(1.0)
    dispatcher.failed(second.id, 2.0, "it hangs", Fault.REPLICA)
    assert second.replica != first.replica
    (third,) = dispatcher.tick(2.0)
    assert third.replica == first.replica


def test_a_straggler_is_benched_and_comes_back_when_healthy() -> None:
    groups = {"front": ["f1", "f2", "f3"], "back": ["b1", "b2"]}
    world = World(TWO_SPLITS, groups, Limits(probe_every_s=0.5), slow={"f2": 5.0})
    world.at(2.0, lambda: world.slow.clear())
    world.arrive(*steady(1000, 4.0, depths=[4, 12]))
    world.run()
    share = Counter(launch.replica for launch in world.launches if launch.cursor == 0)
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert share["f2"] < 0.75 * share["f1"]
    last = [launch.replica for launch in world.launches if launch.cursor == 0][-60:]
    assert last.count("f2") >= 15, "it is used again"


def test_of_two_replicas_the_slow_one_is_benched() -> None:
    """Their mean would hide it, and admission would take both for slow."""
    world = World(Route((linear(0, 4, 4, "a"),)), {"a": ["a1", "a2"]}, slow={"a2": 20.0})
    world.arrive(*steady(50, 20.0, depths=[4]))
    world.run()
    late = [launch for launch in world.launches if launch.replica == "a2" and launch.id > 500]
    assert len(late) <= 3, "one launch every five seconds"


def test_a_benched_replica_is_reported_until_it_is_healthy() -> None:
    """A launch that fails now and then benches a replica for a moment only, which is nothing to plan around."""
    groups = {"front": ["f1", "f2", "f3"], "back": ["b1", "b2"]}
    world = World(TWO_SPLITS, groups, Limits(probe_every_s=1.0), slow={"f2": 5.0})
    by_name: dict[float, list[str]] = {}
    for at_s in (0.5, 5.0, 14.0, 29.0):
        world.at(at_s, lambda at_s=at_s: by_name.update({at_s: world.dispatcher.benched(at_s)}))
    world.at(15.0, lambda: world.slow.clear())
    world.arrive(*steady(100, 30.0, depths=[4, 12]))
    world.run()
    assert by_name == {0.5: [], 5.0: [], 14.0: ["f2"], 29.0: []}


def test_the_time_between_launches_is_returned_for_those_that_waited() -> None:
    dispatcher = Dispatcher(Route((linear(0, 12, 8, "gpu"),)), {"gpu": ["g1"]}, Limits(ahead=1))
    for number in range(16):
        dispatcher.admit(0.0, 10.0, Place(None, number))
    first, second = dispatcher.tick(0.0)
    assert dispatcher.completed(first.id, 0.1, {}) is None, "nobody was before it"
    assert dispatcher.completed(second.id, 0.25, {}) == pytest.approx(0.15)
    dispatcher.admit(1.0, 10.0, Place(None, 0))
    (third,) = dispatcher.tick(1.0)
    assert dispatcher.completed(third.id, 1.1, {}) is None, "the replica was idle before"


def test_staying_inside_behind_the_last_block_is_reported_as_a_bug() -> None:
    dispatcher = Dispatcher(Route((linear(0, 2, 1, "a"),)), {"a": ["r"]}, Limits(retries=0))
    dispatcher.admit(0.0, 1.0, Place("x", 0))
    launch: Launch = dispatcher.tick(0.0)[0]
    with pytest.raises(ValueError, match="ran to the last block, yet 1 inputs stayed"):
        dispatcher.completed(launch.id, 0.1, {0: Place("y", 0)})
    dispatcher.failed(launch.id, 0.1, "a bug")
    assert [ending.outcome for ending in dispatcher.endings()] == [Outcome.FAILED], "its client waits for an end"


def test_with_a_table_that_is_too_fast_few_inputs_are_admitted_in_vain() -> None:
    """The device is three times slower than the route says, and four times as much comes as it can do."""
    route = Route((linear(0, 2, 4, "a"), linear(2, 4, 4, "a")))
    world = World(route, {"a": ["r"]}, slow={"r": 3.0})
    world.arrive(*steady(rate=270, seconds=8.0, depths=[4], slack_s=0.5))
    world.run()
    later = [each for each, at_s in world.admitted_s.items() if at_s > 1.0]  # once its pace is known
    in_time = [each for each in later if world.ended_s[each] <= world.deadlines[each]]
    assert len(in_time) >= 0.8 * len(later)  # by the table alone it is a fifth
    assert len(later) >= 0.9 * 7.0 * 4 / (2 * 0.03)  # and it is kept busy


@pytest.mark.parametrize("rate_per_s", [200, 400, 1200])
def test_every_admitted_input_is_in_time_when_devices_are_as_planned(rate_per_s: int) -> None:
    """Launches that take as long for one as for sixteen, two replicas, 400 inputs per second at best."""
    route = Route((Stage(0, 4, 16, "a", (0.08,) * 16),))
    world = World(route, {"a": ["a1", "a2"]})
    chance = random.Random(rate_per_s)
    times = sorted(chance.uniform(0, 3) for _ in range(3 * rate_per_s))
    world.arrive(*(Input(at_s, 4, 0.25) for at_s in times))
    world.run()
    assert all(world.ended_s[ticket] <= world.deadlines[ticket] for ticket in world.outcomes)
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert len(world.outcomes) >= 0.9 * 3 * min(rate_per_s, 400)


@pytest.mark.parametrize("count", [1, 20])
def test_replicas_that_were_slow_for_some_time_get_launches_again(count: int) -> None:
    """Otherwise all later requests would be refused: nothing would run, so nothing would be learned."""
    dispatcher = Dispatcher(Route((Stage(0, 1, 1, "g", (0.01,)),)), {"g": ["r"]})
    now_s, planned_s, places = 0.0, 0.01 * count, [Place("state", row) for row in range(count)]

    def admits(left_s: float) -> bool:
        return not isinstance(dispatcher.admit_all(now_s, now_s + left_s, places), Refusal)

    def run(launch_s: float) -> None:
        nonlocal now_s
        while launches := dispatcher.tick(now_s):
            for launch in launches:
                now_s += launch_s
                dispatcher.completed(launch.id, now_s, {})

    for _ in range(10):
        assert admits(6000 * planned_s)
        run(launch_s=1.0)
    slow_s = now_s
    assert not admits(0.9 * planned_s), "no plan can do that"
    assert dispatcher.needed_s(now_s, inf, count) <= 1.1 * planned_s
    second = False
    while not second:
        assert admits(8 * planned_s)
        second = admits(8 * planned_s)
        assert not second or now_s > slow_s, "one is enough while nothing shows that replicas are fast again"
        run(launch_s=0.01)
    assert now_s < slow_s + 100 * planned_s
