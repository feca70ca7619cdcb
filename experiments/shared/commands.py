"""Runs the project's commands in a process. A module that imports this one depends on the code of all commands."""

import os
import subprocess
import sys

from experiments.shared.machine import ROOT

COMMAND = (sys.executable, "-m", "isobatch.cluster.cli")


def run_isobatch(*arguments: object) -> None:
    """Run a command; its output goes to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, env=environment, stdout=sys.stderr)
