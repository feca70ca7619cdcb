"""What the controller does when more comes than before, and what it learns of what a plan really sustains."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.application import RecentCounts
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.record import Events, NextStep, TrackRecord
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer import Plan
from isobatch.optimizer.goals import GOALS
from isobatch.profiles.windows import History
from tests.helpers.fluid_application import MEDIUM, Fluid, control_loop, first_plan, improvable, moves, question, run

QUICK, MOST = question(MEDIUM).sustaining(16.0, MEDIUM, Corrections(), {}), first_plan(question(MEDIUM))
SHAPE = LaunchShape("v100", 0, 4, 8)
looks = st.lists(
    st.tuples(st.integers(0, 3000), st.floats(0, 1), st.floats(0, 1), st.integers(2, 4)), min_size=1, max_size=40
)


def beginning(running: Plan, **fields: Any) -> Controller:
    """A controller that has seen nothing yet. `fields`: of the question."""
    return Controller(replace(question(MEDIUM), **fields), Patience(), History(None), Events(None), running, 0.0)


@settings(deadline=None, max_examples=10)
@given(looks, st.sampled_from([QUICK, MOST]), st.sampled_from(sorted(GOALS)))
def test_refusals_never_cost_goodput(looks: list[tuple[int, float, float, int]], running: Plan, goal: str) -> None:
    """Whatever was seen: a sentence that tells of refused inputs, or of too many, tells of no goodput given up."""
    controller, now_s = beginning(running, goal=goal), 0.0
    for arrivals, in_time, refused, devices in looks:
        now_s += 30.0
        good = round(arrivals * in_time)
        turned_away = round((arrivals - good) * refused)
        launches = {SHAPE: LaunchTimes(10, 4 * 30.0 * in_time)}
        here = {"v100": devices}
        observed = Observed(now_s - 30.0, 30.0, arrivals, good, (0, 0, 0, good), launches, here, refused=turned_away)
        if (step := controller.look(observed, now_s)) is None:
            continue
        why = step.event.why
        missed = any(words in why for words in ("were refused", "more inputs arrive", " were answered in time;"))
        if missed and "arrived and were answered in time" not in why:
            assert "given up" not in why
            if step.plan and step.event.what == "rolling out" and not step.event.forced:
                sustains = controller.known.sustains_per_s
                assert sustains(step.plan) >= sustains(controller.running)
        if step.plan:
            if "were refused" in why:
                assert controller.known.sustains_per_s(step.plan) > controller.known.sustains_per_s(controller.running)
            here = controller.present.counts["v100"]
            assert step.plan.devices()["v100"] <= here or step.event.what in ("looked", "rolling back")
            controller.rolled_out(step, 0.1, now_s)


class CountingQuestion(type(question(MEDIUM))):  # type: ignore[misc]
    """Counts how often plans are sought."""

    sought = 0

    def best(self, *arguments: object) -> Plan:
        type(self).sought += 1
        return super().best(*arguments)


@pytest.mark.parametrize("running", [QUICK, MOST])
def test_a_burst_is_answered_within_two_seconds_and_plans_are_not_sought_each_second(running: Plan) -> None:
    problem = question(MEDIUM)
    app = Fluid(CountingQuestion(**vars(problem)), running)
    app.rate = lambda at_s: 8.0 if at_s <= 60 else 2000.0
    loop = control_loop(app, replan_every_s=3600.0)
    run(app, loop, 60, look_s=1.0)
    assert app.running == running, "in the first minute of few inputs nothing is known that would speak for a change"
    CountingQuestion.sought = 0
    events = moves(run(app, loop, 30, look_s=1.0))
    assert CountingQuestion.sought <= 1
    if running is MOST:
        assert not events
        return
    (event,) = events
    assert event.at_s <= 62.0
    assert "inputs were refused" in event.why
    assert app.sustained_per_s(app.running) >= 0.97 * app.best()


def test_refusals_change_nothing_while_a_person_has_paused_or_pinned() -> None:
    for pinned in (None, QUICK):
        app = Fluid(question(MEDIUM), QUICK)
        app.rate = lambda at_s: 2000.0
        loop = control_loop(app, pinned=pinned)
        if pinned is None:
            asyncio.run(loop.pause(True))
        run(app, loop, 100, look_s=1.0)
        assert app.running == QUICK


def test_a_plan_that_sustains_less_than_it_promises_is_known_within_two_windows_and_the_decision_says_so() -> None:
    """Fewer inputs come than are promised, and an eighth of them is refused."""
    app = Fluid(question(MEDIUM))
    promised = app.sustained_per_s(app.running)
    app.poor = lambda plan: 0.6
    app.rate = lambda at_s: 0.68 * promised
    loop = control_loop(app, look_every_s=5.0)
    events = run(app, loop, 245, look_s=5.0)
    controller = loop.controller
    assert controller.known.sustains_per_s(app.running) == pytest.approx(0.6 * promised, rel=0.03)
    assert any(f"promised {promised:.0f}/s and sustains" in event.why for event in events)


def look(at: int, arrivals: int, in_time: int, refused: int, busy: float) -> Observed:
    """A second of four devices."""
    launches = {SHAPE: LaunchTimes(10, 4 * busy)}
    return Observed(float(at), 1.0, arrivals, in_time, (0, 0, 0, in_time), launches, refused=refused)


def kept(*windows: list[Observed]) -> float:
    """Of 400 inputs per second that the cost model predicts."""
    record = TrackRecord(Events(None), Patience())
    for window in windows:
        record.add_window(window, MOST, 400.0)
    return record.kept_share


def overload(seconds: int) -> list[Observed]:
    return [look(at, 300, 260, 40, 1.0) for at in range(seconds)]


def test_what_is_answered_while_inputs_are_refused_is_what_a_plan_sustains() -> None:
    calm = [look(at, 60, 60, 0, 0.3) for at in range(10)]
    assert kept(calm) == 1.0, "few inputs tell nothing of what more would bring"
    assert kept(overload(120), overload(120)) == pytest.approx(260 / 400, rel=0.03)
    assert kept(overload(120), calm) == kept(overload(120)), "it is not forgotten in calm"
    edges = look(0, 300, 150, 100, 0.9), look(10, 100, 120, 5, 0.5)
    assert 0.85 < kept([*calm, edges[0], *overload(9), edges[1], *calm]) < 1.0, "a burst of seconds proves little"
    between = kept([*overload(7), *[look(0, 100, 100, 0, 0.3)] * 50, *overload(7)])
    assert between == pytest.approx(kept(overload(12))), "calm between two bursts is no part of what a plan sustains"


@given(st.lists(st.lists(st.integers(0, 290), min_size=2, max_size=120), min_size=1, max_size=5))
def test_no_window_moves_the_kept_share_beyond_what_it_measured(windows: list[list[int]]) -> None:
    """Nor by more than the time of the overload proves."""
    record, before = TrackRecord(Events(None), Patience()), 1.0
    for window in windows:
        record.add_window([look(at, 300, each, 10, 1.0) for at, each in enumerate(window)], MOST, 400.0)
        measured, after = sum(window[1:]) / len(window[1:]) / 400, record.kept_share
        assert min(before, measured) - 1e-9 <= after <= max(before, measured) + 1e-9
        assert abs(after - before) <= abs(measured - before) * len(window) / (len(window) + 20)
        before = after


@settings(deadline=None, max_examples=20)
@given(st.floats(0.3, 1.2), st.sampled_from([QUICK, MOST]))
def test_the_kept_share_prefers_no_plan_to_another(share: float, running: Plan) -> None:
    plans = list[Plan | None]()
    for each in (1.0, share):
        controller = beginning(running)
        controller.record.kept_share = each
        launches = {SHAPE: LaunchTimes(10, 4 * 120.0)}
        missed = Observed(0.0, 120.0, 20_000, 15_000, (0, 0, 0, 15_000), launches, {"v100": 4}, refused=5_000)
        step = controller.look(missed, 120.0)
        plans.append(step.plan and step.plan.unpromised)
    assert plans[0] == plans[1]


def test_one_overloaded_window_brings_no_earlier_plan_back() -> None:
    """In that window the machine had other work, as all plans would have felt."""
    app = improvable()
    first = app.running
    loop = control_loop(app, look_every_s=5.0)
    run(app, loop, 600, look_s=5.0)
    assert app.running != first
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan: 0.7
    events = run(app, loop, 125, look_s=5.0)
    app.poor = lambda plan: 1.0
    assert not moves([*events, *run(app, loop, 600, look_s=5.0)])


def test_what_is_refused_to_clients_who_cannot_be_answered_in_time_is_no_sign_of_overload() -> None:
    """Devices that are idle are not why inputs are refused, and clients who wait for a moment only do not count."""
    idle = [look(at, 100, 80, 20, 0.2) for at in range(20)]
    assert kept(idle) == 1.0, "a fifth was lost, though not to a lack of goodput"
    impatient = [look(at, 100, 99, 0, 0.9) for at in range(20)]
    assert kept(impatient) == 1.0


def test_a_plan_that_answers_as_much_as_it_promised_is_believed_again() -> None:
    short = [look(at, 400, 200, 200, 1.0) for at in range(20)]
    full = [look(at, 390, 388, 0, 1.0) for at in range(20)]
    assert kept(short) < 0.8
    assert kept(short, full) == pytest.approx(388 / 400)


def test_however_long_all_answers_are_late_a_better_plan_is_still_better() -> None:
    """As those of texts, which report no launches."""
    controller, late = beginning(improvable().running), Observed(0.0, 120.0, 20_000, 0, (0, 0, 0, 20_000))
    for _ in range(100):
        controller.record.add_window([late], controller.running, 400.0)
    step = controller.look(late, 120.0)
    assert step
    assert step.event.what == "rolling out"


def test_where_dollars_count_the_devices_that_other_work_of_the_machine_cost_are_given_back() -> None:
    """At a steady load, which is less than half of what the larger plan promises."""
    app = Fluid(replace(question(MEDIUM), goal="cost"))
    app.rate = lambda at_s: 150.0
    loop = control_loop(app)
    loop.controller.record.kept_share = 0.7
    while app.running.devices() != {"v100": 2}:
        run(app, loop, 600)
        assert app.now_s < 3 * 3600
    run(app, loop, 1200)
    assert app.running.devices() == {"v100": 2}, "they are not taken again"


@pytest.mark.parametrize("launch_s", [0.04, 0.0004])
def test_the_time_between_two_launches_is_a_cost_of_each(launch_s: float) -> None:
    """Beyond the wait that plans assume: the rest of the order's way, after a launch that is shorter."""
    problem = question(MEDIUM)
    plan = first_plan(problem)
    plan = replace(plan, placements=tuple(replace(each, local=True) for each in plan.placements))
    facts = problem.facts(MEDIUM, Corrections())
    beyond_s = 0.003 - max(0.0, facts.turn_s("v100") - launch_s)
    times = LaunchTimes(200, 200 * launch_s, followed=150, between_s=150 * 0.003)
    launches = {LaunchShape("v100", each.start, each.stop, each.batch_size): times for each in plan.splits}
    seen = Observed(0.0, 10.0, 1000, 1000, (0, 0, 0, 1000), launches)
    learned = Corrections()
    for _ in range(500):
        learned = learned.learned(seen, plan, facts, 0.6)
    assert learned.between_s["v100"] == pytest.approx(beyond_s, rel=0.05)
    (before,), (after,) = (
        [table.launch_s for table in profile.tables if table.kind == "v100"]
        for profile in (problem.profile, replace(learned, factors={}).applied(problem.profile))
    )
    assert after - before == pytest.approx(beyond_s, rel=0.05)


