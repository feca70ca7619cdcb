"""One connection of the load generator: a request goes out, and its answer is told as soon as all of it is there."""

import asyncio
from collections.abc import Callable

BROKEN = 0  # the status of a request that got no answer
_HEAD_END, _LENGTH, _LAST_CHUNK = b"\r\n\r\n", b"content-length:", b"\r\n0\r\n\r\n"
_CLOSE = b"\r\nconnection: close"


class Connection(asyncio.Protocol):
    """One request at a time. `done(status, body)` is called when it is answered, or when the connection breaks."""

    def __init__(self) -> None:
        self._buffer = bytearray()
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
        self._buffer += data
        if not _is_whole(self._buffer):
            return
        head, _, body = bytes(self._buffer).partition(_HEAD_END)
        self._buffer.clear()
        if _CLOSE in head.lower() and self.transport:  # whoever asks again here would not be heard
            self.transport.close()
            self.transport = None
        self._finish(int(head[9:12]), body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._finish(BROKEN, b"")

    def _finish(self, status: int, body: bytes) -> None:
        done, self._done = self._done, None
        if done:
            done(status, body)


def _is_whole(reply: bytes | bytearray) -> bool:
    """Has all of an answer arrived? One that is sent in chunks ends with an empty one.

    >>> _is_whole(b"HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\nab")
    False
    >>> _is_whole(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n1\\r\\na\\r\\n0\\r\\n\\r\\n")
    True
    """
    end = reply.find(_HEAD_END)
    if end < 0:
        return False
    head = reply[:end].lower()
    start = head.find(_LENGTH)
    if start < 0:
        return reply.endswith(_LAST_CHUNK)
    return len(reply) >= end + len(_HEAD_END) + int(head[start + len(_LENGTH) :].split(b"\r\n", 1)[0])
