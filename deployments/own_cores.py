"""Gives the threads that compute on a CPU cores of their own.

A launch that shares its core with the front, the proxy and Ray is interrupted hundreds of times, and each time loses
its data in the core's cache. So where at least as many cores are left for everything else, each replica computes on
cores that no other thread of its Ray uses.

While a replica lives, it locks a file with the number of cores that it needs. From these files all replicas of a
machine compute the same division of its cores, so no process has to lead them.
"""

import fcntl
import logging
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from isobatch.deployments.processes import descendants, parent_of

log = logging.getLogger(__name__)
COMPUTES = b"isobatch-launch"  # the name of threads that compute, as `top -H` shows it: Linux keeps 15 characters
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container, in cgroup v2
LEFT_SHARE = 0.5  # of the cores, at least, stay for everything else
AGAIN_S = 10.0  # how often new processes are looked for
# How long a thread waits for the interpreter while another computes in Python. A launch gives the interpreter up many
# times, and with Python's own 5 ms it would wait for the event loop longer than it computes: a small network in one
# process with its front then answers a third fewer inputs. With 0.1 ms it answers no more.
SWITCH_S = 0.0005
CoreSet = frozenset[int]


def divided(cores: Collection[int], needs: Sequence[int]) -> tuple[list[CoreSet], CoreSet]:
    """The cores of each replica, by the number that it needs, and those of all other threads. All replicas get cores of
    their own, or none does, and all threads use all cores.

    A replica that needs 0 uses the cores of all other threads.

    >>> divided({0, 1, 2, 3}, [1, 0])
    ([frozenset({3}), frozenset({0, 1, 2})], frozenset({0, 1, 2}))
    >>> divided({0, 1}, [1, 1])
    ([frozenset({0, 1}), frozenset({0, 1})], frozenset({0, 1}))
    """
    left, own = sorted(cores), list[CoreSet]()
    for need in needs if sum(needs) <= (1 - LEFT_SHARE) * len(left) else (0,) * len(needs):
        first = len(left) - need
        own.append(frozenset(left[first:]))
        left = left[:first]
    others = frozenset(left)
    return [each or others for each in own], others


def usable_cores(limit: Path = CPU_LIMIT) -> int:
    """The number of cores that this process may use: a container may have a share of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such limit, or "max"
        quota_us, period_us = map(int, limit.read_text().split())
        cores = max(1, min(cores, quota_us // period_us))
    return cores


@contextmanager
def as_computing() -> Iterator[None]:
    """Give this thread the name of computing threads during the context; threads that it starts keep the name.

    From then on no thread of this process keeps the interpreter for long from others.
    """
    name = _rename(COMPUTES)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        _rename(name)


def _rename(name: bytes) -> bytes:
    """Give this thread a name in the kernel; returns the one before. Does nothing where there is no /proc."""
    own, before = Path("/proc/thread-self/comm"), b""
    with suppress(OSError):
        before = own.read_bytes().strip()
        own.write_bytes(name)
    return before


class OwnCores:
    """The cores of one replica, while it lives. `root`: the process of Ray's node, below which all others run.

    `needed`: the number of its threads that compute; 0: it shares cores with others. `cores`: of the machine.
    """

    def __init__(self, folder: Path, needed: int, cores: Collection[int], root: int) -> None:
        self._folder, self._cores, self._root = folder, frozenset(cores), root
        self._division, self._looked_s = (list[CoreSet](), self._cores), 0.0
        folder.mkdir(parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():  # its files could hold up or end this replica
            raise PermissionError(f"{folder} belongs to another user")
        name = f"{time.time_ns()}-{os.getpid()}"
        self._path, hidden = folder / name, folder / f".{name}"
        self._file = hidden.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(str(needed))
        self._file.flush()
        hidden.rename(self._path)  # others read it only when it is locked

    def pin_threads(self) -> None:
        """Move this replica's threads that compute to its cores, and all others of this Ray node away from them."""
        needs = self._needs()
        own, others = division = divided(self._cores, list(needs.values()))
        if division == self._division and time.monotonic() - self._looked_s < AGAIN_S:
            return
        self._division, self._looked_s = division, time.monotonic()
        if mine := dict(zip(needs, own, strict=True)).get(self._path.name):  # none: it shares, or is closed
            _move(os.getpid(), mine, computing=True)
        for process in (self._root, *descendants(self._root)):
            _move(process, others, computing=False)

    def close(self) -> None:
        """Give the cores back."""
        self._path.unlink(missing_ok=True)
        self._file.close()
        self.pin_threads()  # without this replica

    def _needs(self) -> dict[str, int]:
        """How many cores each living replica of this machine needs, in the order in which they started."""
        needs = dict[str, int]()
        for path in sorted(self._folder.glob("[!.]*")):
            with suppress(FileNotFoundError), path.open() as file:
                if path == self._path or _is_locked(file.fileno()):
                    needs[path.name] = int(file.read() or 0)
                else:
                    path.unlink()  # its process was killed
        return needs


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _move(process: int, cores: CoreSet, computing: bool) -> None:
    """Let those threads of a process that compute, or all others, run on these cores."""
    with suppress(OSError):  # the process has ended, or a thread
        for task in Path(f"/proc/{process}/task").iterdir():
            thread = int(task.name)
            with suppress(OSError):
                if os.sched_getaffinity(thread) == cores:
                    continue
                if ((task / "comm").read_bytes().strip() == COMPUTES) == computing:
                    os.sched_setaffinity(thread, cores)


def own_cores(threads: float, node_cpus: float) -> OwnCores | None:
    """The cores of a replica of Ray on a CPU; None where Ray may not use the whole machine, as in a container with a
    limit: another container would compute on the same cores. None also where no file can be locked.

    Replicas share cores if `threads` is no whole number.
    """
    node = os.getppid()  # Ray's process of this node, to which replicas leave fewer cores
    try:
        cores = os.sched_getaffinity(parent_of(node))
    except (AttributeError, OSError):  # not Linux, or the starter of Ray has ended
        return None
    if node_cpus != len(cores):
        return None
    folder = Path(tempfile.gettempdir(), f"isobatch-cores-{os.getuid()}")
    try:
        return OwnCores(folder, int(threads) if threads == int(threads) else 0, cores, node)
    except OSError as error:
        log.warning("replicas share all cores: %s", error)
        return None
