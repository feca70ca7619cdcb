"""The command that runs the benchmarks."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import bench

ROOT = Path(__file__).parents[3]
MEASURES = """
import sys, time
from types import SimpleNamespace
from experiments import bench

def measure():
    try:
        print("measures", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.5)
        print("has stopped all")

bench.import_module = lambda name: SimpleNamespace(measure=measure)
sys.exit(bench.main(["serve"]))
"""


def test_a_signal_that_ends_it_lets_it_stop_what_it_has_started() -> None:
    """As `timeout` sends it: to the process, and to all in its group."""
    command = [sys.executable, "-c", MEASURES]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "measures\n"
        process.terminate()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.read() == "has stopped all\n"
        assert process.wait() == 128 + signal.SIGTERM


def test_a_part_says_that_it_is_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "import_module", lambda _: SimpleNamespace(measure=lambda seconds: {"spent_s": seconds}))
    monkeypatch.setattr(bench, "write", lambda *_: pytest.fail("a part's figures are not those of the whole"))
    assert bench.main(["serve", "seconds=3"]) == 0
    assert "not written to results/serve.json: seconds=3 makes this a part" in capsys.readouterr().out
