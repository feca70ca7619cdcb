"""A cascade that may degrade: inputs are promised its first level only, which runs first."""

from collections import Counter

import pytest

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits, Outcome, Place
from isobatch.deployments.dispatch.route import Route
from tests.helpers.dispatcher_world import Input, World, linear

EDGE = 4
SMALL_PER_S, LARGE_PER_S = 8 / 0.01, 8 / 0.1
APART = Route((linear(0, EDGE, 8, "small"), linear(EDGE, 12, 8, "large", launch_s=0.1)), edges=(EDGE,))
TOGETHER = Route((linear(0, EDGE, 8, "both"), linear(EDGE, 12, 8, "both", launch_s=0.1)), edges=(EDGE,))
KEPT = Route((linear(0, EDGE, 8, "both"), linear(EDGE, 12, 8, "both", launch_s=0.1, local=True)), edges=(EDGE,))
WAYS = {"apart": APART, "together": TOGETHER, "kept": KEPT}
SLO_S = 0.6


def loaded(route: Route, rate: float, degrades: bool, depth: int = 12) -> World:
    """Inputs that all need the large level (or `depth`), for two seconds, one replica in each group."""
    world = World(route, {name: [name] for name in route.groups}, Limits(degrades=degrades))
    world.arrive(*(Input(i / rate, depth, SLO_S) for i in range(int(2 * rate))))
    world.run()
    return world


@pytest.mark.parametrize("way", WAYS)
def test_no_input_is_refused_while_the_small_level_has_room(way: str) -> None:
    rate = min(0.5 * SMALL_PER_S, 5 * LARGE_PER_S)
    world = loaded(WAYS[way], rate, degrades=True)
    ended = Counter(world.outcomes.values())
    assert not world.refusals
    assert set(ended) == {Outcome.ANSWERED, Outcome.DEGRADED}
    busy = 1.0 if way == "apart" else 1 - rate / SMALL_PER_S
    assert ended[Outcome.ANSWERED] >= 0.7 * busy * 2 * LARGE_PER_S, "the large level does what it has time for"


@pytest.mark.parametrize("way", WAYS)
def test_without_degrading_such_inputs_are_refused(way: str) -> None:
    world = loaded(WAYS[way], 5 * LARGE_PER_S, degrades=False)
    assert len(world.refusals) > len(world.outcomes)
    assert Outcome.DEGRADED not in world.outcomes.values()


@pytest.mark.parametrize("way", WAYS)
def test_inputs_beyond_the_small_level_s_capacity_are_refused_and_others_answered(way: str) -> None:
    world = loaded(WAYS[way], 2 * SMALL_PER_S, degrades=True)
    ended = Counter(world.outcomes.values())
    assert len(world.refusals) > 0.25 * len(world.depths)
    assert ended[Outcome.EXPIRED] == ended[Outcome.FAILED] == 0
    assert len(world.outcomes) >= 0.9 * 2 * SMALL_PER_S


def test_no_work_is_owed_when_all_inputs_have_ended() -> None:
    for route in WAYS.values():
        world = loaded(route, 5 * LARGE_PER_S, degrades=True)
        assert max(abs(group.owed_s) for group in world.dispatcher._groups.values()) < 1e-9
        assert world.dispatcher.inside == 0


def test_a_degraded_input_does_not_count_as_late() -> None:
    """One is on its way through the large level when the time is over, and another waits for it."""
    dispatcher = Dispatcher(APART, {"small": ["small"], "large": ["large"]}, Limits(degrades=True))
    before = dispatcher._admission._may_be_late
    launches = []
    for number, now_s in enumerate((0.0, 0.01)):
        dispatcher.admit(now_s, 0.15, Place(("input", number), 0))
        (small,) = dispatcher.tick(now_s)
        dispatcher.completed(small.id, now_s + 0.01, {0: Place(("kept", number), 0)})
        launches += dispatcher.tick(now_s + 0.01)
    (large,) = launches
    assert not dispatcher.tick(0.15)
    assert [ending.outcome for ending in dispatcher.endings()] == [Outcome.DEGRADED]
    dispatcher.abandon(large.tickets[0])
    dispatcher.completed(large.id, 0.2, {})
    assert dispatcher._admission._may_be_late >= before
