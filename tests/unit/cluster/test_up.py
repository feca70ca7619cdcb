"""`isobatch up` does each step once, and again what depends on something that has changed."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.cluster.commands import up as command
from isobatch.cluster.commands.plan import ClassifierPlanOptions
from isobatch.cluster.commands.plan_report import PlanResult
from isobatch.cluster.serving.serve_file import serve_file
from isobatch.deployments.folders import locked
from isobatch.deployments.models.ramps import ExitRules
from isobatch.profiles.devices import GB, fleet, kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import load
from tests.helpers.command_lines import material
from tests.helpers.simulated_fleet import HASTIER

SMALL = ("--devices", "cpu=1", "--max-rows", "60", "--port", "18123")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    material(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "serve", lambda target, port: print("serving", target))
    monkeypatch.setattr(command, "PROFILE_BUDGET_S", 0.1)
    monkeypatch.setattr("isobatch.cluster.simulator.plan_choice.DEFAULT_EFFORT", HASTIER)
    monkeypatch.setattr("isobatch.deployments.prepare.pipeline.draw_exits", lambda _, path: path.touch())
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["up", "my-bert", "--data", "reviews.csv", "--slo-ms", "2000", *SMALL, *arguments])


def counted(data: str, out: str) -> str:
    """What a profile of the prepared network says about the inputs over which it counted exits."""
    options = ("--data", data, "--out", out, "--timing-s", "0.1", "--largest", "2")
    CliRunner().invoke(app, ["profile", "my-bert-up", *options], catch_exceptions=False)
    return next(note for note in load(Path(out)).notes if note.startswith("exits: counted over "))


def steps(*arguments: str) -> list[str]:
    """What the command says of each step: "made" or "done before"."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    lines = [line for line in result.output.splitlines() if line[1:3] == "/4" and "serve:" not in line]
    assert "serving my-bert-up" in result.output
    ends = [line for line in lines if "done before" in line or line.endswith(" s)")]
    return ["before" if "done before" in line else "made" for line in ends]


@pytest.mark.long
def test_each_result_is_kept_and_only_what_changed_is_made_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = run("--slo-ms", "0.001")
    assert isinstance(late.exception, UserError), late.output
    assert steps() == ["before", "before", "made"], "earlier steps are kept"
    Path("my-bert-up/plan.json").unlink()
    assert steps() == ["before", "before", "made"]
    assert steps() == ["before"] * 3
    notes = load(Path("my-bert-up/profile.json")).notes
    assert "exits: counted over 21 inputs of reviews.csv that ramps were not trained on" in notes
    header, *lines = Path("reviews.csv").read_text().splitlines(keepends=True)
    Path("same").mkdir()
    Path("same/reviews.csv").write_text(header + "".join(reversed(lines)))  # of the same name and size
    assert counted("same/reviews.csv", "same.json") == "exits: counted over 120 inputs of reviews.csv"
    Path("renamed.csv").hardlink_to("reviews.csv")
    known = "exits: counted over 21 inputs of renamed.csv that ramps were not trained on"
    assert counted("renamed.csv", "renamed.json") == known
    assert "done before; no input leaves early" in run().output  # so few rows show no promise
    old = {name: (Path(f"my-bert-up/{name}.json"), Path(f"old-{name}.json")) for name in ("up", "plan")}
    texts = {name: path.read_text() for name, (path, _) in old.items()}
    for path, kept in old.values():
        kept.hardlink_to(path)
    assert steps("--slo-ms", "1500") == ["before", "before", "made"]
    assert texts == {name: kept.read_text() for name, (_, kept) in old.items()}, "files are replaced whole"
    assert json.loads(Path("my-bert-up/plan.json").read_text())["slo_s"] == 1.5
    Path("reviews.csv").write_text(Path("others.csv").read_text())
    assert steps("--slo-ms", "1500") == ["made"] * 3
    for name in ("prepare", "profile"):  # from here on their files stay
        monkeypatch.setattr(command, name, lambda **_: None)
    monkeypatch.setattr(command, "plan_classifier", lambda _: SimpleNamespace(hurried=False))
    Path("my-bert/config.json").write_text(Path("my-bert/config.json").read_text() + "\n")
    assert steps("--slo-ms", "1500") == ["made"] * 3
    monkeypatch.setattr(command, "this_machine", lambda: "t4=1")
    assert steps("--slo-ms", "1500") == ["before", "made", "made"]
    served = serve_file(Path("my-bert-up"), {})["applications"]
    assert [Path(served[0]["args"][name]).name for name in ("plan", "profile")] == ["plan.json", "profile.json"]
    assert served[1]["name"] == "controller"
    alone = serve_file(Path("my-bert-up"), {"device": "cpu"})["applications"]
    assert "plan" not in alone[0]["args"]


