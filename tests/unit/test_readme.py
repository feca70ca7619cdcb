"""Every `isobatch` line of the README is one that the command line takes: its command, its options, their values."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from cluster.cli import app

README = (Path(__file__).parents[2] / "README.md").read_text()
LINES = re.findall(r"^isobatch ([^#\n]+)", README, re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_takes_it(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(line)
    for path in (word for word in arguments if word.endswith((".yaml", ".json", ".csv"))):
        (tmp_path / path).touch()
    command = get_command(app).commands[name]
    with command.make_context(name, arguments) as context:
        assert context.params


def test_there_are_such_lines() -> None:
    assert {line.split()[0] for line in LINES} == set(get_command(app).commands)
