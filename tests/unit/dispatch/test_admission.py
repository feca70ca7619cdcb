"""Admission: an input that would probably be in time is not refused, and few admitted inputs are late."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.dispatch.admission import Admission, soonest
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.lanes import MAX_LATE, Estimates, ExpectedTimes
from isobatch.deployments.dispatch.messages import Limits, Outcome, Place, Refusal
from isobatch.deployments.dispatch.route import Route, Stage
from tests.helpers.dispatcher_world import Input, World, linear

# 10 ms, a hop of 1.8 ms, 2 ms, whatever the batch: who meets a launch that has just begun is through after 23.8 ms.
FLAT = Route(
    (Stage(0, 1, 16, "first", (0.010,) * 16), Stage(1, 2, 16, "second", (0.002,) * 16, survival=0.5, transfer_s=0.0018))
)
ALONE = {"first": ["f"], "second": ["s"]}
PER_S = 1600.0


class HopWorld(World):
    """Launches of the second stage take as long as the hop before them, too."""

    def stage_of(self, launch):  # type: ignore[no-untyped-def]
        stage = super().stage_of(launch)
        return HOPPED if stage.start else stage


HOPPED = Stage(1, 2, 16, "second", (0.0038,) * 16, survival=0.5)


def under(load: float, slo_s: float, seconds: float = 2.0, slack: float = 0.2, begins_s: float = 0.0) -> HopWorld:
    world, draw, at_s, inputs = HopWorld(FLAT, ALONE, Limits(slack=slack)), random.Random(1), begins_s, []
    while (at_s := at_s + draw.expovariate(load * PER_S)) < begins_s + seconds:
        inputs.append(Input(at_s, draw.choice((1, 2)), slo_s))
    world.arrive(*inputs)
    world.run()
    return world


def late_of(world: World) -> int:
    ended = [world.ended_s[ticket] > world.deadlines[ticket] + 1e-9 for ticket in world.outcomes]
    return sum(ended) + Counter(world.outcomes.values())[Outcome.EXPIRED]


@pytest.mark.parametrize("slack", [0.0, 0.2])
def test_an_input_that_is_in_time_in_the_worst_case_is_never_refused(slack: float) -> None:
    world = under(load=0.5, slo_s=0.026, slack=slack)
    assert not world.refusals
    assert not late_of(world)


@pytest.mark.parametrize("load", [0.85, 1.3, 3.0])
def test_few_admitted_inputs_are_late_and_the_device_stays_busy(load: float) -> None:
    world = under(load, slo_s=0.026)
    admitted, late = len(world.outcomes), late_of(world)
    assert late <= 2 * MAX_LATE * admitted
    assert admitted - late >= 0.9 * min(load, 1.0) * PER_S * 2.0


def test_few_inputs_are_late_in_a_rush_that_follows_an_idle_hour() -> None:
    world = under(load=1.3, slo_s=0.026, seconds=4.0, begins_s=3600.0)
    assert late_of(world) <= 2 * MAX_LATE * len(world.outcomes)


def test_a_slow_last_stage_that_few_inputs_reach_causes_no_refusal() -> None:
    """Half a percent go to the end, for which there is no time."""
    route = Route((linear(0, 1, 4, "a"), linear(1, 2, 4, "b", launch_s=1.0, survival=0.005)))
    dispatcher = Dispatcher(route, {"a": ["a"], "b": ["b"]})
    for number in range(4):
        assert not isinstance(dispatcher.admit(0.0, 0.1, Place(number, 0)), Refusal)
    often = Dispatcher(
        Route((route.stages[0], linear(1, 2, 4, "b", launch_s=1.0, survival=0.6))), ALONE | {"a": ["a"], "b": ["b"]}
    )
    often.admit(0.0, 9.0, Place("inside", 0))
    assert isinstance(often.admit(0.0, 0.1, Place("late", 0)), Refusal)


def test_risky_inputs_are_admitted_as_long_as_few_are_late() -> None:
    dispatcher = Dispatcher(FLAT, ALONE)
    for number in range(40):
        dispatcher.admit(0.0, 9.0, Place(number, 0))
    lane, limits = dispatcher._lanes[0], Limits()
    admission, (_, expected) = Admission(), soonest([lane], 0.0)
    doubtful_s = expected.needed_s(0.3)

    def let_in(deadline_s: float) -> list[float]:
        result = [admission.risk(lane, expected, deadline_s, 1, limits) for _ in range(100)]
        return [risk for risk in result if not isinstance(risk, Refusal)]

    first = let_in(doubtful_s)
    assert 0 < len(first) < 5, "nobody knows yet how they end"
    for risk in first:
        admission.ended(risk, late=False)
    assert 0 < len(let_in(doubtful_s)) < 5, "they were in time"
    assert len(let_in(1.0)) == 100
    assert let_in(doubtful_s), "so many were in time"
    for _ in range(10):
        admission.ended(0.0, late=True)
    assert not let_in(doubtful_s)


@pytest.mark.parametrize("count", [1, 64])
def test_a_late_request_counts_once_however_many_inputs_it_has(count: int) -> None:
    """Its admission counts once, too; otherwise no later input would make up for it."""
    dispatcher = Dispatcher(FLAT, ALONE)
    dispatcher.admit_all(0.0, 1.0, [Place("late", row) for row in range(count)])
    dispatcher.tick(2.0)
    assert dispatcher.inside == 0
    for number in range(300):
        dispatcher.admit(2.0, 99.0, Place(number, 0))
    _, expected = soonest(dispatcher._lanes, 2.0)
    assert not isinstance(dispatcher.admit(2.0, 2.0 + expected.needed_s(0.3), Place("doubtful", 0)), Refusal)


def test_inputs_that_fail_do_not_count_as_late() -> None:
    dispatcher = Dispatcher(FLAT, ALONE, Limits(retries=0))
    for second in range(10):
        now_s = float(second)
        for number in range(30):
            dispatcher.admit(now_s, now_s + 9.0, Place(number, 0))
        launches = dispatcher.tick(now_s)
        for _ in range(2):  # each is late with a probability of 39 %
            assert not isinstance(dispatcher.admit(now_s, now_s + 0.023, Place("doubtful", 0)), Refusal), second
        for launch in launches + dispatcher.tick(now_s):
            dispatcher.failed(launch.id, now_s + 0.01, "it broke")
        assert dispatcher.inside == 0


@given(
    st.lists(st.floats(0.02, 1.0), min_size=1, max_size=4),
    st.floats(0.01, 0.5),
    st.floats(-0.5, 0.5),
    st.floats(0.0, 0.4),
)
@settings(max_examples=50, deadline=None)
def test_needed_time_has_the_asked_probability(shares: list[float], chance: float, off: float, spread: float) -> None:
    survival = sorted(shares, reverse=True)
    estimates = Estimates([linear(each, each + 1, 1, "a", survival=share) for each, share in enumerate(survival)], 0.0)
    for number in range(len(survival)):
        estimates.expect(number, off, spread)
    # Stages so far apart that who is late at one is in time at those before it.
    ends_s = [10.0 * (number + 1) for number in range(len(survival))]
    expected = ExpectedTimes(estimates, 0.0, ends_s, full_launch_s=1.0)
    needed_s = expected.needed_s(chance)
    assert expected.late(needed_s + 1e-6) <= chance + 0.02
    assert expected.late(needed_s - 1e-6) >= min(chance, expected.late(0.0)) - 0.02


def test_measured_delays_correct_the_expected_times() -> None:
    estimates = Estimates([linear(0, 1, 1, "a")], slack=0.2)
    expected = ExpectedTimes(estimates, 0.0, [0.1], full_launch_s=0.05)
    for _ in range(300):
        expected.learn(0, 0.12)
    assert expected.mean_s == pytest.approx(0.12, abs=1e-3)
    assert expected.needed_s(0.01) == pytest.approx(0.12, abs=2e-3), "as sure as it was always the same"


def test_a_lane_with_learned_delays_gets_no_input_that_another_lane_answers_earlier() -> None:
    """Two lanes of one speed by the plan. Inputs wait in the first for what no table says."""
    sides = Route((linear(0, 1, 4, "a"),), beside=(Route((linear(0, 1, 4, "b"),)),))
    first, second = Dispatcher(sides, {"a": ["a"], "b": ["b"]})._lanes
    assert soonest([first, second], 0.0)[0] is first
    for _ in range(50):
        soonest([first], 0.0)[1].learn(0, 0.036)
    assert soonest([first, second], 0.0)[0] is second


@pytest.mark.parametrize("others_s", [None, 9.0])
def test_where_lateness_is_unavoidable_a_larger_share_may_be_late(others_s: float | None) -> None:
    """A launch takes 0.2 to 1.2 times longer than planned: one in five is late though nobody is ahead of it.

    Where that is so of all, who has nobody ahead is let in, and who has many ahead is not. Where most others have time
    (`others_s`), neither is.
    """
    dispatcher = Dispatcher(Route((linear(0, 1, 4, "a"),)), {"a": ["a"]})
    lane, limits, admission = dispatcher._lanes[0], Limits(), Admission()
    lane.estimates.expect(0, 0.7, 0.5)
    _, unhindered = soonest([lane], 0.0)
    left_s = unhindered.needed_s(0.2)
    dispatcher.admit(0.0, 9.0, Place("somebody is there", 0))

    def ask(expected: ExpectedTimes, seconds: float) -> float | Refusal:
        return admission.risk(lane, expected, seconds, 1, limits)

    ask(unhindered, left_s)
    for _ in range(10):
        admission.ended(0.0, late=True)
    assert isinstance(ask(unhindered, left_s), Refusal), "as far as is known, it is the only one"
    for number in range(300):
        risk = ask(unhindered, left_s if others_s is None or number % 100 == 0 else others_s)
        if not isinstance(risk, Refusal):
            admission.ended(risk, late=number % 4 == 0)
    assert isinstance(ask(unhindered, left_s), Refusal) == (others_s is not None)
    for number in range(20):
        dispatcher.admit(0.0, 99.0, Place(number, 0))
    assert isinstance(ask(soonest([lane], 0.0)[1], left_s), Refusal)


def test_an_input_for_the_full_network_is_refused_where_only_ramps_are_in_time() -> None:
    route = Route((Stage(0, 4, 1, "gpu", (0.01,)), Stage(4, 8, 1, "gpu", (0.2,), survival=0.005)))
    dispatcher = Dispatcher(route, {"gpu": ["g"]})
    dispatcher.admit(0.0, 60.0, Place("another", 0))
    for full, is_refused in ((False, False), (True, True)):
        assert isinstance(dispatcher.admit(0.0, 0.05, Place("input", 0), full=full), Refusal) == is_refused
        both = dispatcher.admit_all(0.0, 0.06, [Place("input", 0), Place("input", 1)], full=full)
        assert isinstance(both, Refusal) == is_refused


@pytest.mark.parametrize("route", [FLAT, Route((linear(0, 1, 4, "first"),))])
def test_an_input_without_time_for_the_first_exit_point_is_refused_however_idle_replicas_are(route: Route) -> None:
    """It comes while a launch runs, of which there are few."""
    calm = [Input(number / 20, route.num_blocks, slack_s=1.0) for number in range(40)]
    hopeless = [Input(each.at_s + 0.001, 1, slack_s=0.002) for each in calm[20:]]
    world = World(route, {stage.group: [stage.group] for stage in route.stages})
    world.arrive(*calm, *hopeless)
    world.run()
    assert len(world.refusals) == len(hopeless)


def test_devices_that_are_faster_than_planned_answer_inputs_with_less_time_than_planned() -> None:
    """A launch of one input is planned to take longer than these have, and takes a third of it."""
    stage = Stage(0, 2, 4, "a", (0.010, 0.012, 0.014, 0.016))
    world = World(Route((stage,)), {"a": ["a"]}, slow={"a": 1 / 3})
    world.arrive(*(Input(number / 20, 2, slack_s=1.0) for number in range(40)))
    world.arrive(*(Input(2.0 + number / 20, 2, slack_s=0.008) for number in range(20)))
    world.run()
    assert world.refusals == []
    assert {*world.outcomes.values()} == {Outcome.ANSWERED}


def test_a_request_whose_inputs_take_too_long_together_is_refused() -> None:
    """Each of them alone would be in time, and the replica is idle."""
    times = tuple(0.005 + 0.095 * size / 31 for size in range(32))
    route, places = Route((Stage(0, 2, 32, "a", times),)), [Place("request", row) for row in range(32)]

    def refused(inputs: int, within_s: float) -> bool:
        return isinstance(Dispatcher(route, {"a": ["a"]}).admit_all(0.0, within_s, places[:inputs]), Refusal)

    assert (refused(32, 0.06), refused(8, 0.06), refused(32, 0.2)) == (True, False, False)


def test_inputs_of_a_parked_application_wait_for_replicas_if_these_start_in_time() -> None:
    world = World(FLAT, ALONE)
    none: dict[str, list[str]] = {group: [] for group in ALONE}
    before_s = world.dispatcher.needed_s(0.0, 0.011)
    world.at(0.5, lambda: world.reroute(FLAT, none, wakes_in_s=2.0))
    world.arrive(Input(1.0, 2, slack_s=5.0), Input(1.5, 2, slack_s=1.4), Input(2.0, 1, slack_s=1.1))
    world.at(2.5, lambda: world.reroute(FLAT, none, wakes_in_s=2.0))
    world.arrive(Input(3.5, 2, slack_s=0.5))
    world.at(3.8, lambda: world.reroute(FLAT, ALONE))
    world.run()
    why = "the application is parked; its replicas are starting"
    assert world.refusals == [Refusal(why, after_s, parked=True) for after_s in (1.5, 2.0)]
    assert [world.outcomes[number] for number in range(2)] == [Outcome.ANSWERED, Outcome.EXPIRED]
    assert world.ended_s[0] == pytest.approx(3.8, abs=0.05)
    assert world.dispatcher.needed_s(9.0, 0.011) <= before_s, "the wait says nothing about launches"
