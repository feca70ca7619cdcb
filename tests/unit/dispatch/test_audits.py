"""Audited inputs run on to the end as shadows, without an effect on other inputs."""

import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.dispatch.audits import ALONE_AFTER_S, MOST_SHADOWS, OLDEST_S
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Audit, Fault, Launch, Limits, Outcome, Place, RowKind
from isobatch.deployments.dispatch.route import Route, Stage
from tests.helpers.dispatcher_world import Input, World, linear, numbers
from tests.helpers.layouts import BLOCKS, Layout, arrivals, layouts

AUDITED = Limits(audit_share=0.5, audit_cost=0.0)


class Survivors:
    """What a replica holds; there as long as anybody refers to it."""


def flat(stage: Stage) -> Stage:
    return replace(stage, launch_s=(stage.launch_s[-1],) * stage.batch, exits=())


TWO_SPLITS = Route((flat(linear(0, 4, 4, "a")), flat(linear(4, BLOCKS, 4, "b"))))
GROUPS = {"a": ["a0"], "b": ["b0"]}


def flattened(layout: Layout) -> Layout:
    one, *others = [Route(tuple(map(flat, route.stages))) for route in layout.route.pipelines]
    return Layout(Route(one.stages, beside=tuple(others)), layout.groups)


def played(layout: Layout, inputs: list[Input], limits: Limits) -> World:
    world = World(layout.route, layout.groups, limits)
    world.arrive(*inputs)
    world.run()
    return world


def asked(launches: list[Launch]) -> list[tuple[object, ...]]:
    """The launches as they are without shadows."""
    return [
        (each.id, each.replica, each.cursor, each.stop, numbers(each)[: len(each.tickets) - each.shadows])
        for each in launches
    ]


@settings(deadline=None, max_examples=80)
@given(layouts(), arrivals(0.0, 0.5), st.integers(0, 2), st.floats(0, 0.02))
def test_shadows_without_cost_change_no_launch(layout: Layout, inputs: list[Input], ahead: int, early_s: float) -> None:
    layout, limits = flattened(layout), replace(AUDITED, ahead=ahead, early_s=early_s)
    with_audits, without = played(layout, inputs, limits), played(layout, inputs, replace(limits, audit_share=0.0))
    assert asked(with_audits.launches) == asked(without.launches)
    assert with_audits.outcomes == without.outcomes
    assert with_audits.ended_s == without.ended_s


@settings(deadline=None, max_examples=80)
@given(layouts(), arrivals(0.0, 0.5), st.sampled_from([0.0, 0.01, 0.1, 0.5]))
def test_shadows_cost_at_most_their_allowance_and_one_launch(layout: Layout, inputs: list[Input], cost: float) -> None:
    world = played(layout, inputs, Limits(audit_share=1.0, audit_cost=cost))
    asking_s = shadows_s = longest_s = 0.0
    for launch in world.launches:
        stage = world.stage_of(launch)
        own = launch.weight - launch.shadow_weight
        own_s = stage.seconds(own) if own else 0.0
        asking_s, shadows_s = asking_s + own_s, shadows_s + stage.seconds(launch.weight) - own_s
        longest_s = max(longest_s, stage.seconds(launch.weight))
    assert shadows_s <= cost * asking_s + longest_s + 1e-9


def test_an_audit_has_the_exit_block_and_whether_the_full_network_agrees() -> None:
    world = World(TWO_SPLITS, GROUPS, replace(AUDITED, audit_share=1.0))
    world.arrive(*(Input(0.0, depth, 1.0) for depth in (2, 3, BLOCKS)))
    world.run()
    assert sorted(world.audits) == [Audit(3, False), Audit(3, True)]
    assert world.ended_s[1] < world.ended_s[2]
    assert world.launches[-1].kinds == bytes([RowKind.AUDITED, RowKind.SHADOW, RowKind.SHADOW])


