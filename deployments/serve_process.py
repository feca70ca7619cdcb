"""The processes of an application: how Serve starts, checks and ends them, and their log.

Log lines go to Serve's log of the process, as text or JSON. A server that is attacked or overloaded would log the same
sentence for each request. So further lines of a kind are counted, and the count is logged once a minute.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from logging.handlers import MemoryHandler
from typing import Any, TypeVar

from isobatch.deployments.named import LogFormat
from isobatch.deployments.own_cores import OwnCores, own_cores
from isobatch.deployments.ray_facts import inside_replica, node_cpus
from isobatch.deployments.tracing import tracing_here

OWN_LOGGERS = ("isobatch",)
# They log a line for each client that violates a protocol, and opentelemetry for each batch of spans that is not sent.
LIBRARY_LOGGERS = ("uvicorn.error", "asyncio", "grpc", "opentelemetry")
SERVE_LOGGER = "ray.serve"
LINES_PER_KIND = 5  # in each period
PERIOD_S = 60.0
MOST_KINDS = 1000  # that are remembered
T = TypeVar("T")


class RateLimit(logging.Filter):
    """Passes the first lines of a kind in each minute. The first line of the next minute says how many were left out.

    Lines are of one kind if they have the same logger and the same format string.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # when the period began, and the lines since

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, kind = self._clock(), (record.name, str(record.msg))
        since_s, count = self._kinds.get(kind, (now_s, 0))
        if now_s - since_s >= PERIOD_S:
            if count > LINES_PER_KIND:
                record.msg = f"{record.msg} (and {count - LINES_PER_KIND} like it in {now_s - since_s:.0f} s)"
            since_s, count = now_s, 0
        if len(self._kinds) >= MOST_KINDS:  # libraries may put changing values into the format string
            self._kinds = {kind: period for kind, period in self._kinds.items() if now_s - period[0] < PERIOD_S}
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = since_s, count + 1
        return count < LINES_PER_KIND


class _ToServe(logging.Handler):
    """Passes lines to Serve's handlers, which add the names of the application and the replica."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger(SERVE_LOGGER).handlers:
            handler.handle(record)


def join_serves_log() -> None:
    """Send this process's log lines to Serve's log. Does nothing outside of Serve, in tests and commands."""
    if not inside_replica():
        return
    for serve_handler in logging.getLogger(SERVE_LOGGER).handlers:
        if isinstance(serve_handler, MemoryHandler):  # Serve buffers a thousand lines, as it may log one per request
            serve_handler.flushLevel = logging.NOTSET
    limit = RateLimit()
    for name in (*OWN_LOGGERS, *LIBRARY_LOGGERS):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
            handler = _ToServe()
            handler.addFilter(limit)
            logger.addHandler(handler)
            logger.propagate = False


HEALTH_CHECK_S = 1.0  # how often Serve checks whether a process is alive; it replaces dead ones

is_replica = False  # whether this process computes, and has no HTTP interface


def process_options(log_format: LogFormat, ends_within_s: float, quiet: bool = True) -> dict[str, Any]:
    """The options of every deployment. `quiet`: only warnings are logged."""
    # The access log is off: a line would cost more than its call.
    lines = {"enable_access_log": False, "encoding": log_format.upper()} | ({"log_level": "WARNING"} if quiet else {})
    return {
        "health_check_period_s": HEALTH_CHECK_S,
        "graceful_shutdown_timeout_s": ends_within_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "logging_config": lines,
    }


class ReplicaProcess:
    """The base of all replicas in Serve: their logs, their spans, and their end."""

    def __init__(self) -> None:
        global is_replica
        is_replica = True
        join_serves_log()
        self._tracing = tracing_here(time.perf_counter)
        self._cores: OwnCores | None = None
        # Serve awaits this before it ends a replica. Set on the instance only, so that Python does not call it as well.
        self.__del__ = self.close

    def compute_on_own_cores(self, threads: float) -> None:
        if inside_replica() and (cores := own_cores(threads, node_cpus())):
            self._cores = cores
            cores.pin_threads()

    async def check_health(self) -> None:
        """Serve calls this every HEALTH_CHECK_S, and replaces the replica if it raises an error."""
        if self._cores:
            await asyncio.to_thread(self._cores.pin_threads)

    async def drain(self) -> None:
        """Returns when the replica may end."""

    async def close(self) -> None:
        await self.drain()
        if self._cores:
            await asyncio.to_thread(self._cores.close)
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)


def own_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """A task that continues if the client disconnects. Serve then cancels all calls in the request's context, so the
    task has another one. It is in `tasks` until it ends.
    """
    task = asyncio.get_running_loop().create_task(work, context=Context())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
