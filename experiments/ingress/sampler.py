"""Samples where a thread's processor time goes, from inside its process, without other tools.

Every millisecond the thread's stack is looked at. A look at a thread that waits does not count; all others share the
processor time that the thread has used, so a busy machine hardly matters.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

EVERY_S, TOLD_EVERY_S = 0.001, 1.0
SOON_S = 1e-4  # how long the thread may run on after it was asked to show its stack
IDLE = "the event loop itself"
# The innermost frame that is listed here names the layer.
CALLS = (
    "/transport/replica_connection.py",
    "/transport/connection.py",
    "/transport/orders.py",
    "/front/follower.py",
)
LAYERS = {
    "json": ("/json/",),
    "our handler": ("/deployments/",),
    "dispatcher": ("/deployments/dispatch",),
    "driver: tasks and replies": (
        "/deployments/front/driver.py",
        "/deployments/front/counts.py",
    ),
    "encode and pack": ("/deployments/replica/virtual.py", "/deployments/transport/packed.py", "/numpy/"),
    "uvicorn: HTTP in and out": ("/uvicorn/",),
    "Serve's wrapping of a request": ("/ray/", "/starlette/", "/fastapi/"),
}  # fmt: skip


def layer(files: Sequence[str]) -> str:
    """The layer of a stack, given from the innermost frame outwards.

    >>> layer(["/lib/json/encoder.py", "/x/deployments/front/predict.py", "/lib/uvicorn/run.py"])
    'json'
    >>> layer(["/lib/json/encoder.py", "/x/deployments/transport/connection.py"])
    'orders and replies'
    """
    if any(mark in file for file in files for mark in CALLS):
        return "orders and replies"
    for file in files:
        result = [name for name, marks in LAYERS.items() if any(mark in file for mark in marks)]
        if result:
            return result[-1] if result[0] == "our handler" else result[0]
    return IDLE


class Sampler(threading.Thread):
    """Writes to `file`, once a second: looks at the busy thread by layer, and processor time, its own and of all."""

    def __init__(self, thread: int, file: Path) -> None:
        super().__init__(daemon=True)
        self._thread, self._file = thread, file
        self._clock = time.pthread_getcpuclockid(thread)
        self._looks: Counter[str] = Counter()

    def run(self) -> None:
        sys.setswitchinterval(SOON_S)
        told_s = 0.0
        while True:
            time.sleep(EVERY_S)
            name = layer(_files(sys._current_frames().get(self._thread)))
            if name != IDLE or self._advances():
                self._looks[name] += 1
            if time.monotonic() > told_s + TOLD_EVERY_S:
                told_s = time.monotonic()
                self._tell()

    def _advances(self) -> bool:
        """Whether the thread runs outside of Python while this one holds the interpreter; else it waits."""
        before_s = time.clock_gettime(self._clock)
        for _ in range(300):  # a few microseconds
            pass
        return time.clock_gettime(self._clock) > before_s

    def _tell(self) -> None:
        spent = {"looks": self._looks, "thread_s": time.clock_gettime(self._clock), "process_s": time.process_time()}
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(spent))
        beside.rename(self._file)


def _files(frame: FrameType | None) -> list[str]:
    files = []
    while frame:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files
