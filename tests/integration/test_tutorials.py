"""The lines of docs/tutorials.md that need a server, on the demo; tests/unit/cluster/test_wheel.py runs the others."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.shared.machine import free_port
from tests.helpers.asking import eventually
from tests.helpers.command_lines import ROOT, SERVED, tutorial_lines
from tests.helpers.serving import serving

ANSWERED_WITHIN_S = 120.0


def curled(there: str, here: str) -> str:
    """What a `curl` line of the page prints, of the same path at another address."""
    page = (ROOT / "docs" / "tutorials.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("curl") and line.endswith(there))
    words = [*line.split()[:-1], here + there]
    return subprocess.check_output(words, text=True, timeout=ANSWERED_WITHIN_S)


def test_the_demo_is_loaded_and_watched_as_the_page_says(tmp_path: Path) -> None:
    metrics_port = free_port()
    with serving(tmp_path, ROOT / "cluster" / "demo.yaml", "--metrics-port", str(metrics_port)) as (_, base, _):
        told = [line for line in tutorial_lines(base) if line[0] in SERVED and "--data" not in line]
        assert [line[0] for line in told] == ["load", "status", "status"]
        for line in told:
            ran(line, tmp_path)
        assert json.loads((tmp_path / "load.json").read_text())["answered_per_s"] > 0
        stats: dict[str, Any] = json.loads(curled("/stats", base))
        assert stats["requests"]["answered"] > 0
        assert eventually(lambda: "isobatch_requests" in curled("/metrics", f"http://127.0.0.1:{metrics_port}"))


def ran(line: list[str], folder: Path) -> None:
    """A command that ends, or is ended once it has shown something."""
    command = [sys.executable, "-m", "isobatch.cluster.cli", *line]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        if watches := "--watch" in line:
            assert process.stdout.readline()
            process.terminate()
        output = process.stdout.read()
        assert process.wait(ANSWERED_WITHIN_S) == (-signal.SIGTERM if watches else 0), output
