"""A controller that begins again in the folder of the one before: it knows what that one knew and was at."""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.record import KEEP_EVENTS, Event, Events
from isobatch.optimizer import Plan, evaluate
from isobatch.profiles.journal import SCHEMA_VERSION
from tests.helpers.fluid_application import (
    HARD,
    MEDIUM,
    Fluid,
    control_loop,
    first_plan,
    improvable,
    moves,
    question,
    run,
)


def test_a_restart_goes_on_where_it_was(tmp_path: Path):
    app = improvable()
    first = app.running
    app.rate, app.poor, app.slower = lambda at_s: 2000.0, lambda plan: 1.0 if plan == first else 0.5, {"v100": 1.2}
    before = control_loop(app, tmp_path, react_every_s=0.001)
    run(app, before, 900)
    asyncio.run(before.pause(True))
    after = control_loop(app, tmp_path)
    assert after.controller.record.events.all == before.controller.record.events.all
    assert after.controller.known.corrections == before.controller.known.corrections
    assert after.controller.record.paused
    assert after.controller.record.kept_share == before.controller.record.kept_share < 1.0
    assert after.controller.known.estimate.recent_inputs == before.controller.known.estimate.recent_inputs
    asyncio.run(after.pause(False))
    assert not moves(run(app, after, 300)), "what was rolled back is remembered"


def test_events_of_an_older_controller_are_read(tmp_path: Path):
    """It called the requested devices `asked`."""
    event = Event(1, 0.0, "stayed", "", first_plan(question(MEDIUM)), requested={"v100": 5})
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps({"v": SCHEMA_VERSION, **asdict(event)}).replace('"requested"', '"asked"') + "\n")
    assert Events(file).all == (event,)


def test_a_pause_lasts_until_a_person_resumes_however_many_decisions_follow(tmp_path: Path):
    """They are written to disk at once here: one by one they take ten seconds."""
    problem = question(MEDIUM)
    app = Fluid(problem, first_plan(problem))
    loop = control_loop(app)
    asyncio.run(loop.pause(True))
    record, decision = loop.controller.record, loop.controller.preview(app.now_s).event
    for _ in range(KEEP_EVENTS):
        record.add(replace(decision, number=record.number))
    assert record.paused
    lines = [json.dumps({"v": SCHEMA_VERSION, **asdict(event)}) for event in record.events.all]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    begun_again = control_loop(app, tmp_path).controller.record
    assert len(begun_again.events.all) == KEEP_EVENTS
    assert begun_again.paused
    asyncio.run(loop.pause(False))
    assert not record.paused


@pytest.mark.parametrize(("arrives", "told"), [(True, "rolled out"), (False, "stayed")])
def test_a_restart_in_the_middle_of_a_roll_out_finds_out_what_became_of_it(tmp_path: Path, arrives: bool, told: str):
    app = improvable()
    wanted = killed_in_a_roll_out(app, tmp_path)
    app.running = wanted if arrives else app.running
    after = control_loop(app, tmp_path)
    event = after.controller.record.events.last
    assert (event.what, "was restarted meanwhile" in event.why) == (told, True)
    assert after.controller.running == app.running


def test_a_plan_that_arrives_after_a_restart_is_on_trial(tmp_path: Path):
    app = improvable()
    first = app.running
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan: 1.0 if plan == first else 0.5
    wanted = killed_in_a_roll_out(app, tmp_path)
    after = control_loop(app, tmp_path)
    app.running = wanted  # the deployer has gone on meanwhile
    run(app, after, 120)
    arrived, back = moves([*after.controller.record.events.all])
    assert (arrived.what, arrived.why.endswith("it has arrived since")) == ("rolled out", True)
    assert (back.what, app.running) == ("rolled back", first)


def killed_in_a_roll_out(app: Fluid, folder: Path) -> Plan:
    """Run until a controller ends in the middle of a roll-out: the plan that it wanted."""
    wanted, rolls_out = list[Plan](), app.roll_out

    async def killed(plan):
        wanted.append(plan)
        raise KeyboardInterrupt

    app.roll_out = killed
    with pytest.raises(KeyboardInterrupt):
        run(app, control_loop(app, folder), 600)
    app.roll_out = rolls_out
    return wanted[0]


def changed(app: Fluid, folder: Path | None) -> tuple[Plan, ControlLoop]:
    """Run until the plan changes: the plan before, and the control loop."""
    first, loop = app.running, control_loop(app, folder)
    while app.running == first:
        run(app, loop, 30)
        assert app.now_s < 3600
    return first, loop


