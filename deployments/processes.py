"""Leaves no process behind: adopts orphaned descendants, and ends all of them even if we are killed (Linux)."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
_FOLDER = "ISOBATCH_FOLDER"  # an environment variable of all processes that must end with this one
_LOOK_EVERY_S = 0.02  # how often to check whether processes have ended
# The guard reads a pipe whose other end this process holds; the system closes the pipe whenever this process ends.
# A killed process may just have started another, so the guard searches several times.
_GUARD = r"""read -r nothing
for again in 1 2 3 4 5; do
  for process in $(grep -lsFzx "$1=$2" /proc/[0-9]*/environ | tr -dc '0-9\n'); do kill -9 "$process"; done
  sleep 0.2
done
rm -rf "$2"
"""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process from now on, so that none leaves the process tree.

    Ray's processes need this: they survive for a while the ones that started them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bound_to_us(folder: Path) -> dict[str, str]:
    """The environment variable of processes that must end when this one ends; the folder is deleted then.

    A guard ends them: a shell with a megabyte of memory. It leads a session, so signals to our group do not reach it.
    """
    command = ["/bin/sh", "-c", _GUARD, "isobatch-guard", _FOLDER, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != _FOLDER}  # it must not kill itself
    quiet = subprocess.DEVNULL
    _guards.append(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, cwd="/", env=environment, start_new_session=True
        )
    )
    return {_FOLDER: str(folder)}


_guards: list[subprocess.Popen[bytes]] = []  # keeps our ends of their pipes open


class _Process(NamedTuple):
    number: int
    name: str
    state: str
    parent: int


_ENDED = "Z"  # the state of a zombie


def _processes() -> Iterator[_Process]:
    """All processes of this machine, zombies too."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield _process_in(status)


def _process_in(status: Path) -> _Process:
    """The process of a file /proc/NUMBER/stat; raises OSError if there is none."""
    # The program's name may contain spaces and brackets, so fields are read from after the last bracket. Linux keeps 15
    # bytes of it, so its last letter may be incomplete.
    about, _, fields = status.read_text(errors="replace").rpartition(")")
    state, parent = fields.split()[:2]
    return _Process(int(status.parent.name), about.partition("(")[2], state, int(parent))


def descendants(ancestor: int) -> list[int]:
    """All descendants of a process, children first, without zombies."""
    children: dict[int, list[int]] = defaultdict(list)
    for process in _processes():
        if process.state != _ENDED:
            children[process.parent].append(process.number)
    below = list(children[ancestor])
    for number in below:
        below += children[number]
    return below


def parent_of(number: int) -> int:
    """The parent of this process; raises OSError if there is none."""
    return _process_in(Path(f"/proc/{number}/stat")).parent


def running_below(name: str) -> list[int]:
    below = set(descendants(os.getpid()))
    return [process.number for process in _processes() if process.name == name and process.number in below]


def is_running(number: int) -> bool:
    """Whether a child of this process has not ended."""
    try:
        return _process_in(Path(f"/proc/{number}/stat")).state != _ENDED
    except OSError:
        return False


def reap(name: str) -> None:
    """Remove the zombies of orphans with this name that this process has adopted."""
    for process in _processes():
        if process.name == name and process.state == _ENDED and process.parent == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.number, os.WNOHANG)


def end_descendants(patience_s: float = 3.0) -> None:
    """Ask all descendants of this process to end, and kill those that have not after `patience_s`.

    Guards stay, for processes that are started later.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in _guarded():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        deadline_s = time.monotonic() + patience_s
        while _guarded() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_guards() -> None:
    """End the guards, once all other processes have ended and none will be started."""
    while _guards:
        with _guards.pop() as guard:
            guard.kill()


def _guarded() -> list[int]:
    """All descendants of this process except the guards."""
    guards = {guard.pid for guard in _guards}
    return [process for process in descendants(os.getpid()) if process not in guards]
