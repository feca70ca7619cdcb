"""The controller where a plan cannot stay: devices go, it is pinned or forced, it turns out worse, a roll-out fails."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.cluster.controller.arbiter import Grant
from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.decide import Trial, Verdict, served_alike
from isobatch.cluster.controller.record import Barred
from isobatch.cluster.controller.survival import with_all_ramps
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer import Objective, Placement, Plan, Split
from tests.helpers.fluid_application import (
    EASY,
    HARD,
    MEDIUM,
    Fluid,
    batches,
    control_loop,
    first_plan,
    granted,
    improvable,
    moves,
    question,
    run,
)


def test_a_lost_device_is_planned_around_at_once_and_used_again_when_it_is_back():
    app = Fluid(question(MEDIUM, v100=4))
    app.devices = lambda at_s: {"v100": 3 if 600 <= at_s < 1200 else 4}
    loop = control_loop(app)
    (lost,) = moves(run(app, loop, 660))
    assert lost.forced
    assert "1 of 4 v100 are gone" in lost.why
    assert "requested" not in lost.why, "none may come"
    assert app.running.devices() == {"v100": 3}
    run(app, loop, 660)
    assert app.running.devices() == {"v100": 4}


def test_a_device_that_was_lost_during_a_pause_is_planned_around_once_a_person_resumes():
    app = Fluid(question(MEDIUM, v100=4))
    app.devices = lambda at_s: {"v100": 3 if at_s >= 60 else 4}
    loop = control_loop(app)
    asyncio.run(loop.pause(True))
    run(app, loop, 300)
    assert app.running.devices() == {"v100": 4}
    asyncio.run(loop.pause(False))
    run(app, loop, 30)
    assert app.running.devices() == {"v100": 3}


def test_where_answers_are_early_devices_that_are_back_or_granted_are_used():
    """Answers come no sooner with them, but more inputs get one."""
    problem = replace(question(MEDIUM, v100=4), objective=Objective(slo_s=2.0, max_batch=8, ramp_budget=0.25))
    app = Fluid(problem)
    app.devices = lambda at_s: {"v100": 3 if 600 <= at_s < 1200 else 4}
    loop = control_loop(app, budget={"v100": 4})
    run(app, loop, 660)
    assert app.running.devices() == {"v100": 3}
    run(app, loop, 660)
    assert app.running.devices() == {"v100": 4}
    for count in (2, 4):
        granted(loop, Grant({"v100": count}, "by the arbiter"))
        assert app.running.devices() == {"v100": count}


class Slow(Fluid):
    """One of its replicas is benched. Those of a fleet stand by on four devices."""

    async def observe(self, devices: bool = True) -> Observed:
        return replace(await super().observe(devices), devices={"v100": 3}, benched=(("a#1", "v100"),))


def test_a_benched_replica_takes_a_device_of_the_budget_though_others_have_more():
    problem = question(MEDIUM, v100=4)
    app = Slow(problem, problem.best(MEDIUM, Corrections(), {"v100": 2}))
    run(app, control_loop(app, budget={"v100": 2}), 60)
    assert app.running.devices() == {"v100": 1}


class Recovering(Fluid):
    """One of its replicas is benched between 60 s and 300 s, and runs on beside the plan until the next roll-out."""

    async def observe(self, devices: bool = True) -> Observed:
        seen = await super().observe(devices)
        if not 60 <= self.now_s < 300:
            return seen
        present = {kind: count - 1 for kind, count in seen.devices.items()}
        return replace(seen, devices=present, benched=(("a#1", "v100"),))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_replica_that_is_fast_again_ends_where_the_cheapest_plan_does_without_it(
    restarts: bool, tmp_path: Path
) -> None:
    app = Recovering(replace(question(MEDIUM, v100=2), goal="cost"))
    app.rate = lambda at_s: 50.0
    loop = control_loop(app, tmp_path)
    (event,) = moves(run(app, loop, 240))
    assert ("1 of 2 v100 are gone" in event.why, app.running.devices()) == (True, {"v100": 1})
    before = len(app.rolled)
    if restarts:
        loop = control_loop(app, tmp_path)
    assert not moves(run(app, loop, 600)), "that is no change of plan"
    assert [plan for at_s, plan in app.rolled[before:] if at_s < 400] == [app.running]


def test_a_plan_for_what_is_left_is_not_judged_by_what_all_devices_would_have_done():
    """A device is away for long enough for a trial, and back before that would have ended."""
    app = Fluid(question(MEDIUM, v100=4))
    app.rate, app.devices = lambda at_s: 2000.0, lambda at_s: {"v100": 3 if 600 <= at_s < 690 else 4}
    loop = control_loop(app)
    lost, back = moves(run(app, loop, 1200))
    assert ("are gone" in lost.why, lost.what, back.what) == (True, "rolled out", "rolled out")
    assert loop.controller.record.barred.until_s(lost.after, app.now_s) is None


def test_when_devices_are_back_a_plan_that_ran_on_them_goes_before_idle_devices():
    """The best plan for them is barred, because it failed its trial."""
    problem = question(MEDIUM, v100=4)
    app = Fluid(problem, proven := batches(first_plan(problem), 6))
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan: 0.5 if plan == first_plan(problem) else 1.0
    app.devices = lambda at_s: {"v100": 3 if 600 <= at_s < 900 else 4}
    loop = control_loop(app)
    _, tried, fewer, back = moves(run(app, loop, 1500))
    assert (tried.what, fewer.forced, "are gone" in fewer.why) == ("rolled back", True, True)
    assert (back.what, back.after, app.running) == ("rolled out", proven, proven)
    asyncio.run(loop.force())
    assert served_alike(app.running, first_plan(problem)), "a person gets the best plan though it failed"


def test_a_plan_that_loses_a_device_is_no_worse_than_the_plan_before():
    """The device is gone for the second half of the trial. The plan before would answer more now: it has fewer."""
    problem = question(MEDIUM, v100=4)
    app = Fluid(problem, first_plan(question(MEDIUM, v100=3)))
    app.rate = lambda at_s: 2000.0
    app.devices = lambda at_s: {"v100": 3 if app.rolled and at_s >= app.rolled[0][0] + 65 else 4}
    loop = control_loop(app)
    grown, fewer = moves(run(app, loop, 240))
    assert (grown.after.devices(), fewer.forced, "are gone" in fewer.why) == ({"v100": 4}, True, True)
    assert loop.controller.record.barred.until_s(grown.after, app.now_s) is None


def test_a_plan_that_fails_on_two_devices_may_still_run_on_one():
    """A node may have died while the replica on it started: one device must be enough again when little arrives."""
    one, two, three = (Plan((Placement("k80", count, (Split(0, 8, 4),)),)) for count in (1, 2, 3))
    barred = Barred()
    barred.bar(two, one, now_s=0.0, seconds=100.0)
    assert [barred.until_s(plan, 99.0) for plan in (one, two, three)] == [None, 100.0, 100.0]
    assert barred.until_s(two, 101.0) is None


def test_another_cut_in_one_of_several_pipelines_is_no_way_around_a_bar():
    """Only a pipeline that ran before, too, is not why the plan failed."""
    first, second, third, cut = (
        Plan((Placement(kind, 4, splits),))
        for kind, splits in (
            ("v100", (Split(0, 8, 4),)),
            ("v100", (Split(0, 8, 32),)),
            ("k80", (Split(0, 8, 4),)),
            ("k80", (Split(0, 4, 4), Split(4, 8, 4))),
        )
    )
    barred = Barred()
    barred.bar(replace(second, beside=(third,)), replace(first, beside=(third,)), now_s=0.0, seconds=100.0)
    assert barred.until_s(replace(second, beside=(cut,)), 99.0) == 100.0
    assert barred.until_s(replace(cut, beside=(second,)), 99.0) == 100.0
    assert barred.until_s(replace(first, beside=(third,)), 99.0) is None


def test_a_pinned_plan_stays_and_the_reason_says_what_would_have_run():
    problem = question(EASY)
    app = Fluid(problem, mine := first_plan(problem))
    app.rate, app.truth = lambda at_s: 700.0, lambda at_s: EASY if at_s < 600 else HARD
    loop = control_loop(app, pinned=mine)
    events = run(app, loop, 1800)
    assert {event.what for event in events} == {"stayed"}  # no look behind closed ramps either
    assert any("the plan is pinned (without that: " in event.why and ": worth it" in event.why for event in events)


def test_a_pinned_plan_runs_again_when_its_devices_are_back():
    app = improvable()
    mine = app.running
    app.devices = lambda at_s: {"v100": 3 if 600 <= at_s < 1200 else 4}
    loop = control_loop(app, pinned=mine)
    lost, back = moves(run(app, loop, 1500))
    assert "1 of 4 v100 are gone" in lost.why
    assert "the devices of the pinned plan are present" in back.why
    assert app.running == mine


def test_while_paused_a_preview_says_so_though_the_devices_of_a_pinned_plan_are_back_or_the_better_plan_is_barred():
    app = improvable()
    mine = app.running
    app.devices = lambda at_s: {"v100": 3 if at_s < 600 else 4}
    pinned, other = control_loop(app, pinned=mine), improvable()
    run(app, pinned, 300)
    other.fails = lambda plan: True
    barred = control_loop(other)
    run(other, barred, 600)
    for each, loop in ((app, pinned), (other, barred)):
        asyncio.run(loop.pause(True))
        run(each, loop, 600)
    assert pinned.controller.preview(app.now_s).event.why.endswith(
        "paused (would change: the devices of the pinned plan are present)"
    )
    assert "paused (would stay: the better plan failed before" in barred.controller.preview(other.now_s).event.why


def test_a_device_that_comes_and_goes_does_not_move_the_plan_each_time():
    app = Fluid(question(MEDIUM, v100=4))
    app.devices = lambda at_s: {"v100": 3 + int(at_s / 60) % 2}
    loop = control_loop(app)
    back = [event for event in moves(run(app, loop, 1800)) if not event.forced]
    assert len(back) <= 6, "of fifteen times: each change doubles what the next one has to gain"
    app.devices = lambda at_s: {"v100": 4}
    run(app, loop, 7200)
    assert app.running.devices() == {"v100": 4}


def test_a_plan_that_turns_out_worse_is_rolled_back_and_not_tried_again_soon():
    app = improvable()
    first = app.running
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan: 1.0 if plan == first else 0.5
    events = moves(run(app, control_loop(app), 2400))
    assert [event.what for event in events[:2]] == ["rolled out", "rolled back"]
    assert events[0].gain_seen < 0 < events[0].gain_promised
    assert "worse than the previous plan" in events[1].why
    assert len(events) <= 6
    assert app.running == first


class Poisoned(Fluid):
    """A fifth of the inputs fail under any plan."""

    async def observe(self, devices: bool = True) -> Observed:
        seen = await super().observe(devices)
        return replace(seen, in_time=seen.in_time - seen.in_time // 5, excused=seen.in_time // 5)


def test_inputs_that_fail_do_not_speak_against_a_new_plan():
    problem = question(MEDIUM)
    app = Poisoned(problem, batches(first_plan(problem), 4))
    app.rate = lambda at_s: 200.0
    events = run(app, control_loop(app), 1200)
    assert [event.what for event in moves(events)] == ["rolled out"]
    assert "failed or were abandoned" in events[-1].why


def test_a_roll_back_that_fails_is_tried_once_and_bars_nothing():
    """The devices of the plan before do not start again: windows go on, and what is learned in them decides."""
    app = improvable()
    first = app.running
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan: 1.0 if plan == first else 0.5
    app.fails = lambda plan: served_alike(plan, first)
    loop = control_loop(app)
    while not (tried := [event for event in run(app, loop, 30) if "worse than the previous plan" in event.why]):
        assert app.now_s < 3600
    assert [(event.what, event.after) for event in tried] == [("failed", None)]
    assert loop.controller.record.barred.until_s(first, app.now_s) is None
    later = run(app, loop, 600)
    assert len(later) >= 4, "windows go on"
    assert not any("worse than the previous plan" in event.why for event in later)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_roll_back_that_a_lost_deployer_seemed_to_end_still_ends_in_the_plan_before(arrives: bool):
    app = improvable()
    first, rolls_out = app.running, app.roll_out
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan: 1.0 if plan == first else 0.5

    async def ends(plan: Plan) -> None:
        if not served_alike(plan, first):
            return await rolls_out(plan)
        app.running = plan if arrives else app.running
        raise ConnectionError("the deployer has ended")

    app.roll_out, loop = ends, control_loop(app)
    with pytest.raises(ConnectionError):
        run(app, loop, 3600)
    app.roll_out = rolls_out
    run(app, loop, 120)
    changes = moves([*loop.controller.record.events.all])
    assert [event.what for event in changes] == ["rolled out", "rolled back"], "the worse plan is not tried again"
    assert app.running == first


def test_harder_inputs_do_not_speak_against_a_new_plan():
    app = improvable(EASY)
    app.rate, app.truth = lambda at_s: 2000.0, lambda at_s: EASY if at_s < 150 else MEDIUM
    events = moves(run(app, control_loop(app), 1200))
    assert events
    assert "rolled back" not in {event.what for event in events}


def test_a_roll_out_that_fails_leaves_the_plan_and_is_not_repeated_at_once():
    app = improvable()
    first = app.running
    app.fails = lambda plan: True
    events = moves(run(app, control_loop(app), 1700))
    assert [event.what for event in events] == ["failed"]
    assert "a replica did not start" in events[0].why
    assert app.running == first


def test_a_plan_whose_devices_vanished_while_it_was_rolled_out_is_tried_again_in_the_next_window():
    app = improvable()
    app.devices_vanish, app.fails = True, lambda plan: app.now_s < 200
    events = [event for event in run(app, control_loop(app), 700) if "did not start" in event.why or event.after]
    *failed, last = events
    assert ({event.what for event in failed}, last.what) == ({"stayed"}, "rolled out")
    assert last.at_s - failed[-1].at_s < 200


def test_a_look_that_fails_is_no_change_and_not_repeated_before_the_next_is_due():
    app = Fluid(question(HARD))
    app.truth, app.fails = lambda at_s: HARD, lambda plan: True
    events = [event for event in run(app, control_loop(app), 1700) if "did not start" in event.why]
    assert [event.what for event in events] == ["stayed", "stayed"]
    assert events[1].at_s - events[0].at_s >= 600


def opened_for_a_look() -> tuple[Fluid, ControlLoop, Plan]:
    """An application whose plan changes for looks only, and the plan before this one."""
    app = improvable(HARD)
    before = app.running
    app.truth = lambda at_s: HARD
    loop = control_loop(app, least_gain=9.0)
    while not loop.controller.exploring:
        run(app, loop, 30)
        assert app.now_s < 3600
    return app, loop, before


def test_ramps_are_not_opened_for_a_look_where_every_input_asks_for_the_whole_network():
    app = improvable()
    app.full = lambda at_s: 1.0
    events = run(app, control_loop(app), 1700)
    assert len(events) > 9
    assert not any("all ramps open" in event.why for event in events)


def test_a_look_in_which_no_input_comes_changes_no_expectation():
    app, loop, _ = opened_for_a_look()
    app.rate, before = lambda at_s: 0.0, loop.controller.known.estimate.survival
    run(app, loop, 30)
    (event,) = (each for each in loop.controller.record.events.all if each.what == "looked")
    assert event.why == "no input that may leave at a ramp came while all were open"
    assert loop.controller.known.estimate.survival == before


def test_what_is_forced_while_ramps_are_open_for_a_look_stays():
    app, loop, few = opened_for_a_look()
    app.now_s += 2
    event = asyncio.run(loop.force())
    assert (event.what, event.before) == ("rolled out", few), "not the one with all ramps open"
    run(app, loop, 90)
    assert app.running == event.after
    assert not served_alike(app.running, few)


def test_what_is_forced_after_ramps_could_not_be_closed_stays():
    app, loop, few = opened_for_a_look()
    app.fails = lambda plan: served_alike(plan, few)
    app.now_s += 2
    event = asyncio.run(loop.force())
    assert event.what == "rolled out"
    app.fails = lambda plan: False
    run(app, loop, 90)
    assert app.running == event.after


def test_what_is_forced_runs_at_once_though_a_look_behind_closed_ramps_is_due():
    """The inputs have changed, and a pinned plan was never changed for a look."""
    app = improvable(HARD)
    app.running = few = with_all_ramps(app.running, [1])
    app.truth = lambda at_s: HARD if at_s < 300 else EASY
    loop = control_loop(app, pinned=few)
    run(app, loop, 600)
    event = asyncio.run(loop.force())
    assert (event.what, event.before) == ("rolled out", few)


def test_what_somebody_else_rolls_out_while_ramps_are_open_for_a_look_stays():
    app, loop, few = opened_for_a_look()
    app.running = other = batches(few, 7)
    (event,) = run(app, loop, 60)
    assert (event.what, app.running) == ("began", other)


def test_looks_under_a_plan_belong_to_no_window_of_a_plan_that_somebody_else_rolls_out():
    app = Fluid(question(MEDIUM))
    app.rate = lambda at_s: 200.0
    loop = control_loop(app)
    run(app, loop, 90)
    assert loop.controller.window.observed.seconds == 90
    app.running = batches(app.running, 7)
    run(app, loop, 30)
    assert loop.controller.window.observed.seconds == 30


def test_ramps_that_could_not_be_closed_after_a_look_are_closed_at_the_next_one():
    app, loop, first = opened_for_a_look()
    opened = app.running
    app.fails = lambda plan: app.running == opened
    run(app, loop, 30)
    assert app.running == opened
    app.fails = lambda plan: False
    run(app, loop, 30)
    assert (app.running, loop.controller.exploring) == (first, None)


def test_ramps_that_a_deployer_opened_although_it_ended_are_closed_at_the_next_look():
    """The next deployer goes on with the plan that was stored."""
    app = improvable(HARD)
    few, rolls_out = app.running, app.roll_out
    app.truth = lambda at_s: HARD

    async def ends(plan: Plan) -> None:
        app.running = plan
        raise ConnectionError("the deployer has ended")

    app.roll_out, loop = ends, control_loop(app, least_gain=9.0)
    with pytest.raises(ConnectionError):
        run(app, loop, 3600)
    app.roll_out = rolls_out
    run(app, loop, 30)
    assert (app.running, loop.controller.exploring) == (few, None)


def test_a_roll_out_that_ends_with_the_deployer_is_noted_and_bars_no_plan():
    app = improvable()

    def dies(plan: Plan) -> bool:
        raise ConnectionError("the deployer has ended")

    app.fails, loop = dies, control_loop(app)
    with pytest.raises(ConnectionError):
        run(app, loop, 600)
    last = loop.controller.record.events.last
    assert (last.what, last.why.endswith("but ConnectionError: the deployer has ended")) == ("stayed", True)
    app.fails = lambda plan: False
    assert [event.what for event in moves(run(app, loop, 300))] == ["rolled out"]


def test_a_fleet_whose_inputs_all_ask_for_the_full_network_gets_a_plan_for_it():
    app = improvable(EASY)
    app.rate, app.full = lambda at_s: 700.0, lambda at_s: 1.0
    assert {event.what for event in moves(run(app, control_loop(app), 900))} == {"rolled out"}
    assert app.sustained_per_s(app.running) > 0.95 * app.best()
    assert app.running.ramps == ()


def test_while_paused_what_is_forced_changes_nothing_and_a_pinned_plan_stays_pinned():
    app = improvable(EASY)
    mine = app.running
    loop = control_loop(app, pinned=mine)
    asyncio.run(loop.pause(True))
    asyncio.run(loop.force())
    asyncio.run(loop.pause(False))
    run(app, loop, 600)
    assert app.running == mine


def judged(kept_share: float, *looked: object) -> Verdict:
    """A trial of two such looks, of which the first covers the change."""
    trial = Trial(1, first_plan(question(MEDIUM)), kept_share)
    for started_s in (0.0, 60.0):
        trial.add(Observed(started_s, 60.0, 30_000, *looked))
    return trial.judge(lambda plan: 1500.0, least_loss=0.1)


@pytest.mark.parametrize(("kept_share", "good", "worse"), [(1.2, 30_000, False), (0.5, 15_000, True)])
def test_a_trial_with_room_to_spare_expects_an_answer_to_each_input_and_no_more(kept_share, good, worse):
    """Whatever share of its promise the plan before has kept under load."""
    verdict = judged(kept_share, good, (0, 0, 0, good), {LaunchShape("v100", 0, 4, 8): LaunchTimes(10, 1.0)})
    assert (verdict.moves, verdict.why.endswith("would have answered 500/s")) == (worse, True)


@pytest.mark.parametrize(("in_time", "worse"), [(15_000, False), (12_000, True)])
def test_a_trial_of_texts_counts_on_as_many_late_tokens_as_before(in_time, worse):
    """Half of them are late although few come. They report no launches."""
    assert judged(0.5, in_time, (0, 0, 0, 30_000)).moves == worse
