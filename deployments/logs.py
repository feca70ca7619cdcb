"""Where the lines of a process go: to Serve's own log of it, as text or JSON, and few of a kind.

Whoever attacks a server, or overloads it, makes it say the same for each request. The first lines of a kind tell
enough; what follows is counted, and said once a minute.
"""

import logging
import time
from collections.abc import Callable
from logging.handlers import MemoryHandler
from typing import Any

from deployments.config import LogFormat
from deployments.ray_facts import inside_replica

OURS = ("cluster", "deployments")
OF_OTHERS = ("uvicorn.error", "asyncio", "grpc")  # they have a line for each client that breaks the rules, too
SERVES = "ray.serve"
FIRST, EVERY_S = 5, 60.0  # so many lines of a kind in so long


class Seldom(logging.Filter):
    """Lets through the first lines of a kind in a minute; the first of the next minute says how many were left out.

    Lines are of a kind if they are of the same logger and the same sentence, whatever is filled into that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how many lines came

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, kind = self._clock(), (record.name, str(record.msg))
        since_s, count = self._kinds.get(kind, (now_s, 0))
        if now_s - since_s >= EVERY_S:
            if count > FIRST:
                record.msg = f"{record.msg} (and {count - FIRST} like it in {now_s - since_s:.0f} s)"
            since_s, count = now_s, 0
        self._forget(now_s)
        self._kinds[kind] = since_s, count + 1
        return count < FIRST

    def _forget(self, now_s: float) -> None:
        """Sentences that are all different, as those of others may be, must not fill the memory."""
        if len(self._kinds) >= 1000:
            self._kinds = {kind: kept for kind, kept in self._kinds.items() if now_s - kept[0] < EVERY_S}
        if len(self._kinds) >= 1000:
            self._kinds.clear()


class _ToServe(logging.Handler):
    """Hands lines to what handles those of Serve, with the names of application and replica that these bear."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger(SERVES).handlers:
            handler.handle(record)


def join_serves_log() -> None:
    """Called in each process of an application; elsewhere (in tests, in commands) lines stay where they are."""
    if not inside_replica():
        return
    for serves in logging.getLogger(SERVES).handlers:
        if isinstance(serves, MemoryHandler):  # Serve keeps back a thousand lines, as it may have one per request
            serves.flushLevel = logging.NOTSET
    seldom = Seldom()
    for name in (*OURS, *OF_OTHERS):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
            handler = _ToServe()
            handler.addFilter(seldom)
            logger.addHandler(handler)
            logger.propagate = False


def logging_config(log_format: LogFormat, quiet: bool = True) -> dict[str, Any]:
    """What Serve is told of a deployment's log. Its line per call would cost more than the call."""
    return {"enable_access_log": False, "encoding": log_format.upper()} | ({"log_level": "WARNING"} if quiet else {})
