"""One connection of the load generator: it sends a request, and reports the answer as soon as it is complete.

Answers are parsed by `httptools`, which takes no more processor time than handwritten code.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from httptools import HttpParserError, HttpResponseParser

BROKEN = 0  # the status of a request that got no answer
T = TypeVar("T")


class _Looks(selectors.DefaultSelector):
    """Knows when it looked before it looked last: what is read now was not here then."""

    before_s = _last_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        self.before_s, self._last_s = self._last_s, time.perf_counter()
        return found


class _LookingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.looks = _Looks()
        super().__init__(self.looks)


def looking(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in an event loop that knows when it looked for answers: a busy one reads them late."""
    with asyncio.Runner(loop_factory=_LookingLoop) as runner:
        return runner.run(work)


def absent_s() -> float:
    """When whatever is read now was not here yet, as far as this event loop knows."""
    loop = asyncio.get_running_loop()
    return loop.looks.before_s if isinstance(loop, _LookingLoop) else 0.0


class Carrier(Protocol):
    """Carries one request at a time, as long as it has a transport."""

    @property
    def transport(self) -> asyncio.Transport | None: ...

    def ask(self, request: bytes, done: Callable[[int, bytes], None]) -> None: ...


class HttpConnection(asyncio.Protocol):
    """One request at a time. `done(status, body)` is called when it is answered, or when the connection breaks."""

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
        """The parser calls it with every piece of an answer's body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The parser calls it at the end of an answer."""
        status, body = self._parser.get_status_code(), b"".join(self._body)
        self._body.clear()
        if not self._parser.should_keep_alive():  # the server reads no further request from this connection
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
