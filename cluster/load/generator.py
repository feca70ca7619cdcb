"""Load on a live server over plain HTTP/1.1, as cheap as Python allows, so that the server is the limit.

Open loop: a request is due when the workload says so, whether or not earlier ones were answered, and its latency counts
from then. So a slow server cannot lighten the load that it is measured under (no coordinated omission). Closed loop
(`by_clients`): each client asks again as soon as it is answered, to find out how much a server can do.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from cluster.load.connection import BROKEN, Carrier, HttpConnection, absent_s
from profiles.errors import UserError

Floats = NDArray[np.float64]
WRONG = -1  # the status of a request whose answer is not what it should be
TURN_S = 0.01
AGAIN_S = 0.1  # the wait before a request whose connection broke is sent again
SLOTS = 2**16  # for the requests of a closed loop, doubled whenever all are taken


@dataclass(frozen=True)
class LoadRecord:
    """The times of each request in seconds since the start, and HTTP's status of its answer.

    The time from `due_s` to `reached_s` is the generator's own delay, that to `absent_s` the server's; in the rest,
    until `ended_s`, either the answer was not here yet, or the generator was busy and did not look.
    """

    due_s: Floats
    reached_s: Floats  # when the generator turned to it
    sent_s: Floats  # once a connection was free
    ended_s: Floats
    status: NDArray[np.int64]
    absent_s: Floats  # when it last looked, and had no answer; when it was sent, where that is not known
    asked_s: float = 0.0  # how long the load was to last; 0: until the last request was due


class LoadGenerator:
    """Sends requests to one URL over up to `connections` connections; further requests wait here for a free one."""

    def __init__(
        self,
        url: str,
        bodies: Sequence[bytes],
        connections: int = 512,
        headers: str = "",
        right: Callable[[int, bytes], bool] = lambda body, answer: True,
        again_s: float = 0.0,
    ) -> None:
        """`right(index of the body, answer)` says whether an answer is what it should be.

        A request whose connection ends without an answer is sent again for `again_s`, each time over a new connection.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"{url!r} must look like http://HOST:PORT/PATH")
        self._place = parts.hostname, parts.port or 80
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{headers}"
        )
        self._requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
        self._most, self._right, self._again_s = connections, right, again_s
        self.resent: set[int] = set()  # requests that were sent more than once since the load began
        self.said: dict[int, bytes] = {}  # the first answer of every status other than 200
        self._open = 0
        self._idle: list[Carrier] = []
        self._queue: deque[int] = deque()
        self._done: Callable[[int], None] = lambda _: None

    async def at(self, due_s: Floats, patience_s: float = 10.0) -> LoadRecord:
        """Open loop: send a request at each of these times; once none has ended for `patience_s`, the rest is lost."""
        await self._connect(min(self._most, 32))
        self._begin(due_s)
        self._stopped, self._sent = False, 0
        for index, due in enumerate(due_s):
            if (wait_s := due - self.now_s()) > 0:
                await asyncio.sleep(wait_s)
            if self._stopped:
                break
            self._send(index)
            self._sent = index + 1
        await self._end(patience_s)
        return self.so_far()

    def so_far(self) -> LoadRecord:
        """The record of the requests that were sent until now."""
        sent = slice(self._sent)
        return LoadRecord(
            self._due_s[sent].copy(), self._reached_s[sent].copy(), self._sent_s[sent].copy(),
            self._ended_s[sent].copy(), self._status[sent].copy(), self._absent_s[sent].copy(),
        )  # fmt: skip

    def stop(self) -> None:
        """Send no further requests."""
        self._stopped = True

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._started_s

    async def by_clients(self, clients: int, seconds: float) -> LoadRecord:
        """Closed loop: each of `clients` sends its next request as soon as the one before is answered."""
        await self._connect(clients)
        self._begin(np.full(SLOTS, np.nan))
        sent = count()

        def again(_: int) -> None:
            if self.now_s() < seconds:
                index = next(sent)
                if index == len(self._due_s):
                    self._double()
                self._due_s[index] = self.now_s()
                self._send(index)

        self._done = again
        for client in range(clients):
            again(client)
        await asyncio.sleep(seconds)
        await self._end(patience_s=10.0)
        self._sent = int((~np.isnan(self._due_s)).sum())
        return replace(self.so_far(), asked_s=seconds)

    async def _connect(self, count: int) -> None:
        try:
            await asyncio.gather(*(self._one_more() for _ in range(count)))
        except OSError as error:
            raise UserError(f"nobody answers at {self._place[0]}:{self._place[1]}: {error}") from error

    async def _one_more(self) -> None:
        self._open += 1
        _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, *self._place)
        self._release(connection)

    async def _try_one_more(self) -> None:
        """Open a connection if the server takes one; a refusal under load is no error, as requests go on waiting."""
        try:
            await self._one_more()
        except OSError:
            self._open -= 1

    def _begin(self, due_s: Floats) -> None:
        self._due_s = np.array(due_s, np.float64)
        times = [np.full(len(due_s), np.nan) for _ in range(4)]
        self._reached_s, self._sent_s, self._ended_s, self._absent_s = times
        self._status = np.full(len(due_s), BROKEN)
        self._background: set[asyncio.Task[None]] = set()
        self._pending = 0
        self.resent.clear()
        self._started_s = time.perf_counter()

    def _double(self) -> None:
        """Have room for as many requests again, which are not sent yet."""
        unknown = np.full(len(self._due_s), np.nan)
        times = (self._due_s, self._reached_s, self._sent_s, self._ended_s, self._absent_s)
        self._due_s, self._reached_s, self._sent_s, self._ended_s, self._absent_s = (
            np.concatenate([each, unknown]) for each in times
        )
        self._status = np.concatenate([self._status, np.full(len(self._status), BROKEN)])

    async def _end(self, patience_s: float) -> None:
        """Wait for what is pending. A time for which this process itself was held up does not count."""
        waited_s = 0.0
        while self._pending and waited_s < patience_s:
            pending = self._pending
            await asyncio.sleep(TURN_S)
            waited_s = 0.0 if self._pending < pending else waited_s + TURN_S
        self._done = lambda _: None
        for connection in self._idle:
            if connection.transport:
                connection.transport.close()

    def _send(self, index: int) -> None:
        self._pending += 1
        self._reached_s[index] = self.now_s()
        while self._idle:
            connection = self._idle.pop()
            if connection.transport:
                return self._ask(connection, index)
            self._open -= 1
        self._queue.append(index)
        if self._open < self._most:
            self._begin_task(self._try_one_more())
        return None

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _ask(self, connection: Carrier, index: int) -> None:
        self._sent_s[index] = self.now_s()

        def done(status: int, answer: bytes) -> None:
            if status == BROKEN and self.now_s() < self._due_s[index] + self._again_s:
                self._release(connection)
                return self._later(index)
            if status == 200 and not self._right(index % len(self._requests), answer):
                status = WRONG
            if status != 200:
                self.said.setdefault(status, answer)
            self._ended_s[index], self._status[index] = self.now_s(), status
            self._absent_s[index] = max(self._sent_s[index], absent_s() - self._started_s)
            self._pending -= 1
            self._release(connection)
            return self._done(index)

        connection.ask(self._requests[index % len(self._requests)], done)

    def _later(self, index: int) -> None:
        self.resent.add(index)
        asyncio.get_running_loop().call_later(AGAIN_S, lambda: self._begin_task(self._send_anew(index)))

    async def _send_anew(self, index: int) -> None:
        """Send the request over a new connection, since idle ones may have broken for the same reason."""
        try:
            _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, *self._place)
        except OSError:
            if self.now_s() < self._due_s[index] + self._again_s:
                return self._later(index)
            self._pending -= 1
            return None
        self._open += 1
        return self._ask(connection, index)

    def _release(self, connection: Carrier) -> None:
        if not connection.transport:
            self._open -= 1
            if self._queue:
                self._begin_task(self._try_one_more())
        elif self._queue:
            self._ask(connection, self._queue.popleft())
        else:
            self._idle.append(connection)
