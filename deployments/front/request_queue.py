"""A queue before reading: requests enter one by one, and only if they can still be answered in time.

Reading a request and encoding its inputs blocks the front's event loop. So requests wait here, and one turn of the loop
lets in only a few milliseconds of work: answers and health checks run in between. The delay of the requests ahead
follows from the recent pace of the queue. A request that cannot be in time is refused at once, before its body is
parsed. A large request takes longer itself, so it is refused first.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from isobatch.deployments.front.answers import RefusedError

# The work that one turn of the event loop lets in: short enough for health checks.
SLICE_S = 0.004
# The factor by which earlier turns count less in the pace with each new one.
_REMEMBERED = 0.9


@dataclass(eq=False)
class _Turn:
    """A request that waits."""

    entered: "asyncio.Future[None]"
    work_s: float
    latest_s: float  # the last moment to enter in time


class RequestQueue:
    """Must be used from one event loop, with a monotonic clock. Work is in seconds of the front's processor time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[_Turn] = deque()
        self._ahead_s = 0.0  # the work of waiting requests
        self._left_s = SLICE_S  # the work that this turn of the event loop may still let in
        self._entered_s = 0.0  # the work that entered in this turn
        self._turning = False  # whether the next turn is scheduled
        self._began_s = self._ended_s = self._turn_s = 0.0  # start, end and duration of the last turn
        self._passed_s = self._took_s = 0.0  # the work of recent turns, and the time that they took

    @property
    def idle(self) -> bool:
        """No request waits, and none has entered in this turn of the event loop."""
        return not self._turning

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def unseen_s(self) -> float:
        """The time that a new request may have waited until the event loop turned to it."""
        return self._turn_s if self._clock() - self._ended_s <= self._turn_s else 0.0

    def expected_s(self, work_s: float) -> float:
        """The time until work that arrives now is done."""
        pace = self._took_s / self._passed_s if self._passed_s else 1.0  # above 1: the loop does other work too
        return (self._ahead_s + work_s) * max(1.0, pace)

    def check(self, work_s: float, latest_s: float) -> None:
        """Raise `RefusedError` if work that arrives now cannot be done by `latest_s`."""
        late_s = self._clock() + self.expected_s(work_s) - latest_s
        if late_s > 0:
            raise _refused(late_s)

    async def turn(self, work_s: float, latest_s: float) -> None:
        """Wait until the request may enter. Raises `RefusedError` if that takes until after `latest_s`."""
        if not self._waiting and self._left_s > 0:
            return self._enter(work_s)
        turn = _Turn(asyncio.get_running_loop().create_future(), work_s, latest_s - work_s)
        self._waiting.append(turn)
        self._ahead_s += work_s
        self._turn_again()
        return await turn.entered

    def _enter(self, work_s: float) -> None:
        self._left_s -= work_s
        self._entered_s += work_s
        self._turn_again()

    def _turn_again(self) -> None:
        if not self._turning:
            self._turning, self._began_s = True, self._clock()
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Begin another turn of the event loop."""
        now_s = self._clock()
        self._turn_s, self._ended_s, self._turning = now_s - self._began_s, now_s, False
        if self._waiting and self._entered_s:
            self._passed_s = _REMEMBERED * self._passed_s + self._entered_s
            self._took_s = _REMEMBERED * self._took_s + self._turn_s
        self._left_s, self._entered_s = SLICE_S, 0.0
        while self._waiting and self._left_s > 0:
            turn = self._waiting.popleft()
            self._ahead_s = self._ahead_s - turn.work_s if self._waiting else 0.0
            if turn.entered.done():  # cancelled: its client has gone
                continue
            if now_s > turn.latest_s:
                turn.entered.set_exception(_refused(now_s - turn.latest_s))
            else:
                turn.entered.set_result(None)
                self._enter(turn.work_s)
        if self._waiting:
            self._turn_again()


def _refused(late_s: float) -> RefusedError:
    return RefusedError(503, "refused: the deadline cannot be met with what is ahead", retry_after_s=late_s)
