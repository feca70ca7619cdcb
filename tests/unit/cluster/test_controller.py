"""The controller on an application that behaves as the cost model says: what it decides, and what it never does."""

import asyncio
from dataclasses import replace
from math import inf

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.record import Event, Events, TrackRecord
from isobatch.cluster.controller.survival import EXPLORATIONS_PER_HOLD
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer import Objective, Plan
from isobatch.profiles.exits import carried
from isobatch.profiles.lengths import Lengths, rescaled
from isobatch.profiles.windows import History
from tests.helpers.fluid_application import (
    EASY,
    HARD,
    MEDIUM,
    Fluid,
    control_loop,
    first_plan,
    improvable,
    moves,
    question,
    run,
    table,
)


def share(app):
    return app.sustained_per_s(app.running) / app.best()


def test_inputs_that_change_are_followed_within_two_windows():
    app = Fluid(question(EASY))
    app.rate, app.truth = lambda at_s: 700.0, lambda at_s: EASY if at_s < 1200 else HARD
    loop = control_loop(app)
    assert not moves(run(app, loop, 1200))
    (event, *_) = moves(run(app, loop, 240))
    assert share(app) > 0.95
    assert (event.before, event.after) != (None, None)
    assert "inputs were refused" in event.why or "worth it" in event.why


def test_easy_inputs_are_noticed_though_all_ramps_are_closed():
    app = Fluid(question(HARD))
    assert not app.running.ramps
    app.rate, app.truth = lambda at_s: 700.0, lambda at_s: EASY
    run(app, control_loop(app), 1800, look_s=60)
    assert share(app) > 0.95


def test_nothing_is_opened_where_no_ramp_is_though_all_that_is_known_comes_from_a_look_behind_closed_ramps():
    problem = question((1.0, 1.0, 1.0, 0.9))
    tables = tuple(replace(each, ramp_s=((0.001, 0.0, 0.001, 0.0),) * 2) for each in problem.profile.tables)
    app = Fluid(replace(problem, profile=replace(problem.profile, tables=tables)))
    app.rate, app.truth = lambda at_s: 700.0, lambda at_s: (1.0, 0.3, 0.3, 0.1)
    loop = control_loop(app)
    for _ in range(60):
        run(app, loop, 30)
        assert loop.controller.known.cost_model().facts.ramp_blocks == {0, 2}
    assert {ramp for _, plan in app.rolled for ramp in plan.ramps} == {0, 2}
    assert share(app) > 0.95


def test_where_answers_are_early_ramps_follow_the_inputs_and_the_network_stays_in_one_piece():
    app = Fluid(replace(question(HARD), objective=Objective(slo_s=2.0, max_batch=8, ramp_budget=0.25)))
    assert [(split.stop, split.ramps) for split in app.running.splits] == [(4, ())], "hardly anybody would leave"
    app.truth = lambda at_s: EASY
    (event, *_) = moves(run(app, control_loop(app), 1800))
    assert "launches answer after 90 ms on average, with other ramps after" in event.why
    assert [(split.stop, split.ramps) for split in app.running.splits] == [(4, (0,))], "the budget allows one"


def test_half_of_the_requests_in_full_change_no_survival_but_what_plans_must_carry():
    app = Fluid(question(MEDIUM))
    app.full = lambda at_s: 0.5 if at_s > 900 else 0.0
    loop = control_loop(app)
    run(app, loop, 900)
    estimate = loop.controller.known.estimate
    assert estimate.full_share == 0.0
    run(app, loop, 240)  # until the first window that has them all
    for _ in range(2):
        assert estimate.survival == pytest.approx(MEDIUM, abs=0.02)
        assert estimate.full_share == pytest.approx(0.5, abs=0.02)
        assert estimate.carried == pytest.approx(carried(MEDIUM, 0.5), abs=0.02)
        assert loop.controller.known.cost_model().facts.survival == pytest.approx(carried(MEDIUM, 0.5), abs=0.02)
        run(app, loop, 900)
    assert share(app) > 0.95
    app.full = lambda at_s: 0.0
    run(app, loop, 360)
    assert estimate.full_share == pytest.approx(0.0, abs=0.02)
    assert estimate.survival == pytest.approx(MEDIUM, abs=0.02)