@pytest.mark.parametrize(
    ("tolerance", "at_ramp", "full", "drawn", "agrees"),
    [
        *((0.0, (1, 2), (1, 5), drawn, drawn < 0.5) for drawn in (0.0, 0.49, 0.5, 0.99)),  # one random word of a text
        *((0.05, 0.5, full, 0.0, True) for full in (0.5, 0.549, 0.451)),  # a score
        *((0.05, 0.5, full, 0.0, False) for full in (0.56, 0.4)),
        (1.0, (3 + 5j, 0j), (4 + 5j, 9j), 0.0, True),  # points, of which one is compared as well
        (1.0, (3 + 5j, 0j), (5 + 5j, 9j), 0.0, False),
    ],
)
def test_answers_agree_that_are_the_same_or_within_their_tolerance(
    tolerance: float, at_ramp: object, full: object, drawn: float, agrees: bool
) -> None:
    chances, limits = iter([0.0, drawn]), replace(AUDITED, tolerance=tolerance)
    dispatcher = Dispatcher(Route((flat(linear(0, BLOCKS, 1, "a")),)), {"a": ["a0"]}, limits, lambda: next(chances))
    dispatcher.admit(0.0, 9.0, Place("x", 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.released(launch.id, 0.0, [0], [3], [at_ramp])
    dispatcher.released(launch.id, 0.0, [0], [BLOCKS - 1], [full])
    assert dispatcher.audits() == [Audit(3, agrees)]


def test_launches_that_shadows_fill_still_have_room() -> None:
    """Admission is stricter where launches have no room for further inputs."""
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, replace(AUDITED, audit_share=1.0, audit_cost=1.0), lambda: 0.0)
    fills = []
    for number in range(8):
        now_s = 0.1 * number
        dispatcher.admit_all(now_s, now_s + 1.0, [Place("x", row) for row in range(4)])
        (first,) = dispatcher.tick(now_s)
        dispatcher.released(first.id, now_s, [1, 2, 3], [3] * 3, [1] * 3)
        dispatcher.completed(first.id, now_s, {row: Place("y", row) for row in range(4)})
        (second,) = dispatcher.tick(now_s)
        assert (len(second.tickets), second.shadows) == (4, 3)
        fills.append(second.queue.owner.fill)
        dispatcher.released(second.id, now_s, range(4), [BLOCKS - 1] * 4, [1] * 4)
        dispatcher.completed(second.id, now_s, {})
    assert fills == pytest.approx([0.25 + 0.75 * 0.95**launches for launches in range(1, 9)])


def test_with_early_answers_every_input_is_audited_at_any_cost() -> None:
    limits = Limits(audit_share=0.0, audit_cost=0.0, answers_early=True)
    dispatcher = Dispatcher(Route((linear(0, BLOCKS, 4, "a"),)), {"a": ["a0"]}, limits)
    dispatcher.admit_all(0.0, 1.0, [Place("x", row) for row in range(3)])
    (launch,) = dispatcher.tick(0.0)
    assert launch.kinds == bytes([RowKind.EARLY] * 3)
    assert dispatcher.released(launch.id, 0.1, [0, 1], [2, 2], [1, 0]) == [0, 1]
    assert [len(ending.tickets) for ending in dispatcher.endings()] == [2], "they have their answers"
    assert dispatcher.inside == 1
    assert dispatcher.released(launch.id, 0.1, [0, 1, 2], [BLOCKS - 1] * 3, [1] * 3) == [2]
    dispatcher.completed(launch.id, 0.1, {})
    assert dispatcher.audits() == [Audit(2, True), Audit(2, False)]
    assert dispatcher.inside == 0


def test_with_early_answers_only_audited_inputs_stay_inside_while_others_wait() -> None:
    for chance, crowded in ((0.5, b""), (0.0, bytes([RowKind.EARLY] * 4))):
        limits = Limits(audit_share=0.02, answers_early=True)
        dispatcher = Dispatcher(Route((linear(0, BLOCKS, 4, "a"),)), {"a": ["a0"]}, limits, lambda each=chance: each)
        dispatcher.admit_all(0.0, 9.0, [Place("x", row) for row in range(6)])
        (launch,) = dispatcher.tick(0.0)
        assert launch.kinds == crowded
        dispatcher.released(launch.id, 0.1, range(4), [2] * 4, [1] * 4)
        assert [len(ending.tickets) for ending in dispatcher.endings()] == [4]
        dispatcher.completed(launch.id, 0.1, {})
        (launch,) = dispatcher.tick(0.1)
        assert launch.kinds == bytes([RowKind.EARLY] * 2), "nobody waits any more"


def test_an_input_for_the_full_network_leaves_at_no_ramp() -> None:
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, AUDITED, lambda: 0.0)
    dispatcher.admit_all(0.0, 1.0, [Place("x", 0)], full=True)
    (launch,) = dispatcher.tick(0.0)
    assert launch.kinds == bytes([RowKind.FULL])
    dispatcher.completed(launch.id, 0.1, {0: Place("y", 0)})
    (launch,) = dispatcher.tick(0.1)
    assert (launch.kinds, launch.places) == (bytes([RowKind.FULL]), (Place("y", 0),))


