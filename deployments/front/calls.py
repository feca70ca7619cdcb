"""The calls of gRPC. HAProxy turns them from HTTP/2 into HTTP/1.1, where a connection carries one call at a time.

gRPC's own server takes more processor time for a call than all else in the front, since its threads wake each other.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import cast
from urllib.parse import quote

import httptools

from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.bodies import ARRIVING, ENCODINGS, ArrivingBody, decompressed
from isobatch.deployments.front.headers import NO_KEY, STARTED, has_key, timeout_s_by, waited_s_by

log = logging.getLogger(__name__)

_OK, _INTERNAL = 0, 13
# The code of gRPC for each HTTP status.
CODES = {
    400: 3,  # INVALID_ARGUMENT
    401: 16,  # UNAUTHENTICATED
    404: 5,  # NOT_FOUND
    408: 4,  # DEADLINE_EXCEEDED
    413: 8,  # RESOURCE_EXHAUSTED
    415: 12,  # UNIMPLEMENTED
    422: 3,
    429: 14,  # UNAVAILABLE
    431: 8,
    500: _INTERNAL,
    501: 12,
    503: 14,
    504: 4,
}
_MOST_METADATA = 16_384  # bytes of all metadata of a call
_PREFIX = 5  # bytes before each message: whether it is compressed, and its length
_READ_AHEAD = 65_536  # bytes that may be here before the method reads them
_TYPE = b"content-type: application/grpc\r\ngrpc-accept-encoding: identity,deflate,gzip\r\n"
_BEGUN = b"HTTP/1.1 200 OK\r\n" + _TYPE + b"transfer-encoding: chunked\r\n\r\n"
_ENDED = b"0\r\n"


class Call:
    """One call: the metadata and the messages of its client, and the messages that go back."""

    def __init__(self, path: str, headers: Mapping[bytes, bytes], transport: asyncio.Transport, most: int) -> None:
        self.path, self.headers = path, headers
        self._transport, self._most = transport, most
        self._began_s = time.monotonic()
        self._unread, self._ended = bytearray(), False
        self._more: asyncio.Future[None] | None = None
        self.writable = asyncio.Event()  # not set while the client does not read
        self.writable.set()
        self.begun = False  # whether anything was sent back

    @property
    def left_s(self) -> float | None:
        """How long its client still waits; None: the client has set no timeout."""
        waits_s = timeout_s_by(self.headers.get(b"grpc-timeout"))
        if waits_s is None:
            return None
        # HAProxy's time counts until now, as ours does, so one of them counts.
        return waits_s - max(waited_s_by(self.headers.get(STARTED)), time.monotonic() - self._began_s)

    def feed(self, part: bytes, ended: bool = False) -> None:
        """Keep a part of the messages until `message` reads it."""
        self._unread += part
        self._ended |= ended
        if self._more and not self._more.done():
            self._more.set_result(None)
        elif len(self._unread) > _READ_AHEAD:
            self._transport.pause_reading()

    async def message(self) -> bytes | None:
        """The next message; None after the last one."""
        while len(self._unread) < _PREFIX and not self._ended:
            await self._part()
        if not self._unread:
            return None
        compressed, size = self._unread[0], int.from_bytes(self._unread[1:_PREFIX], "big")
        if size > self._most:
            raise RefusedError(413, f"the message has {size} bytes: {self._most} are allowed")
        end = _PREFIX + size
        if len(self._unread) < end and not self._ended:
            with ArrivingBody(ARRIVING) as arriving:
                await self._arrives(end, arriving)
        if len(self._unread) < max(end, _PREFIX) or compressed > 1:
            raise RefusedError(400, "this is no message of gRPC, or it is not complete")
        message = bytes(self._unread[_PREFIX:end])
        del self._unread[:end]
        if len(self._unread) <= _READ_AHEAD:  # only a connection that is read shows that its client has gone
            self._transport.resume_reading()
        return self._decompressed(message) if compressed else message

    async def request(self) -> bytes:
        """The only message of a call."""
        if (message := await self.message()) is None:
            raise RefusedError(400, "the call holds no request")
        return message

    async def _arrives(self, end: int, arriving: ArrivingBody) -> None:
        before = 0
        while len(self._unread) < end and not self._ended:
            before, more = len(self._unread), len(self._unread) - before
            ARRIVING.grow(arriving, more)
            await self._part()

    async def _part(self) -> None:
        self._more = asyncio.get_running_loop().create_future()
        self._transport.resume_reading()
        try:
            await self._more
        finally:
            self._more = None

    def _decompressed(self, message: bytes) -> bytes:
        encoding = self.headers.get(b"grpc-encoding", b"identity")
        if encoding not in ENCODINGS:
            name = shown(encoding.decode("latin-1"))
            raise RefusedError(415, f"grpc-encoding is {name}: a message may be compressed with gzip or deflate")
        return decompressed(message, self._most)

    async def send(self, message: bytes) -> None:
        """Send a message back that is not the last one; waits while the client does not read."""
        self._transport.write((b"" if self.begun else _BEGUN) + _chunk(message))
        self.begun = True
        await self.writable.wait()

    def end(self, last: bytes | None, refused: RefusedError | None) -> None:
        """End the call, with one more message or without; anything more that its client sends is not read."""
        status = _status(refused)
        if self.begun:
            self._transport.write((b"" if last is None else _chunk(last)) + _ENDED + status + b"\r\n")
        elif last is not None:
            self._transport.write(_BEGUN + _chunk(last) + _ENDED + status + b"\r\n")
        else:  # HAProxy takes 408 as a sign not to wait for the rest of the request
            head = b"HTTP/1.1 200 OK\r\n" if self._ended else b"HTTP/1.1 408 \r\n"
            self._transport.write(head + _TYPE + b"content-length: 0\r\n" + status + b"\r\n")
        if self._ended:
            self._transport.resume_reading()
        else:
            self._transport.close()


# Answers a call: returns the last message that goes back, or None if all were sent.
Method = Callable[[Call], Awaitable[bytes | None]]


def _chunk(message: bytes) -> bytes:
    size = len(message)
    return b"%x\r\n\0%b%b\r\n" % (_PREFIX + size, size.to_bytes(4, "big"), message)


def _status(refused: RefusedError | None) -> bytes:
    """The fields that end a call. A push-back is gRPC's Retry-After, which clients with a retry policy obey."""
    if not refused:
        return b"grpc-status: %d\r\n" % _OK
    sentence = quote(refused.sentence, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}").encode()
    status = b"grpc-status: %d\r\ngrpc-message: %b\r\n" % (CODES.get(refused.status, _INTERNAL), sentence)
    after_s = refused.retry_after_s
    return status + (b"grpc-retry-pushback-ms: %d\r\n" % round(1000 * after_s) if after_s else b"")


