"""Sends gRPC calls with little processor time, since gRPC's own client is slower than a server that refuses.

A connection carries many calls, each in one of its `CALLS` slots; the load generator treats a slot as a connection.
Only the part of HTTP/2 is there that a call with one message each way needs. Headers are sent without compression.
Those of answers are searched as text, since a proxy without a table for compression does not compress them either.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from isobatch.cluster.load.generator import BROKEN, LoadGenerator
from isobatch.deployments.front.open_inference.messages import SERVICE

CALLS = 128  # calls of a connection at once, as the front's HAProxy allows
_FRAME = 16_384  # bytes of a frame, at most
_HEAD = struct.Struct("!BHBBI")  # of a frame: its length in two parts, type, flags, stream
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WIDE = 2**30  # the window in bytes; so large that it is never renewed
_STATUS = {b"0": 200, b"14": 503, b"8": 503, b"4": 504}  # gRPC's code -> HTTP's


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


_HELLO = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    # no table of headers, no push, wide streams
    + _frame(_SETTINGS, 0, 0, struct.pack("!HIHIHI", 1, 0, 2, 0, 4, _WIDE))
    + _frame(_WINDOW, 0, 0, struct.pack("!I", _WIDE))
)


def _header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class CallLoad(LoadGenerator):
    """Sends these messages to ModelInfer, with the deadline `timeout_ms`; it waits for answers beyond the deadline."""

    def __init__(self, target: str, messages: list[bytes], timeout_ms: float, connections: int) -> None:
        super().__init__(f"http://{target}/", [], connections * CALLS)
        self._connections = connections
        headers = b"\x83\x86"  # POST, http
        fields = [(b":path", f"/{SERVICE}/ModelInfer".encode()), (b":authority", target.encode()), (b"te", b"trailers")]
        fields += [(b"content-type", b"application/grpc"), (b"grpc-timeout", b"%dm" % timeout_ms)]
        self._headers = headers + b"".join(_header(name, value) for name, value in fields)
        self._requests = [b"\0" + struct.pack("!I", len(each)) + each for each in messages]

    async def _connect(self, count: int) -> None:
        for _ in range(self._connections):
            await self._one_more()

    async def _one_more(self) -> None:
        loop = asyncio.get_running_loop()
        self._open += CALLS
        _, connection = await loop.create_connection(lambda: CallingConnection(self._headers), *self._place)
        for _ in range(CALLS):
            self._release(Slot(connection))


class Slot:
    """Carries one call at a time, as a connection of HTTP carries one request."""

    def __init__(self, connection: "CallingConnection") -> None:
        self._connection = connection

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._connection.transport

    def ask(self, request: bytes, done: Callable[[int, bytes], Any]) -> None:
        self._connection.call(request, done)


class CallingConnection(asyncio.Protocol):
    def __init__(self, headers: bytes) -> None:
        self._headers = headers
        self._calls: dict[int, Callable[[int, bytes], Any]] = {}
        self._stream = -1
        self._room = 65_535  # bytes of messages that may be sent
        self._unsent = deque[tuple[int, bytes]]()
        self._came = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(_HELLO)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        calls, self._calls = self._calls, {}
        for done in calls.values():
            done(BROKEN, b"")

    def call(self, message: bytes, done: Callable[[int, bytes], Any]) -> None:
        self._stream += 2
        self._calls[self._stream] = done
        self._unsent.append((self._stream, message))
        self._send()

    def _send(self) -> None:
        while self._unsent and self.transport and len(self._unsent[0][1]) <= self._room:
            stream, message = self._unsent.popleft()
            self._room -= len(message)
            parts = [message[begin : begin + _FRAME] for begin in range(0, len(message), _FRAME)]
            frames = [_frame(_HEADERS, _END_HEADERS, stream, self._headers)]
            frames += [_frame(_DATA, 0, stream, part) for part in parts[:-1]]
            frames.append(_frame(_DATA, _END_STREAM, stream, parts[-1]))
            self.transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        self._came += data
        begin, came = 0, self._came
        while len(came) - begin >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(came, begin)
            end = begin + _HEAD.size + (high << 16) + low
            if len(came) < end:
                break
            self._took(kind, flags, stream, bytes(came[begin + _HEAD.size : end]))
            begin = end
        del came[:begin]

    def _took(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW and not stream:
            self._room += int.from_bytes(payload, "big")
            self._send()
        elif kind in (_SETTINGS, _PING) and not flags & _ACK and self.transport:
            self.transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _HEADERS and flags & _END_STREAM:
            self._ended(stream, _status(payload))
        elif kind == _RESET or (kind == _DATA and flags & _END_STREAM):
            self._ended(stream, BROKEN)

    def _ended(self, stream: int, status: int) -> None:
        if done := self._calls.pop(stream, None):
            done(status, b"")


def _status(headers: bytes) -> int:
    """
    >>> _status(_header(b"grpc-status", b"14") + _header(b"grpc-message", b"no"))
    503
    """
    _, _, rest = headers.partition(b"grpc-status")
    return _STATUS.get(rest[1 : 1 + rest[0]], 500) if rest else 500
