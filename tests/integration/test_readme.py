"""The lines of the README that need a server, against one; the other lines run in tests/unit/cluster/test_wheel.py."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from isobatch.cluster.cli import app
from isobatch.cluster.serving.serve_file import serve_file
from isobatch.profiles.errors import UserError
from tests.helpers.asking import eventually
from tests.helpers.command_lines import readme_lines
from tests.integration.conftest import Put

Application = dict[str, Any]


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def ran(line: list[str]) -> Result:
    return CliRunner().invoke(app, line)


@pytest.mark.beside("steered")
def test_load_and_status_of_the_readme_run_against_what_its_deploy_line_deploys(
    deployed: Put, toy: Application, controller: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text(json.dumps({"applications": [toy, controller]}))
    Path("bodies.jsonl").write_text('{"inputs": [[3, 7]]}\n')
    (file,) = (Path(line[1]) for line in readme_lines("") if line[0] == "deploy")
    address = deployed(*serve_file(file, {})["applications"])
    lines = {line[0]: line for line in readme_lines(address) if "--prompts" not in line}

    words = [word for word in lines["load"] if word not in ("--data", "others.csv")]  # the toy reads no texts
    loaded = ran([*words, "--bodies", "bodies.jsonl", "--slo-ms", "60000"])
    assert loaded.exit_code == 0, loaded.output
    assert json.loads(Path("load.json").read_text())["good_share"] == 1.0

    monkeypatch.setattr("isobatch.cluster.commands.status.time", SimpleNamespace(sleep=interrupt))
    assert eventually(lambda: not isinstance(ran(lines["status"]).exception, UserError)), "no controller"
    watched = ran(lines["status"])
    assert watched.exit_code == 130
    assert "sustains now" in watched.output