@pytest.mark.parametrize(("name", "memory_gb"), [("NVIDIA GeForce RTX 4090", 25.25), ("NVIDIA L4", 24)])
def test_the_devices_of_this_machine_need_no_place_in_the_catalogue(
    name: str, memory_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    has = SimpleNamespace(total_memory=round(memory_gb * GB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: has)
    assert [(each.kind, each.count, each.memory_bytes) for each in fleet(command.this_machine())] == [
        (kind_of(name), 2, has.total_memory)
    ]


@pytest.mark.long
def test_a_search_that_ctrl_c_ended_serves_and_is_made_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan_classifier = list[bool](), command.plan_classifier

    def hurried(options: ClassifierPlanOptions) -> PlanResult:
        made.append(True)
        return replace(plan_classifier(options), hurried=len(made) == 1)

    monkeypatch.setattr(command, "plan_classifier", hurried)
    output = run().output
    assert "3/4 plan: Ctrl-C ended the search; the next isobatch up searches again" in output
    assert "serving my-bert-up" in output
    assert steps() == ["before", "before", "made"]
    assert steps() == ["before"] * 3


def test_its_folder_may_lie_in_new_ones_but_not_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(**_: object) -> None:
        raise UserError("it has begun")

    monkeypatch.setattr(command, "prepare", ends)
    assert "it has begun" in str(run("--out", "new/er/one").exception)
    assert "reviews.csv exists, and is not of isobatch up" in str(run("--out", "reviews.csv").exception)
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    arguments = ("up", str(here / "my-bert"), "--data", str(here / "reviews.csv"), "--slo-ms", "2000", "--out", ".")
    assert ".: is mounted or holds the current folder" in str(CliRunner().invoke(app, arguments).exception)


def test_a_change_in_a_directory_of_data_is_seen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(**_: object) -> None:
        Path("my-bert-up").mkdir(exist_ok=True)
        ExitRules().write(Path("my-bert-up/exits.json"))

    def profile(**_: object) -> None:
        raise UserError("it has prepared")

    monkeypatch.setattr(command, "prepare", prepare)
    monkeypatch.setattr(command, "profile", profile)
    Path("saved").mkdir()
    part = Path("saved/data-00000-of-00001.arrow")
    part.touch()
    assert "1/4 prepare: exits for my-bert" in run("--data", "saved").output
    assert "1/4 prepare: done before" in run("--data", "saved").output
    in_an_hour_s = time.time() + 3600
    os.utime(part, (in_an_hour_s, in_an_hour_s))
    assert "1/4 prepare: exits for my-bert" in run("--data", "saved").output


def test_a_port_that_is_taken_is_named_before_the_long_steps(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert str(run("--port", port).exception).startswith(f"port {port} of 127.0.0.1 cannot be used")
    assert not Path("my-bert-up").exists()


def test_two_commands_do_not_make_one_folder(here: Path) -> None:
    with locked(Path("my-bert-up")):
        assert str(run().exception) == "another isobatch up makes my-bert-up"
    assert not Path("my-bert-up").exists()


def test_what_cannot_be_done_is_one_sentence(here: Path) -> None:
    assert "must be above 0" in str(run("--slo-ms", "0").exception)
    assert "no such file" in str(run("--data", "nowhere.csv").exception)
    assert "unknown device kind 'v1000'" in str(run("--devices", "v1000=1", "--out", "new").exception)
    other = str(run("--devices", "cpu=1,t4=1", "--out", "new").exception)
    assert other.startswith("--devices t4: up measures this machine's cpu: for others use isobatch profile there")
    assert not Path("new").exists(), "it prepares first"
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert "mine exists, and is not of isobatch up" in str(run("--out", "mine").exception)
    Path("mine/up.json").write_text("[1]")
    assert "mine/up.json must hold one JSON object, got list" in str(run("--out", "mine").exception)
    decoder = CliRunner().invoke(app, ["up", "llm-demo", "--data", "others.csv", "--slo-ms", "9"])
    assert "is a decoder" in str(decoder.exception)
