"""A connection of the load generator: it sends a request, and reports the answer as soon as it is complete.

`httptools` parses the answers; it takes no more processor time than handwritten code.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from httptools import HttpParserError, HttpResponseParser

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
    """The last time when the data that is read now had surely not arrived; 0: this event loop does not note it."""
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
