"""Capacity, latency and dollars: when the controller gives one of them up for another, and takes it back."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from shutil import copytree

import pytest

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.corrections import Corrections
from isobatch.deployments.config import checked
from isobatch.optimizer import Plan, evaluate
from isobatch.optimizer.effort import Number
from isobatch.optimizer.goals import GOALS, Goal, register
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import save
from tests.helpers.fluid_application import EASY, HARD, MEDIUM, Fluid, control_loop, first_plan, moves, question, run


def latency_ms(app, plan):
    """As the cost model has it, of so many inputs as arrive."""
    return 1e3 * evaluate(plan, app.facts()).answer_s(app.rate(app.now_s))


@pytest.mark.parametrize("name", ["replan_every_s", "react_every_s", "start_s", "reserve", "gap", "slo_ms"])
def test_a_number_that_is_not_finite_is_refused(name: str) -> None:
    """YAML has .inf."""
    with pytest.raises(UserError, match=f"args: {name} = inf: Input should be a finite number"):
        checked(ControllerConfig, {name: inf})


@pytest.mark.parametrize(("survival", "rate"), [(EASY, 100.0), (MEDIUM, 0.5), (HARD, 8.0)])
def test_capacity_is_not_given_away_for_milliseconds(survival, rate):
    """Of an SLO of two seconds nobody notices what a quicker plan would save."""
    problem = question(survival)
    app = Fluid(problem, most := first_plan(problem))
    app.rate, app.truth = lambda at_s: rate, lambda at_s: survival
    loop = control_loop(app)
    assert not moves(run(app, loop, 1800))
    assert (loop.controller.exploring.before if loop.controller.exploring else app.running) == most


@pytest.mark.parametrize("survival", [EASY, MEDIUM, HARD])
def test_capacity_that_was_given_away_is_taken_back_though_nobody_needs_it_yet(survival):
    problem = question(survival)
    app = Fluid(problem, quick := problem.sustaining(16.0, survival, Corrections(), {}))
    app.rate, app.truth = lambda at_s: 8.0, lambda at_s: survival
    best = app.best()
    assert app.sustained_per_s(quick) < 0.9 * best
    loop = control_loop(app)
    run(app, loop, 600)
    while loop.controller.exploring:
        run(app, loop, 30)
    assert app.sustained_per_s(app.running) > 0.93 * best, "what may be chance is not chased"


def tight(survival=MEDIUM, **goals):
    """A fleet where a quicker plan saves a noticeable share of the SLO."""
    problem = replace(question(survival, slo_s=0.3, v100=40), **goals)
    return problem, Fluid(problem)


def test_a_quicker_plan_runs_where_users_notice_and_it_sustains_ten_times_what_is_expected():
    _, app = tight()
    most = app.running
    app.rate = lambda at_s: 30.0
    loop = control_loop(app, notice=0.02)
    (event, *_) = moves(run(app, loop, 400))
    assert "ten times the expected rate" in event.why
    assert "given up: " in event.why
    saved_ms = latency_ms(app, most) - latency_ms(app, app.running)
    assert saved_ms >= 0.02 * 300
    assert app.sustained_per_s(app.running) >= 10 * 30.0


def test_what_came_within_a_day_is_sustained_though_ten_times_less_is_expected():
    _, app = tight()
    most = app.running
    peak = 0.9 * app.sustained_per_s(most)
    app.rate = lambda at_s: peak if 600 <= at_s < 630 else 30.0
    loop = control_loop(app, notice=0.02)
    run(app, loop, 900)
    assert app.sustained_per_s(app.running) >= peak
    calm = [event for event in run(app, loop, 1800, look_s=60) if event.after]
    assert app.sustained_per_s(app.running) >= peak
    assert len(calm) <= 1, "and it does not flap"


def test_with_latency_as_the_goal_a_plan_becomes_quicker_and_with_a_rush_the_one_of_most_goodput_is_back():
    problem = replace(question(MEDIUM), goal="latency")
    app = Fluid(problem, most := first_plan(problem))
    app.rate = lambda at_s: 8.0
    loop = control_loop(app)
    (event,) = moves(run(app, loop, 300))  # before it looks behind closed ramps
    assert "given up: " in event.why
    assert latency_ms(app, app.running) < 0.7 * latency_ms(app, most)
    rush = 0.95 * app.sustained_per_s(most)
    assert rush > app.sustained_per_s(app.running)
    app.rate = lambda at_s: rush
    run(app, loop, 2, look_s=1)
    assert app.sustained_per_s(app.running) > rush, "at once, however long the window still is"
    app.rate = lambda at_s: 0.4 * rush
    run(app, loop, 1200)
    assert app.sustained_per_s(app.running) > 0.7 * rush
    assert len(moves(loop.controller.record.events.all)) <= 4


def test_a_quick_plan_outlives_a_pause_and_a_rush_after_it_is_answered_at_once():
    problem = replace(question(MEDIUM), goal="latency")
    app = Fluid(problem, quick := problem.sustaining(16.0, MEDIUM, Corrections(), {}))
    most = app.sustained_per_s(first_plan(problem))
    assert app.sustained_per_s(quick) < 0.9 * most
    app.rate = lambda at_s: 8.0 if at_s < 600 else 0.0
    loop = control_loop(app)
    assert not moves(run(app, loop, 1200))
    assert app.running == quick
    app.rate = lambda at_s: 0.95 * most
    run(app, loop, 60)
    assert app.sustained_per_s(app.running) > 0.95 * most


def test_where_dollars_count_no_more_devices_are_kept_than_the_arrivals_need():
    app = Fluid(replace(question(MEDIUM, v100=4, k80=4), goal="cost"))
    loop = control_loop(app)
    dollars = []
    for rate in (150.0, 20.0, 600.0):
        app.rate = lambda at_s, rate=rate: rate
        run(app, loop, 600, look_s=60)
        dollars.append(evaluate(app.running, app.facts()).cost_per_hour)
    few, fewest, all_of_them = dollars
    assert fewest < few < all_of_them
    assert app.sustained_per_s(app.running) > 600
    assert all((event.gain_seen or 0.0) >= -0.1 for event in loop.controller.record.events.all)


def test_nobody_searches_for_why_no_plan_sustains_a_rate_unless_it_is_read(monkeypatch):
    """The controller only wants to know whether there is a plan, in every window."""
    monkeypatch.setattr("isobatch.optimizer.infeasible.side_by_side", lambda *_: pytest.fail("nobody reads why"))
    assert question(MEDIUM).sustaining(1e9, MEDIUM, Corrections(), {}) is None


# A new goal is one file in optimizer/goals: the command line and the controller know it by its name

ROOT = Path(__file__).parents[3]
NEW_FILE = """
from isobatch.optimizer.goals.goal import Goal, register


