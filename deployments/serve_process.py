"""The processes of an application, as Serve starts, checks and ends them."""

import asyncio
import time
from typing import Any

from deployments.config import LogFormat
from deployments.logs import join_serves_log, logging_config
from deployments.tracing import tracing_here

HEALTH_CHECK_S = 1.0  # how often Serve checks whether a process is alive; it replaces dead ones

is_replica = False  # whether this process computes, and has no HTTP interface


def process_options(log_format: LogFormat, ends_within_s: float, quiet: bool = True) -> dict[str, Any]:
    """The options of every deployment. `quiet`: only warnings are logged."""
    return {
        "health_check_period_s": HEALTH_CHECK_S,
        "graceful_shutdown_timeout_s": ends_within_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "logging_config": logging_config(log_format, quiet),
    }


class ReplicaProcess:
    """A replica in Serve, whatever it computes: its log, its spans, and its end."""

    def __init__(self) -> None:
        global is_replica
        is_replica = True
        join_serves_log()
        self._tracing = tracing_here(time.perf_counter)
        # Serve awaits this before it ends a replica. Set on the instance only, so that Python does not call it as well.
        self.__del__ = self.close

    async def drain(self) -> None:
        """Returns when the replica may end."""

    async def close(self) -> None:
        await self.drain()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)