def test_a_restart_during_a_trial_begins_it_again(tmp_path: Path):
    app = improvable()
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan, first=app.running: 1.0 if plan == first else 0.5
    first, _ = changed(app, tmp_path)
    (event,) = moves(run(app, control_loop(app, tmp_path), 120))
    assert (event.what, app.running) == ("rolled back", first)


def test_a_roll_back_in_which_a_controller_ended_is_decided_again(tmp_path: Path):
    app = improvable()
    app.rate, app.poor = lambda at_s: 2000.0, lambda plan, first=app.running: 1.0 if plan == first else 0.5
    first, _ = changed(app, tmp_path)
    assert killed_in_a_roll_out(app, tmp_path).unpromised == first.unpromised
    assert app.running != first
    (back,) = moves(run(app, control_loop(app, tmp_path), 120))
    assert (back.what, app.running) == ("rolled back", first)


def test_a_restart_does_not_repeat_a_trial_that_has_ended(tmp_path: Path):
    _, loop = changed(app := improvable(), tmp_path)
    for tried in (True, False):
        assert (control_loop(app, tmp_path).controller.record.trial(app.running) is not None) == tried
        run(app, loop, 240)


def looking(folder: Path | None) -> tuple[Fluid, Plan, ControlLoop]:
    """An application whose ramps are all open for a look, its plan before that, and its control loop."""
    app = Fluid(question(HARD))
    app.truth = lambda at_s: HARD
    app.rate = lambda at_s: 200.0  # without refusals, after which another plan would run at once
    return app, *changed(app, folder)


@pytest.mark.parametrize("paused", [False, True])
def test_a_restart_while_ramps_were_open_closes_them_again_though_a_person_has_paused(tmp_path: Path, paused: bool):
    app, first, loop = looking(tmp_path)
    if paused:
        asyncio.run(loop.pause(True))
    run(app, control_loop(app, tmp_path), 90)
    assert app.running == first


def test_a_restart_before_ramps_were_closed_again_closes_them(tmp_path: Path):
    app, first, loop = looking(tmp_path)

    async def killed(plan: Plan) -> None:
        raise KeyboardInterrupt

    app.roll_out, rolls_out = killed, app.roll_out
    with pytest.raises(KeyboardInterrupt):
        run(app, loop, 30)
    app.roll_out = rolls_out
    run(app, control_loop(app, tmp_path), 90)
    assert app.running == first


def test_a_restart_after_ramps_could_not_be_closed_closes_them(tmp_path: Path):
    app, first, loop = looking(tmp_path)
    app.fails = lambda plan: True
    run(app, loop, 30)
    assert app.running != first
    app.fails = lambda plan: False
    run(app, control_loop(app, tmp_path), 30)
    assert app.running == first


def test_another_configuration_that_is_deployed_while_ramps_were_open_closes_them_again_and_keeps_a_pause():
    """It has a memory of its own, which does not know of that."""
    app, first, before = looking(None)
    after = control_loop(app)
    asyncio.run(before.pause(True))
    after.continue_from(before)
    assert after.controller.record.paused, "a person has not resumed it"
    run(app, after, 30)
    assert app.running == first
    assert [event.what for event in after.controller.record.events.all] == ["began", "looked", "paused"]


def test_a_restart_after_another_configuration_began_while_ramps_were_open_closes_them(tmp_path: Path):
    app, first, before = looking(tmp_path)
    (folder := tmp_path / "next").mkdir()
    control_loop(app, folder).continue_from(before)
    run(app, control_loop(app, folder), 90)
    assert app.running == first


def test_links_that_are_declared_later_are_learned(tmp_path: Path):
    """The application is deployed anew, and the plan that runs sends survivors over what is slow now."""
    problem = replace(question(MEDIUM), one_machine=False)
    app = Fluid(problem)
    before = control_loop(app, tmp_path, react_every_s=0.001)
    run(app, before, 900)
    looked, first = before.spent.looks, app.running

    async def stays() -> bool:
        return False

    app.now_s += 30.0
    asyncio.run(before.run(stays))
    app.asked = replace(problem, gbit_per_s={"v100>v100": 1e-4})
    after = control_loop(app)  # another configuration has a memory of its own
    after.continue_from(before)
    (began,) = after.controller.record.events.all
    assert began.why == "the application was deployed with another configuration"
    (moved, *_) = moves(run(app, after, 900))
    assert moved.what == "rolled out"
    kept, given_up = (evaluate(plan, app.facts()).goodput_per_s for plan in (app.running, first))
    assert kept > 5 * given_up
    assert after.spent.looks > looked, "what the controller did is counted on"
