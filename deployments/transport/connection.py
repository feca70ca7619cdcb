"""A connection that carries messages both ways, with the arrays that follow them: the only reader of frames.

Large arrays are received straight into their own memory. Small ones share a buffer, so that one look at the socket can
bring a whole frame.
"""

import asyncio
import logging
from collections.abc import Generator, Iterable, Iterator
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from deployments.transport.frames import LENGTH, LONGEST, frame
from deployments.transport.wire import notice_silence

log = logging.getLogger(__name__)
SMALL = 2**16


class MessageConnection(asyncio.BufferedProtocol):
    """A subclass says which messages it understands, and acts on them in `heard`.

    The connection ends at any other message, at one longer than allowed, and at one that comes too late.
    """

    messages: ClassVar[msgspec.msgpack.Decoder[Any]]

    _most_bytes = LONGEST
    _too_late: asyncio.TimerHandle | None = None
    _error: Exception | None = None  # why this side ended the connection

    def heard(self, message: Any) -> Iterator[memoryview]:
        """Yield the buffers for the bytes that follow the message, none of them empty; when they are full, act."""
        raise NotImplementedError

    def lost(self, error: Exception | None) -> None:
        """The connection has ended, with this error if there was one."""

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def allow(self, most_bytes: int = LONGEST, within_s: float | None = None) -> None:
        """Allow messages of so many bytes from now on; `allow` must be called again within `within_s`, if given.

        A caller without the key gets little of both, because a message's memory is allocated before the message comes.
        """
        self._most_bytes = most_bytes
        self._wait_no_longer()
        if within_s is not None:
            self._too_late = asyncio.get_running_loop().call_later(within_s, self._end, TimeoutError("nothing came"))

    def say(self, message: object, rest: Iterable[memoryview] = ()) -> None:
        """Send a message and the bytes that follow it as one. Does nothing once the connection has ended."""
        if self.is_open:
            self._transport.writelines([frame(message), *rest])

    def hang_up(self) -> None:
        """End the connection when everything has been sent."""
        self._transport.close()

    # Calls of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        notice_silence(transport)
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is one without inheriting from it
        self._shared = memoryview(bytearray(SMALL))
        self._buffers = self._frames()
        self._buffer = next(self._buffers)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared if len(self._buffer) < SMALL else self._buffer

    def buffer_updated(self, count: int) -> None:
        try:
            if len(self._buffer) < SMALL:
                self._distribute(self._shared[:count])
            else:
                self._filled(count)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._wait_no_longer()
        self._buffers.close()  # it refers to this object: memory would wait until somebody looks for garbage
        self._shared = self._buffer = memoryview(b"")
        self.lost(self._error or error)

    # Distributing the received bytes to their buffers

    def _distribute(self, came: memoryview) -> None:
        while came:
            size = min(len(came), len(self._buffer))
            self._buffer[:size] = came[:size]
            came = came[size:]
            self._filled(size)

    def _filled(self, size: int) -> None:
        self._buffer = self._buffer[size:] if size < len(self._buffer) else next(self._buffers)

    def _frames(self) -> Generator[memoryview, None, None]:
        """Yield the buffer for the next bytes, for ever."""
        length = bytearray(LENGTH.size)
        while True:
            yield memoryview(length)
            message = np.empty(self._checked(*LENGTH.unpack(length)), np.uint8).data
            yield message
            yield from self.heard(self.messages.decode(message))

    def _checked(self, length: int) -> int:
        if not 0 < length <= self._most_bytes:
            raise ValueError(f"a message of {length} bytes: 1 to {self._most_bytes} are allowed")
        return length

    def _end(self, error: Exception) -> None:
        log.warning("a connection was ended, as its other end breaks the rules: %r", error)
        self._error = error.with_traceback(None)  # which would refer to this object
        self._transport.abort()

    def _wait_no_longer(self) -> None:
        if self._too_late:
            self._too_late.cancel()
            self._too_late = None