def test_inputs_that_a_look_behind_closed_ramps_sees_count_once(tmp_path):
    app = Fluid(question(HARD))
    app.truth = lambda at_s: HARD
    loop = control_loop(app, tmp_path)
    events = run(app, loop, 3600)
    assert sum(event.what == "looked" for event in events) > 3
    windows, began_s = History(tmp_path / "exits.jsonl").windows, loop.controller.window.began_s
    assert sum(window.answered for window in windows) == sum(good for at_s, good in app.answered if at_s <= began_s)
    ends_s = [window.start_s + window.duration_s for window in windows]
    assert [window.start_s for window in windows[1:]] == pytest.approx(ends_s[:-1]), "nor is any time left out"


BEHIND = (
    Patience().hold_windows // EXPLORATIONS_PER_HOLD + 2
)  # windows: until the next look behind closed ramps, to look, to decide


def follows_drift(eras, rates):
    """Survival and load jump every quarter of an hour: never many changes, and never behind the first plan for long.

    What happens between two closed ramps shows in no count before they are opened for a look, so `BEHIND` is the
    promise: no controller that pays for looks could keep a shorter one than the time between two of them.
    """
    problem = question(MEDIUM)
    first = first_plan(problem)
    app = Fluid(problem, first)
    app.truth = lambda at_s: (1.0, *eras[int(at_s / 900) % len(eras)])
    app.rate = lambda at_s: rates[int(at_s / 900) % len(rates)]
    loop = control_loop(app)
    worse = 0
    for window in range(30):
        events = run(app, loop, 120, look_s=60)
        behind = min(app.sustained_per_s(first), app.rate(app.now_s)) > 1.05 * min(
            app.sustained_per_s(app.running), app.rate(app.now_s)
        )
        worse = worse + 1 if behind else 0
        assert worse <= BEHIND, (window, events)
    late = [event.at_s for event in moves(loop.controller.record.events.all)]
    assert all(sum(start <= at_s < start + 3600 for at_s in late) <= 16 for start in late)


@settings(deadline=None, max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_under_any_drift_it_never_flaps_and_is_never_worse_than_the_first_plan_for_long(data):
    """Jumps to anything at all."""
    eras = [sorted(data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)), reverse=True) for _ in range(6)]
    follows_drift(eras, data.draw(st.lists(st.floats(1, 1000), min_size=6, max_size=6)))


@pytest.mark.parametrize(
    ("eras", "rates"),
    [
        pytest.param(
            [(0.02, 1e-5, 0), (0.691, 0.615, 0), (0.814, 0.716, 6e-8), (0.984, 0.713, 0)],
            [89.78, 2.00001, 885.17, 623.56],
            id="two inputs a second between rushes",
        ),
        pytest.param(
            [(0.36, 0.31, 0.18), (0.995, 0.986, 1e-4), (0.94, 0.04, 0), (0.998, 0.32, 0.25)],
            [729.4, 635.7, 825.5, 645.3],
            id="inputs leave earlier, but only behind a closed ramp",
        ),
        pytest.param(
            [(0.66, 0.2, 0), (0.35, 0, 0), (0.9997, 0.99, 0), (0.9998, 0.05, 0)],
            [761.1, 452.9, 288.8, 624.3],
            id="the same, and the load doubles",
        ),
    ],
)
def test_such_drift_is_followed_too(eras, rates):
    follows_drift(eras, rates)


