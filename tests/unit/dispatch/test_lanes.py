"""Pipelines side by side: each input takes the one with the earliest expected answer."""

from collections import Counter
from math import inf

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Outcome, Place
from isobatch.deployments.dispatch.route import Route
from tests.helpers.dispatcher_world import Input, World, linear

FAST = Route((linear(0, 6, 8, "f1"), linear(6, 12, 8, "f2", survival=0.5)))
SLOW = Route((linear(0, 12, 8, "s", launch_s=0.06),))
BOTH = Route(FAST.stages, beside=(SLOW,))
GROUPS = {"f1": ["f11", "f12"], "f2": ["f21"], "s": ["s1", "s2"]}
FAST_PER_S, SLOW_PER_S = 2 * 8 / 0.01, 2 * 8 / 0.06


def lanes_of(world: World) -> dict[int, set[str]]:
    """The lanes in which each input was."""
    seen: dict[int, set[str]] = {}
    for launch in world.launches:
        for ticket in launch.tickets:
            seen.setdefault(ticket.id, set()).add(launch.group[0])
    return seen


def loaded(rate: float, seconds: float, slack_s: float = 0.5) -> World:
    world = World(BOTH, GROUPS)
    world.arrive(*(Input(i / rate, (4, 12)[i % 2], slack_s) for i in range(int(rate * seconds))))
    world.run()
    return world


def test_a_lone_input_takes_the_faster_lane() -> None:
    assert lanes_of(loaded(5, 1.0)) == {ticket: {"f"} for ticket in range(5)}


def test_near_their_joint_capacity_both_lanes_work_and_no_input_changes_lanes() -> None:
    world = loaded(0.95 * (FAST_PER_S + SLOW_PER_S), 3.0)
    seen = lanes_of(world)
    assert all(len(lanes) == 1 for lanes in seen.values())
    share = Counter(lane for lanes in seen.values() for lane in lanes)
    assert share["s"] / len(seen) >= 0.5 * SLOW_PER_S / (FAST_PER_S + SLOW_PER_S)
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert not world.refusals


def test_a_lane_that_loses_a_whole_group_gives_its_inputs_to_the_other() -> None:
    world = World(BOTH, GROUPS)
    world.arrive(*(Input(i / 1000, (4, 12)[i % 2], 2.0) for i in range(600)))
    world.at(0.3, lambda: world.reroute(BOTH, GROUPS | {"f2": []}))
    world.run()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    moved = [lanes for lanes in lanes_of(world).values() if lanes == {"f", "s"}]
    assert moved, "who stood before the lost group goes on in the other lane"


def test_the_promise_is_that_of_the_faster_lane() -> None:
    alone, both = Dispatcher(FAST, GROUPS), Dispatcher(BOTH, GROUPS)
    assert both.needed_s(0.0, inf) == alone.needed_s(0.0, inf)
    for _ in range(100):
        alone.admit(0.0, 9.0, Place("x", 0))
        both.admit(0.0, 9.0, Place("x", 0))
    assert both.needed_s(0.0, inf) < alone.needed_s(0.0, inf)