def test_a_launch_stops_at_no_ramp_if_all_its_inputs_run_to_the_end() -> None:
    """Such as one of inputs that want the full network; one other input is enough for ramps."""
    route = Route((replace(flat(linear(0, BLOCKS, 4, "a")), ramps=frozenset({3})),))
    dispatcher = Dispatcher(route, {"a": ["a0"]}, AUDITED, lambda: 0.0)
    for kinds, ramps in (([True, True], set[int]()), ([True, False], {3})):
        for full in kinds:
            dispatcher.admit_all(0.0, 1.0, [Place("x", 0)], full=full)
        (launch,) = dispatcher.tick(0.0)
        assert (len(launch.tickets), launch.ramps) == (2, ramps)
        dispatcher.completed(launch.id, 0.1, {})


def test_a_shadow_that_is_given_up_frees_its_state() -> None:
    """After a few seconds, or at once when too many others come after it."""
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, AUDITED, lambda: 0.0)
    held, now_s = list[weakref.ref[Survivors]](), 0.0

    def left_at_the_first_ramp() -> None:
        dispatcher.admit(now_s, now_s + 1.0, Place("x", 0))
        (launch,) = dispatcher.tick(now_s)
        dispatcher.released(launch.id, 0.0, [0], [3], [1])
        survivors = Survivors()
        held.append(weakref.ref(survivors))
        dispatcher.completed(launch.id, now_s, {0: Place(survivors, 0)})

    for _ in range(2 * MOST_SHADOWS):
        left_at_the_first_ramp()
        now_s += 0.01
    assert [each() is not None for each in held] == [False] * MOST_SHADOWS + [True] * MOST_SHADOWS, "the latest wait"
    now_s += OLDEST_S
    left_at_the_first_ramp()
    assert [each() is not None for each in held] == [False] * 2 * MOST_SHADOWS + [True]