@settings(deadline=None, max_examples=4)
@given(st.lists(st.floats(0.0, 900.0), min_size=1, max_size=2), st.sampled_from([EASY, MEDIUM, HARD]), st.booleans())
def test_while_nobody_asks_nothing_changes_whatever_was_before(rates, survival, quick):
    """Neither the plan nor its ramps; `dry-run` and the events say why."""
    problem = question(MEDIUM)
    first = problem.sustaining(16.0, MEDIUM, Corrections(), {}) if quick else first_plan(problem)
    app = Fluid(problem, first)
    app.truth = lambda at_s: survival
    app.rate = lambda at_s: rates[int(at_s // 300)] if at_s <= 300 * len(rates) - 30 else 0.0
    loop = control_loop(app)
    run(app, loop, 300 * len(rates) + 150)  # a window that is busy in part, and a trial, may still tell something
    before = len(app.rolled)
    events = run(app, loop, 2400, look_s=60)
    assert len(app.rolled) == before
    assert {event.what for event in events} == {"stayed"}
    assert all("no input arrived" in event.why for event in events)


def test_what_is_asked_by_hand_is_done_though_nobody_asks():
    app = improvable()
    few = app.running
    app.rate = lambda at_s: 0.0
    loop = control_loop(app)
    run(app, loop, 600)
    assert app.running == few
    asyncio.run(loop.force())
    assert app.running != few
    assert "worth it" in loop.controller.record.events.last.why


def test_tables_that_are_wrong_are_corrected_within_two_windows_and_within_bounds():
    app = Fluid(question(MEDIUM))
    app.slower = {"v100": 1.3}
    loop = control_loop(app)
    run(app, loop, 250)
    early = loop.controller.known.corrections.factors["v100"]
    assert all(1.2 < factor < 1.3 for factor in early)
    run(app, loop, 2400, look_s=60)
    assert loop.controller.known.corrections.factors["v100"] == pytest.approx((1.3,) * 4, abs=0.03)
    app.slower = {"v100": 30.0}
    run(app, loop, 1200, look_s=60)
    assert max(loop.controller.known.corrections.factors["v100"]) <= 2.0


def test_longer_texts_are_planned_for_by_the_times_of_longer_texts():
    """Where they were measured; in the plan's own unit, so that what was learnt before keeps its meaning."""
    short = replace(table("v100"), length=20)
    long = rescaled(short, 100)
    long = replace(long, block_s=tuple(tuple(1.5 * each for each in row) for row in long.block_s))
    problem = question(EASY)
    problem = replace(problem, profile=replace(problem.profile, tables=(short, long), lengths=Lengths((20,))))
    controller = Controller(problem, Patience(), History(None), Events(None), first_plan(problem), 0.0)
    before = controller.known.cost_model().facts
    for number in range(6):
        left = (0, 0, 0, 100_000)
        texts = Observed(
            120.0 * number, 120.0, 1000, 1000, left, arrived_weight=100_000, in_time_weight=100_000, exit_weights=left
        )
        controller.look(texts, 120.0 * (number + 1))
    assert controller.known.estimate.inputs_per_text == pytest.approx(5.0, rel=0.05)
    now = controller.known.cost_model().facts
    assert (before.length, now.length) == (20, 20)
    ratio = now.tables[0].block_times_s(4) / before.tables[0].block_times_s(4)
    assert ratio == pytest.approx([1.5] * 4, rel=0.05)
    one_table = replace(problem, profile=replace(problem.profile, tables=(short,)))
    assert one_table.with_text_length(5.0) is one_table


def test_a_pause_keeps_everything_and_says_what_it_would_have_done():
    app = improvable()
    loop = control_loop(app)
    asyncio.run(loop.pause(True))
    events = run(app, loop, 600)
    assert not moves(events)
    assert "paused (would change" in events[-1].why
    asyncio.run(loop.pause(False))
    assert moves(run(app, loop, 600))


def test_few_inputs_move_nothing():
    app = improvable()
    app.rate = lambda at_s: 0.01
    events = run(app, control_loop(app), 1200)
    assert not moves(events)
    assert f"a change needs {Patience().enough_inputs}" in events[-1].why


def at_10_000_s(plan: Plan | None = None) -> Controller:
    problem = question(MEDIUM)
    return Controller(problem, Patience(), History(None), Events(None), plan or first_plan(problem), 10_000.0)


def test_a_clock_that_is_set_back_by_an_hour_delays_no_decision_by_an_hour():
    controller, now_s, patience, decided = at_10_000_s(), 10_000.0, Patience(), []
    for look in range(80):
        before_s, now_s = now_s, now_s + patience.look_every_s - (3600.0 if look == 30 else 0.0)
        seen = Observed(before_s, now_s - before_s, 1000, 1000, (300, 200, 200, 300), devices={"v100": 4})
        if step := controller.look(seen, now_s):
            decided.append(look)
            if step.plan:
                controller.rolled_out(step, 1.0, now_s)
    looks = patience.replan_every_s / patience.look_every_s
    assert any(30 < look <= 31 + looks for look in decided)


def test_a_clock_that_is_set_back_neither_hides_refusals_nor_makes_an_application_busy():
    controller = at_10_000_s()
    looks = (10_000.0, 5.0, 900), (10_005.0, -3595.0, 900), (6410.0, 5.0, 90), (6415.0, 5.0, 0)
    for started_s, seconds, arrivals in looks:
        seen = Observed(started_s, seconds, arrivals, arrivals, (0, 0, 0, arrivals))
        controller.look(seen, started_s + seconds)
        if seconds > 0:
            assert controller.window.latest == seen
    assert controller.window.quiet_s == 5.0


def test_a_clock_that_is_set_back_does_not_delay_what_follows_refusals_after_a_failed_roll_out():
    controller = at_10_000_s(improvable().running)
    controller.failed(controller.force(10_000.0), "its node has gone", 10_000.0, blameless=True)
    refused = Observed(10_000.0, 1.0, 100, 50, (0, 0, 0, 50), refused=50)
    assert not controller.must_look(refused, 10_001.0)
    controller.look(replace(refused, seconds=-3600.0), 6400.0)
    assert controller.must_look(refused, 6401.0)


def test_a_clock_that_is_set_back_begins_a_trial_again():
    first = improvable().running
    controller, now_s, decided = at_10_000_s(first), 10_000.0, []
    controller.rolled_out(controller.force(now_s), 1.0, now_s)
    for look in range(20):
        before_s, now_s = now_s, now_s + 5.0 - (3600.0 if look == 2 else 0.0)
        step = controller.look(Observed(before_s, now_s - before_s, 10_000, 500, (0, 0, 0, 500)), now_s)
        decided += [(step.event.what, step.plan)] if step else []
    assert decided[:1] == [("rolling back", first)]


def test_what_was_decided_before_a_clock_was_set_back_is_not_recent_for_hours():
    worse, other = improvable().running, first_plan(question(MEDIUM))
    record = TrackRecord(Events(None), Patience())
    for what in ("rolled out", "rolled back", "tightened"):
        record.complete(Event(record.number, 0.0, what, "", worse, other), what, None, 10_000.0)
    for now_s, recent, unchanged_s in ((10_001.0, True, 1.0), (6400.0, False, inf)):
        assert (record.changes(now_s), record.tightened(now_s)) == (2 * recent, recent)
        assert record.unchanged_s(now_s) == unchanged_s
        assert (record.barred.until_s(worse, now_s) is not None) == recent


@pytest.mark.parametrize("took_s", [-3600.0, 1e9])
def test_a_clock_that_is_set_during_a_roll_out_makes_no_start_take_less_than_no_time_nor_years(took_s: float):
    controller = at_10_000_s(improvable().running)
    step = controller.force(10_000.0)
    controller.rolled_out(replace(step, event=replace(step.event, starts=1)), took_s, 10_000.0 + took_s)
    assert 0 <= controller.record.start_s < 600
