"""The files in cluster/ for one machine: an image, Compose and systemd."""

import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from isobatch.cluster.cli import app
from isobatch.cluster.commands.deploy import DASHBOARDS

CLUSTER = Path(__file__).parents[3] / "cluster"
COMMAND = typer.main.get_command(app)


def understood(words: list[str]) -> None:
    name, *arguments = words
    COMMAND.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def instructions() -> dict[str, list[str]]:
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile.serve").read_text().replace("\\\n", " "), flags=re.M)
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


def test_the_image_runs_any_command_without_rights_and_can_be_reached() -> None:
    given = instructions()
    assert given["ENTRYPOINT"] == ['["isobatch"]']
    understood(yaml.safe_load(given["CMD"][0]))
    assert given["USER"] == ["1000"]
    (name, value) = given["ENV"][0].split("=")
    host = next(each for each in COMMAND.commands["serve"].params if each.name == "host")  # type: ignore[attr-defined]
    assert (host.envvar, value) == (name, '"0.0.0.0"')


def test_compose_names_what_it_has_and_watches_what_it_serves() -> None:
    told: dict[str, Any] = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
    services = told["services"]
    understood(services["isobatch"]["command"])
    assert (CLUSTER.parent / services["isobatch"]["build"]["dockerfile"]).is_file()
    for service in services.values():
        assert {each["source"] for each in service.get("configs", ())} <= set(told["configs"])
        named = {each.partition(":")[0] for each in service.get("volumes", ())}
        assert {name for name in named if "/" not in name} <= set(told["volumes"])
    prometheus = yaml.safe_load(told["configs"]["prometheus"]["content"])
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"isobatch:{services['isobatch']['command'][-1]}"
    assert {Path(path).name for path in prometheus["rule_files"]} <= {file.name for file in DASHBOARDS.iterdir()}


def test_the_unit_runs_a_command_that_there_is(tmp_path: Path) -> None:
    unit = CLUSTER / "isobatch.service"
    parser = ConfigParser(strict=False, interpolation=None)
    parser.read(unit)
    program, *words = parser["Service"]["ExecStart"].split()
    assert Path(program).name == "isobatch"
    understood(words)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd")
    there = unit.read_text().replace(program, shutil.which("true") or program).replace("User=isobatch", "User=root")
    (tmp_path / unit.name).write_text(there)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / unit.name], capture_output=True, text=True)
    assert "isobatch.service" not in done.stderr, done.stderr
