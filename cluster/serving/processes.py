"""Leave no process behind: adopt orphans while working, and end whatever is left at the end (Linux)."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on an orphaned descendant becomes our child, so that none can slip out of the tree.

    HAProxy is the reason: it is a grandchild of Ray, and survives the process that started it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
    """Ask every process below ours to end; kill those that have not after `patience_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(descendants(os.getpid()), number)
        deadline_s = time.monotonic() + patience_s
        while descendants(os.getpid()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    _read_the_ended()


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _read_the_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