class CallConnection(asyncio.Protocol):
    """A connection from HAProxy. A call without the key is refused before its message is read."""

    def __init__(self, methods: Mapping[str, Method], key: bytes | None, keyless: Collection[str], most: int) -> None:
        """`keyless`: paths that need no key. `most`: bytes of a message."""
        self._methods, self._key, self._keyless, self._most = methods, key, keyless, most
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            log.exception("a call could not be read")
            self._transport.close()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """HAProxy closes the connection if the client cancels its call, or has gone."""
        if self._task:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._call.writable.clear()

    def resume_writing(self) -> None:
        self._call.writable.set()

    def on_message_begin(self) -> None:
        """Called by the parser, as the other methods with such names are."""
        self._path, self._headers = b"", dict[bytes, bytes]()

    def on_url(self, path: bytes) -> None:
        self._path += path

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._call = Call(self._path.decode("latin-1"), self._headers, self._transport, self._most)
        self._headers = {}  # trailers are not metadata: a client could replace what HAProxy has added
        self._task = asyncio.get_running_loop().create_task(self._run(self._call))

    def on_body(self, part: bytes) -> None:
        self._call.feed(part)

    def on_message_complete(self) -> None:
        self._call.feed(b"", ended=True)

    async def _run(self, call: Call) -> None:
        last, refused, deadline = None, None, asyncio.timeout(call.left_s)
        try:
            async with deadline:
                last = await self._method(call)(call)
        except asyncio.CancelledError:
            if self._transport.is_closing():  # the client has gone
                return
            self._transport.close()  # otherwise the client would wait for an answer
            raise
        except RefusedError as error:
            refused = error
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                refused = RefusedError(504, "the deadline passed before the answer was ready")
            else:
                log.exception("%s could not be answered", call.path)
                refused = RefusedError(500, f"{call.path.rpartition('/')[2]} failed: {type(error).__name__}")
        if not self._transport.is_closing():
            call.end(last, refused)

    def _method(self, call: Call) -> Method:
        if sum(map(len, call.headers)) + sum(map(len, call.headers.values())) > _MOST_METADATA:
            raise RefusedError(431, f"the metadata of the call have more than {_MOST_METADATA} bytes")
        if self._key and call.path not in self._keyless and not has_key(self._key, call.headers.items()):
            raise RefusedError(401, NO_KEY)
        if method := self._methods.get(call.path):
            return method
        raise RefusedError(501, f"there is no method {shown(call.path)}")
