"""`isobatch serve` on the demo: the lines of docs/tutorials.md that need a server run against it, until its Ray breaks.

tests/unit/cluster/test_wheel.py runs the lines that need none.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.shared.machine import free_port
from isobatch.cluster.cli import app
from isobatch.deployments.processes import descendants
from tests.helpers.asking import eventually
from tests.helpers.command_lines import ROOT, SERVED, tutorial_lines
from tests.helpers.serving import END_S, left_in, marked, serving

pytestmark = pytest.mark.long
INTERRUPTED = 130


@dataclass(frozen=True)
class Demo:
    """The command at work on the demo, in a folder of its own."""

    process: subprocess.Popen[str]
    base: str
    mark: str
    metrics_port: int
    folder: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder, port = tmp_path_factory.mktemp("demo"), free_port()
    with serving(folder, ROOT / "cluster" / "demo.yaml", "--metrics-port", str(port)) as (process, base, mark):
        yield Demo(process, base, mark, port, folder)


def curled(there: str, here: str) -> str:
    """What a `curl` line of the page prints, of the same path at another address."""
    page = (ROOT / "docs" / "tutorials.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("curl") and line.endswith(there))
    return subprocess.check_output([*line.split()[:-1], here + there], text=True, timeout=120)


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def test_the_demo_is_loaded_and_watched_as_the_page_says(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(demo.folder)
    monkeypatch.setattr("isobatch.cluster.commands.status.time", SimpleNamespace(sleep=interrupt))
    lines = [line for line in tutorial_lines(demo.base) if line[0] in SERVED and "--data" not in line]
    assert [line[0] for line in lines] == ["load", "status", "status"]
    for line in lines:
        done = CliRunner().invoke(app, line)
        assert done.exit_code == (INTERRUPTED if "--watch" in line else 0), done.output
    assert json.loads(Path("load.json").read_text())["outcomes"]["answered"] > 0
    stats: dict[str, Any] = json.loads(curled("/stats", demo.base))
    assert stats["requests"]["answered"] > 0
    assert eventually(lambda: "isobatch_requests" in curled("/metrics", f"http://127.0.0.1:{demo.metrics_port}"))


def test_when_rays_agent_is_killed_it_ends_with_a_sentence_and_leaves_no_process(demo: Demo) -> None:
    """Ray's main process ends with its agent. Its GCS runs on, but nothing is served: a supervisor must see that."""
    (agent,) = [each for each in descendants(demo.process.pid) if "ray::DashboardAgent".startswith(name_of(each))]
    os.kill(agent, signal.SIGKILL)
    output, _ = demo.process.communicate(timeout=END_S)
    assert demo.process.returncode == 1
    assert "Ray ended unexpectedly" in output
    assert marked(demo.mark) == []
    assert left_in(demo.folder) == []


def name_of(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()
