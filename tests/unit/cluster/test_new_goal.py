"""A new goal is one file in optimizer/goals: the command line and the controller know it by its name."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.deployments.config import checked
from isobatch.optimizer import Plan
from isobatch.optimizer.effort import Number
from isobatch.optimizer.goals import GOALS, Goal, register
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.profiles.files import save
from tests.helpers.fluid_application import MEDIUM, Fluid, control_loop, moves, question, run

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
    command = [sys.executable, "-c", USE, *arguments, "--believed"]
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
