"""Our own commands in a process of their own. Apart from the machine: what names them depends on all their code."""

import os
import subprocess
import sys

from experiments.shared.machine import ROOT

COMMAND = (sys.executable, "-m", "isobatch.cluster.cli")


def run_isobatch(*arguments: object) -> None:
    """What the command prints goes to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, env=environment, stdout=sys.stderr)