@pytest.mark.parametrize("fault", [Fault.NETWORK, Fault.STATE])
def test_a_failure_with_shadows_counts_against_no_input(fault: Fault) -> None:
    """The shadow may be the cause, so the others try again without it, from where they stand."""
    chances = iter([0.0, 1.0])
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, replace(AUDITED, retries=0), lambda: next(chances))
    for name in ("leaves", "goes on"):
        dispatcher.admit(0.0, 9.0, Place(name, 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.released(launch.id, 0.0, [0], [3], [1])
    dispatcher.completed(launch.id, 0.1, {0: Place("shadow", 0), 1: Place("survivor", 0)})
    (launch,) = dispatcher.tick(0.1)
    assert launch.kinds == bytes([RowKind.PLAIN, RowKind.SHADOW])
    dispatcher.failed(launch.id, 0.2, "it broke", fault)
    (launch,) = dispatcher.tick(0.2)
    assert (launch.cursor, launch.places, launch.kinds) == (4, (Place("survivor", 0),), b"")
    dispatcher.failed(launch.id, 0.3, "it broke again", fault)
    assert [ending.outcome for ending in dispatcher.endings()] == [Outcome.ANSWERED, Outcome.FAILED]


def test_a_launch_that_may_have_failed_because_of_an_audit_leaves_its_replica_in_use() -> None:
    dispatcher = Dispatcher(Route((flat(linear(0, BLOCKS, 1, "a")),)), {"a": ["a0", "a1"]}, AUDITED, lambda: 0.0)
    dispatcher.admit(0.0, 99.0, Place("x", 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.failed(launch.id, 0.1, "it broke")
    dispatcher.admit(0.1, 99.0, Place("x", 0))
    assert {each.replica for each in dispatcher.tick(0.1)} == {"a0", "a1"}


def test_a_shadow_is_launched_alone_after_a_second_though_nothing_else_happens() -> None:
    chances = iter([1.0, 1.0, 0.0])
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, replace(AUDITED, audit_cost=0.9), lambda: next(chances))
    for now_s in (0.0, 1.0):  # each earns time for audits
        dispatcher.admit(now_s, 99.0, Place("x", 0))
        (launch,) = dispatcher.tick(now_s)
        dispatcher.completed(launch.id, now_s + 0.1, {})
    dispatcher.admit(2.0, 99.0, Place("x", 0))
    (launch,) = dispatcher.tick(2.0)
    dispatcher.released(launch.id, 2.1, [0], [3], [1])
    dispatcher.completed(launch.id, 2.1, {0: Place("shadow", 0)})
    assert dispatcher.tick(2.1) == []
    assert dispatcher.wake_s == 2.1 + ALONE_AFTER_S
    (launch,) = dispatcher.tick(dispatcher.wake_s)
    assert (launch.kinds, launch.places) == (bytes([RowKind.SHADOW]), (Place("shadow", 0),))


def test_another_plan_forgets_the_shadows_of_the_one_before() -> None:
    dispatcher = Dispatcher(TWO_SPLITS, GROUPS, AUDITED, lambda: 0.0)
    dispatcher.admit(0.0, 9.0, Place("x", 0))
    (launch,) = dispatcher.tick(0.0)
    dispatcher.released(launch.id, 0.0, [0], [3], [1])
    dispatcher.completed(launch.id, 0.1, {0: Place("shadow", 0)})
    dispatcher.reroute(Route((flat(linear(0, BLOCKS, 4, "a")),)), {"a": ["a0"]})
    dispatcher.admit(0.2, 9.0, Place("x", 0))
    (launch,) = dispatcher.tick(0.2)
    assert launch.shadows == 0


def test_a_shadow_whose_replica_has_left_the_group_is_given_up() -> None:
    route = Route((flat(linear(0, 4, 4, "a")), flat(linear(4, BLOCKS, 4, "a", local=True))))
    dispatcher = Dispatcher(route, {"a": ["a0"]}, replace(AUDITED, audit_cost=0.9), lambda: 0.0)
    for second in range(6):  # each earns time for audits
        dispatcher.admit(float(second), 99.0, Place("x", 0))
        (launch,) = dispatcher.tick(float(second))
        if second < 5:
            dispatcher.completed(launch.id, second + 0.1, {})
    dispatcher.released(launch.id, 5.0, [0], [3], [1])
    dispatcher.reroute(route, {"a": ["a1"]})
    dispatcher.completed(launch.id, 5.1, {0: Place("shadow", 0)})
    dispatcher.admit(6.0, 99.0, Place("x", 0))
    (launch,) = dispatcher.tick(6.0)
    dispatcher.completed(launch.id, 6.2, {})
    assert dispatcher.tick(6.3) == []
