"""Load on a running server over plain HTTP/1.1, with as little processor time as possible in Python.

Open loop: a request is due at a time of the workload, even if earlier ones are not answered, and its latency counts
from that time. So a slow server cannot reduce its own load (no coordinated omission). Closed loop (`by_clients`): each
client sends its next request as soon as the last is answered, which shows a server's capacity.
"""

import asyncio
import resource
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from errno import EMFILE
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

import numpy as np
from httptools import HttpParserError, HttpResponseParser
from numpy.typing import NDArray

from isobatch.profiles.errors import UserError

BROKEN = 0  # the status of a request that got no answer
T = TypeVar("T")


def http_parts(url: str) -> tuple[SplitResult, tuple[str, int]]:
    """The parts of an address of plain HTTP, and its host and port; raise UserError for another one."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise UserError(f"{url!r} must look like http://HOST:PORT")
    return parts, (parts.hostname, parts.port or 80)


class _PollingSelector(selectors.DefaultSelector):
    """Notes the time of the poll before the last: data that is read after the last poll had not arrived then."""

    previous_s = _last_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(timeout)
        self.previous_s, self._last_s = self._last_s, time.perf_counter()
        return events


class _PollingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.polls = _PollingSelector()
        super().__init__(self.polls)


def run_noting_polls(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in an event loop that notes when it polls for answers, because a busy loop reads them late."""
    with asyncio.Runner(loop_factory=_PollingLoop) as runner:
        return runner.run(work)


def absent_s() -> float:
    """The last time at which the data that is read now provably had not arrived; 0: this event loop keeps none."""
    loop = asyncio.get_running_loop()
    return loop.polls.previous_s if isinstance(loop, _PollingLoop) else 0.0


class Carrier(Protocol):
    """A connection for one request at a time. It can be used as long as it has a transport."""

    @property
    def transport(self) -> asyncio.Transport | None: ...

    def ask(self, request: bytes, done: Callable[[int, bytes], None]) -> None: ...