def test_where_dollars_count_devices_of_both_kinds_are_given_back_and_none_is_planned_for_that_is_not_there() -> None:
    app = Fluid(replace(question(MEDIUM, v100=2, k80=3), goal="cost"))
    app.rate, app.devices = lambda at_s: 20.0, lambda at_s: {"v100": 2, "k80": 2}
    loop = control_loop(app)
    run(app, loop, 600)
    assert sum(app.running.devices().values()) <= 2
    app.rate = lambda at_s: 2000.0
    run(app, loop, 180)
    assert app.running.devices() == {"v100": 2, "k80": 2}, "all that there are"


def test_where_dollars_count_devices_come_early_though_the_plan_promised_enough() -> None:
    """It keeps three fifths of its promise, four fifths arrive."""
    running = question(MEDIUM).best(MEDIUM, Corrections(), {"v100": 2})
    controller = beginning(running, goal="cost")
    arrive = round(0.8 * 15 * controller.known.promises_per_s(running))
    controller.record.kept_share = 0.6
    for started_s, good in ((0.0, arrive), (15.0, round(0.75 * arrive))):
        step = controller.look(Observed(started_s, 15.0, arrive, good, (0, 0, 0, good)), started_s + 15.0)
    assert step.event.why.startswith("more inputs arrive than the running plan sustains: ")
    assert step.plan.devices()["v100"] > 2


