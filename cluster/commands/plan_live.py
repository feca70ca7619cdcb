"""The best plan so far, on a line that changes, until the time is over or Ctrl-C is pressed."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

from isobatch.deployments.progress import EVERY_S, FIRST_LINE_S
from isobatch.optimizer import Plan

# The shares of --seconds after which the search ends and after which no further plan is simulated. The rest is needed
# to simulate the best plan with other inputs, which make its promise.
SEARCHING, CHOOSING = 0.3, 0.6
CHANGES_S = 0.2  # between two changes of the line on a terminal


class LivePlan:
    """Shows the best plan so far, and says when to stop: after `seconds`, if given, or at the first Ctrl-C."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self._began_s = clock, inf if seconds is None else seconds, clock()
        self._until_share, self._stopped = SEARCHING, False
        self._console = Console(stderr=True)
        self._status: Status | None = self._console.status("planning") if self._console.is_terminal else None
        self._due_s = self._began_s + (0.0 if self._status else FIRST_LINE_S)
        self._best = "planning"
        self._before: Any = None  # the handler of Ctrl-C

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._stop)
        if self._status:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._status:
            self._status.stop()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def is_over(self) -> bool:
        """Whether to stop searching, and later whether to simulate no further plan."""
        self._show()
        return self._stopped or self._clock() - self._began_s >= self._until_share * self._seconds

    def is_stopped(self) -> bool:
        return self._stopped

    def estimated(self, plan: Plan, rate_per_s: float) -> None:
        """A first plan, with the planner's estimate of its goodput."""
        self._best = f"{rate_per_s:,.0f} per second by estimate: {_splits(plan)}"
        self._show()

    def allow(self, share: float) -> None:
        """What follows may go on until this share of `seconds` is over."""
        self._until_share = share

    def better(self, plan: Plan, rate_per_s: float, tried: int) -> None:
        """A plan that sustains more in the simulator than all before."""
        self._best = f"{rate_per_s:,.0f} per second, as simulated: {_splits(plan)}; {tried} other plans tried"
        self._show()

    def _show(self) -> None:
        if (now_s := self._clock()) < self._due_s:
            return
        line = f"{self._best}; {now_s - self._began_s:.0f} s"
        if self._status:
            keeps = "confirming it with other inputs" if self._stopped else "Ctrl-C keeps it"
            self._status.update(f"{line}; {keeps}")
        else:
            print(f"planning: {line}", file=sys.stderr, flush=True)
        self._due_s = now_s + (CHANGES_S if self._status else EVERY_S)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Keep the best plan at the first Ctrl-C; end without a plan at the second."""
        if self._stopped:
            raise KeyboardInterrupt
        self._stopped, self._due_s = True, 0.0


def _splits(plan: Plan) -> str:
    """The batch sizes of a plan's splits, by pipeline.

    >>> from isobatch.optimizer import Placement, Split
    >>> _splits(Plan((Placement("v100", 2, (Split(0, 6, 8), Split(6, 12, 4))),)))
    'batches of 8 > 4'
    """
    pipelines = (" > ".join(str(split.batch_size) for split in each.splits) for each in plan.pipelines)
    return f"batches of {' beside '.join(pipelines)}"
