"""A queue before decoding: requests go in one after the other, and none that could not be answered in time.

To read a request and to encode its inputs takes the front time that nobody else gets. So requests wait here for their
turn, and one turn of the event loop lets in only as many as a few milliseconds of work: answers and health checks get
through meanwhile. How long those ahead take is known from how fast they have passed lately. Who cannot be in time is
refused at once, before its body is looked at. A large request takes longer itself, so it is the first that there is no
time for.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deployments.front.answers import RefusedError

SLICE_S = 0.004  # work that one turn of the event loop lets in
_KEPT = 0.9  # of the sums by which the pace is known, when a turn is added


@dataclass(eq=False)
class _Turn:
    """One that waits."""

    entered: "asyncio.Future[None]"
    work_s: float
    latest_s: float  # let in later, it would be late


class RequestQueue:
    """Must be used from one event loop, with a monotonic clock. Work is in seconds of the front's processor time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[_Turn] = deque()
        self._ahead_s = 0.0  # work of those who wait
        self._left_s = SLICE_S  # work that this turn of the event loop may still let in
        self._let_in_s = 0.0  # work that it has let in
        self._turning = False  # whether the next turn is awaited
        self._began_s = self._ended_s = self._turn_s = 0.0  # the last turn, and how long it took
        self._passed_s = self._took_s = 0.0  # work that has passed lately, and how long that took

    @property
    def idle(self) -> bool:
        """Nobody waits, and this turn of the event loop has let in nobody yet."""
        return not self._turning

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def unseen_s(self) -> float:
        """How long a request that is seen only now may have waited for the event loop to turn to it."""
        return self._turn_s if self._clock() - self._ended_s <= self._turn_s else 0.0

    def expected_s(self, work_s: float) -> float:
        """How long it takes until work that comes now is done."""
        pace = self._took_s / self._passed_s if self._passed_s else 1.0  # there is more to do than to decode
        return (self._ahead_s + work_s) * max(1.0, pace)

    def check(self, work_s: float, latest_s: float) -> None:
        """Refuse work that cannot be done by then."""
        late_s = self._clock() + self.expected_s(work_s) - latest_s
        if late_s > 0:
            raise _refused(late_s)

    async def turn(self, work_s: float, latest_s: float) -> None:
        """Returns when it is its turn. Refused is who waits until it is too late, whatever was expected."""
        if not self._waiting and self._left_s > 0:
            return self._let_in(work_s)
        turn = _Turn(asyncio.get_running_loop().create_future(), work_s, latest_s - work_s)
        self._waiting.append(turn)
        self._ahead_s += work_s
        self._turn_again()
        return await turn.entered

    def _let_in(self, work_s: float) -> None:
        self._left_s -= work_s
        self._let_in_s += work_s
        self._turn_again()

    def _turn_again(self) -> None:
        if not self._turning:
            self._turning, self._began_s = True, self._clock()
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Another turn of the event loop has begun."""
        now_s = self._clock()
        self._turn_s, self._ended_s, self._turning = now_s - self._began_s, now_s, False
        if self._waiting and self._let_in_s:
            self._passed_s = _KEPT * self._passed_s + self._let_in_s
            self._took_s = _KEPT * self._took_s + self._turn_s
        self._left_s, self._let_in_s = SLICE_S, 0.0
        while self._waiting and self._left_s > 0:
            turn = self._waiting.popleft()
            self._ahead_s = self._ahead_s - turn.work_s if self._waiting else 0.0
            if turn.entered.done():  # its client has gone
                continue
            if now_s > turn.latest_s:
                turn.entered.set_exception(_refused(now_s - turn.latest_s))
            else:
                turn.entered.set_result(None)
                self._let_in(turn.work_s)
        if self._waiting:
            self._turn_again()


def _refused(late_s: float) -> RefusedError:
    return RefusedError(503, "refused: the deadline cannot be met with what is ahead", retry_after_s=late_s)