def test_where_dollars_count_devices_come_early_though_few_inputs_arrive_in_each_look() -> None:
    running = question(MEDIUM).best(MEDIUM, Corrections(), {"v100": 2})
    controller = beginning(running, goal="cost")
    look_s = 40 / (2 * controller.known.promises_per_s(running))  # 40 arrive in each: twice what is sustained
    steps = list[NextStep | None]()
    while not any(steps):
        started_s = len(steps) * look_s
        seen = Observed(started_s, look_s, 40, 20, (0, 0, 0, 20))
        steps.append(controller.look(seen, started_s + look_s))
    assert steps[-1]
    assert steps[-1].event.why.startswith("more inputs arrive than the running plan sustains: ")
    assert len(steps) * look_s < 31.0


def test_where_dollars_count_a_failed_roll_out_does_not_end_what_follows_refusals_for_good() -> None:
    controller = beginning(improvable().running, goal="cost")
    controller.failed(controller.force(0.0), "a replica did not start", 0.0)
    refused = Observed(0.0, 1.0, 100, 50, (0, 0, 0, 50), refused=50)
    assert not controller.must_look(refused, 60.0), "the same plan would fail again"
    assert controller.look(Observed(0.0, 120.0, 48_000, 24_000, (0, 0, 0, 24_000)), 120.0)
    assert controller.must_look(refused, 121.0)


def test_a_front_that_did_not_answer_at_first_brings_no_counts_of_hours() -> None:
    counts, early = RecentCounts(), Observed(0.0, 3600.0, 1000, 1000, (1000,))
    assert counts.update({"a": early}) == [early]
    late, new = Observed(0.0, 3605.0, 900, 900, (900,)), Observed(3601.0, 4.0, 7, 7, (7,))
    counted = counts.update({"a": replace(early, seconds=3605.0, arrivals=1010), "b": late, "c": new})
    assert [(each.arrivals, each.seconds) for each in counted] == [(10, 5.0), (0, 0.0), (7, 4.0)]