class HttpConnection(asyncio.Protocol):
    """Sends one request at a time. `done(status, body)` is called when it is answered or the connection breaks."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self._body: list[bytes] = []
        self._done: Callable[[int, bytes], None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes, done: Callable[[int, bytes], None]) -> None:
        assert self.transport
        self._done = done
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._close()

    def on_body(self, body: bytes) -> None:
        """Called by the parser with each piece of an answer's body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of an answer."""
        status, body = self._parser.get_status_code(), b"".join(self._body)
        self._body.clear()
        if not self._parser.should_keep_alive():  # the server will read no further request
            self._close()
        self._finish(status, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._finish(BROKEN, b"")

    def _close(self) -> None:
        if self.transport:
            self.transport.close()
            self.transport = None

    def _finish(self, status: int, body: bytes) -> None:
        done, self._done = self._done, None
        if done:
            done(status, body)


Floats = NDArray[np.float64]
WRONG = -1  # the status of a request with a wrong answer
PENDING_CHECK_S = 0.01  # how often to check for pending answers at the end
ROW = np.dtype([(name, float) for name in ("due_s", "reached_s", "sent_s", "ended_s", "absent_s")] + [("status", int)])
UNSENT = np.array((*[np.nan] * 5, BROKEN), ROW)  # a row of LoadRecord
SLOTS = 2**16  # initial capacity for the requests of a closed loop; doubled when it is used up
REFUSED_S = 0.2  # the pause after a connection that the server did not accept
FIRST_CONNECTIONS = 32  # opened before the load begins
OTHER_FILES = 64  # besides connections


@dataclass(frozen=True)
class LoadRecord:
    """The times of each request in seconds since the start, and the HTTP status of its answer.

    From `due_s` to `reached_s` the generator is late, from there to `absent_s` the server. From `absent_s` to
    `ended_s`, either the answer had not arrived, or the generator was busy and did not poll.
    """

    due_s: Floats
    reached_s: Floats  # when the generator handled it
    sent_s: Floats  # when a connection was free
    ended_s: Floats
    status: NDArray[np.int64]
    absent_s: Floats  # the last poll without an answer; if it is not known, when the request was sent
    duration_s: float = 0.0  # how long the load was to last; 0: until the last request was due


class LoadGenerator:
    """Sends requests to one URL over up to `connections` connections; further requests wait here for a free one."""

    patience_s = 10.0  # for the next answer, once all requests are sent

    def __init__(
        self,
        url: str,
        bodies: Sequence[bytes],
        connections: int = 512,
        headers: str = "",
        right: Callable[[int, bytes], bool] = lambda body, answer: True,
        connection: Callable[[], HttpConnection] = HttpConnection,
    ) -> None:
        """`right(index of the body, answer)` returns whether an answer is correct."""
        parts, self._place = http_parts(url)
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{headers}"
        )
        self._requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
        self._most, self._right, self._connection = connections, right, connection
        self.errors: dict[int, bytes] = {}  # the first answer with each status other than 200
        self._rows: NDArray[Any] = np.empty(0, ROW)
        self._open = self._sent = 0
        self.streamed = 0  # bytes of answers that came piece by piece
        self._started_s = time.perf_counter()
        self._idle: list[Carrier] = []
        self._queue: deque[int] = deque()
        self._done: Callable[[int], None] = lambda _: None

    async def at(self, due_s: Floats, patience_s: float | None = None) -> LoadRecord:
        """Open loop: send a request at each of these times. If nothing comes for `patience_s`, the rest is lost."""
        await self._connect(min(self._most, FIRST_CONNECTIONS))
        self._begin(due_s)
        self._stopped, self._sent = False, 0
        for index, due in enumerate(due_s):
            if (wait_s := due - self.now_s()) > 0:
                await asyncio.sleep(wait_s)
            if self._stopped:
                break
            self._send(index)
            self._sent = index + 1
        await self._end(patience_s or self.patience_s)
        return self.so_far()

    def so_far(self) -> LoadRecord:
        columns: dict[str, Any] = {name: self._rows[name][: self._sent].copy() for name in ROW.fields or ()}
        return LoadRecord(**columns)

    def stop(self) -> None:
        self._stopped = True

    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    async def by_clients(self, clients: int, seconds: float) -> LoadRecord:
        """Closed loop: each of `clients` sends its next request as soon as the one before is answered."""
        await self._connect(clients)
        self._begin(np.full(SLOTS, np.nan))
        sent = count()

        def again(_: int) -> None:
            if self.now_s() < seconds:
                index = next(sent)
                if index == len(self._rows):
                    self._rows = np.concatenate([self._rows, np.full(index, UNSENT)])
                self._rows["due_s"][index] = self.now_s()
                self._send(index)

        self._done = again
        for client in range(clients):
            again(client)
        await asyncio.sleep(seconds)
        await self._end(self.patience_s)
        self._sent = int((~np.isnan(self._rows["due_s"])).sum())
        return replace(self.so_far(), duration_s=seconds)

    async def _connect(self, count: int) -> None:
        _allow_files(max(count, self._most) + OTHER_FILES)
        try:
            await asyncio.gather(*(self._one_more() for _ in range(count)))
        except OSError as error:
            if error.errno == EMFILE:
                problem = f"{count} connections are more files than this process may open"
                raise UserError(f"{problem}: raise the limit (ulimit -n), or give fewer --clients") from error
            raise UserError(f"nobody answers at {self._place[0]}:{self._place[1]}: {error}") from error

    async def _one_more(self) -> None:
        self._open += 1
        _, connection = await asyncio.get_running_loop().create_connection(self._connection, *self._place)
        self._release(connection)

    async def _try_one_more(self) -> None:
        """Open a connection once the server accepts it. A refusal under load is no error: requests keep waiting."""
        try:
            await self._one_more()
        except OSError:
            await asyncio.sleep(REFUSED_S)
            self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._queue:
            self._begin_task(self._try_one_more())

    def _begin(self, due_s: Floats) -> None:
        self._rows = np.full(len(due_s), UNSENT)
        self._rows["due_s"] = due_s
        self._background: set[asyncio.Task[None]] = set()
        self._pending = 0
        self._started_s = time.perf_counter()

    async def _end(self, patience_s: float) -> None:
        """Wait for pending answers. Time for which this process itself was suspended does not count."""
        waited_s = 0.0
        while self._pending and waited_s < patience_s:
            before = self._pending, self.streamed
            await asyncio.sleep(PENDING_CHECK_S)
            waited_s = waited_s + PENDING_CHECK_S if (self._pending, self.streamed) == before else 0.0
        self._done = lambda _: None
        self._queue.clear()
        for connection in self._idle:
            if connection.transport:
                connection.transport.close()

    def _send(self, index: int) -> None:
        self._pending += 1
        self._rows["reached_s"][index] = self.now_s()
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
        self._rows["sent_s"][index] = self.now_s()
        connection.ask(self._requests[index % len(self._requests)], partial(self._finish, connection, index))

    def _finish(self, connection: Carrier, index: int, status: int, answer: bytes) -> None:
        if status == 200 and not self._right(index % len(self._requests), answer):
            status = WRONG
        if status != 200:
            self.errors.setdefault(status, answer)
        self._rows["ended_s"][index], self._rows["status"][index] = self.now_s(), status
        self._rows["absent_s"][index] = max(self._rows["sent_s"][index], absent_s() - self._started_s)
        self._pending -= 1
        self._release(connection)
        self._done(index)

    def _release(self, connection: Carrier) -> None:
        if not connection.transport:
            self._one_less()
        elif self._queue:
            self._ask(connection, self._queue.popleft())
        else:
            self._idle.append(connection)


def _allow_files(count: int) -> None:
    """Let this process open this many files, as far as its hard limit allows: the usual soft one is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