@register
class Thrift(Goal):
    name = "thrift"
    about = "few dollars for quick answers"
    needs_latency = True

    def value(self, goodput_per_s, cost_per_hour, latency_s):
        return cost_per_hour * (0.1 + latency_s)
"""
USE = """
import contextlib, sys
from isobatch.cluster.cli import app
from isobatch.cluster.controller.config import ControllerConfig
assert ControllerConfig(goal="thrift").goal == "thrift"
assert "thrift: few dollars for quick answers" in ControllerConfig.model_fields["goal"].description
for goal in ("goodput", "thrift"):
    with contextlib.suppress(SystemExit):
        app([*sys.argv[1:], "--goal", goal])
"""


def test_a_file_in_the_folder_of_goals_is_enough(tmp_path: Path) -> None:
    goals = Path("isobatch", "optimizer", "goals")
    for folder in (goals.parent.parent, goals.parent):  # copies of the folders above it, with links beside it
        (tmp_path / folder).mkdir()
        for each in {*(ROOT / folder).iterdir()} - {ROOT / part for part in (goals.parent, goals)}:
            (tmp_path / folder / each.name).symlink_to(each)
    copytree(ROOT / goals, tmp_path / goals)
    (tmp_path / "isobatch" / "optimizer" / "goals" / "thrift.py").write_text(NEW_FILE)
    save(question(MEDIUM).profile, tmp_path / "profile.json")
    arguments = ["plan", "--profile", "profile.json", "--devices", "v100=2@2,k80=2@1", "--json"]
    command = [sys.executable, "-c", USE, *arguments, "--no-simulation"]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "200"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    goodput, end = json.JSONDecoder().raw_decode(ended.stdout)
    thrift = json.loads(ended.stdout[end:])
    assert thrift["score"]["cost_per_hour"] < goodput["score"]["cost_per_hour"]


class Frugality(Goal):
    """Dollars, of which there are more while inputs wait."""

    name = "frugality"
    about = "few dollars for quick answers"
    needs_latency = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return cost_per_hour * (0.1 + latency_s)


@pytest.fixture
def frugality() -> Iterator[str]:
    register(Frugality)
    yield Frugality.name
    del GOALS[Frugality.name]


def test_a_controller_follows_a_goal_that_it_does_not_know(frugality: str) -> None:
    assert checked(ControllerConfig, {"goal": frugality}).goal == frugality
    app = Fluid(replace(question(MEDIUM, v100=2, k80=2), goal=frugality))
    app.rate = lambda at_s: 40.0

    def value(plan: Plan) -> float:
        score = evaluate(plan, app.facts())
        return float(GOALS[frugality].value(score.goodput_per_s, score.cost_per_hour, score.latency_s))

    before = value(app.running)
    first, *_ = moves(run(app, control_loop(app), 150))
    assert "better by the goal frugality: worth it" in first.why
    assert value(app.running) < 0.9 * before
    assert app.sustained_per_s(app.running) > 40.0
