"""Leave no process behind: adopt orphans while working, end whatever is left, even if we are killed (Linux)."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_FOLDER = "ISOBATCH_FOLDER"  # in the environment of all processes that are to end with us
# The guard reads a pipe whose other end we hold, and which the system closes when we end, however that comes about.
# What it kills may just have started something, so it looks again.
_GUARD = r"""read -r nothing
for again in 1 2 3 4 5; do
  for process in $(grep -lsFzx "$1=$2" /proc/[0-9]*/environ | tr -dc '0-9\n'); do kill -9 "$process"; done
  sleep 0.2
done
rm -rf "$2"
"""


def adopt_orphans() -> None:
    """From now on an orphaned descendant becomes our child, so that none can slip out of the tree.

    HAProxy is the reason: it is a grandchild of Ray, and survives the process that started it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_us(folder: Path) -> None:
    """From now on whatever we start ends when this process ends, even if it is killed; the folder is deleted then."""
    os.environ |= bound_to_us(folder)


def bound_to_us(folder: Path) -> dict[str, str]:
    """What the environment of a process must have that is to end when this one ends; the folder is deleted then.

    A guard sees to it, a shell of a megabyte. It leads a session, so that a signal to our group does not reach it.
    """
    command = ["/bin/sh", "-c", _GUARD, "isobatch-guard", _FOLDER, str(folder)]
    unseen = {name: value for name, value in os.environ.items() if name != _FOLDER}  # it must not find itself
    quiet = subprocess.DEVNULL
    _guards.append(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, cwd="/", env=unseen, start_new_session=True
        )
    )
    return {_FOLDER: str(folder)}


_guards: list[subprocess.Popen[bytes]] = []  # this holds our ends of their pipes


def descendants(ancestor: int) -> list[int]:
    """All processes below this one, the nearest first, without zombies."""
    children: dict[int, list[int]] = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name may hold spaces and brackets, so fields are read from behind the last bracket.
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children[int(parent)].append(int(status.parent.name))
    found = list(children[ancestor])
    for process in found:
        found += children[process]
    return found


def runs_below(name: str) -> bool:
    """Whether a process of this name is among those below ours."""
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().strip() == name:
                return True
    return False


def end_descendants(patience_s: float = 3.0) -> None:
    """Ask every process below ours to end; kill those that have not after `patience_s`.

    Guards stay, for what is started after this.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(_guarded(), number)
        deadline_s = time.monotonic() + patience_s
        while _guarded() and time.monotonic() < deadline_s:
            time.sleep(0.02)
    _read_the_ended()


def end_guards() -> None:
    """Nothing is started after this, and what was has ended."""
    while _guards:
        with _guards.pop() as guard:
            guard.kill()


def _guarded() -> list[int]:
    """All processes below ours but the guards."""
    guards = {guard.pid for guard in _guards}
    return [process for process in descendants(os.getpid()) if process not in guards]


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _read_the_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
