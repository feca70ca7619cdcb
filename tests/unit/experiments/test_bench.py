"""The command that runs the benchmarks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
