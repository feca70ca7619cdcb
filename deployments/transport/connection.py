"""A connection that carries messages in both directions, each followed by its arrays. No other code reads frames.

A message is a msgspec struct, encoded as MessagePack after its length. Types are checked while a message is read, and
nothing is unpickled, so a malicious message cannot run code. An order takes a third of the time that JSON takes.

Large arrays are received directly into their own memory. Small ones go through a shared buffer, so that one read of the
socket can bring a whole frame.

A process that listens for others of its application gives them a key (`AccessGate`), which they send first. Before the
key, a connection gets little memory and little time, and takes no place from one with the key.
"""

import asyncio
import logging
import secrets
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.transport.wire import Wire, end_on_silence

LENGTH = struct.Struct("<I")
MESSAGE_LIMIT_BYTES = 2**22  # without the arrays that follow
KEY_MESSAGE_LIMIT_BYTES = 256  # of the first message: a key is 32 characters long
KEY_WITHIN_S = 5.0  # from the connection to its first message
SMALL_BYTES = 1024  # of an array: up to this size, a further copy costs less than a buffer of its own


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages and their parts. The type's name is sent first, then the fields in their order.

    An array stands in its message as its dtype, its shape and its bytes. The bytes of large arrays follow in order.
    """


def frame(message: object, arrays: list[NDArray[Any]] | None = None) -> bytes:
    """The bytes of a message: its length, then its content. Its large arrays are added to `arrays`.

    >>> frame([1, "b"])
    b'\\x04\\x00\\x00\\x00\\x92\\x01\\xa1b'
    """

    def form(array: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes | None]:
        if arrays is None or not isinstance(array, np.ndarray):
            raise TypeError(f"a {type(array).__name__} cannot be sent here")
        if array.nbytes <= SMALL_BYTES:
            return array.dtype.str, array.shape, array.tobytes()
        arrays.append(array)
        return array.dtype.str, array.shape, None

    content = msgspec.msgpack.encode(message, enc_hook=form)
    return LENGTH.pack(len(content)) + content


def bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


log = logging.getLogger(__name__)
SHARED_BUFFER_BYTES = 2**16  # anything shorter is received through the shared buffer


class MessageConnection(asyncio.BufferedProtocol):
    """A subclass names the types of `messages` that it accepts, and handles them in `on_message`.

    Any other message ends the connection, as does one that is longer than allowed or comes too late.
    """

    messages: ClassVar[Any]

    _limit_bytes = MESSAGE_LIMIT_BYTES
    _timeout: asyncio.TimerHandle | None = None
    _error: Exception | None = None  # why this side ended the connection

    def on_message(self, message: Any) -> None:
        """Handle a message, which has all its arrays."""
        raise NotImplementedError

    def lost(self, error: Exception | None) -> None:
        """The connection has ended, with this error if there was one."""

    @property
    def takes_arrays(self) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def allow(self, limit_bytes: int = MESSAGE_LIMIT_BYTES, within_s: float | None = None) -> None:
        """Accept messages of up to `limit_bytes`. With `within_s`, the connection ends unless this is called again.

        A peer without the key gets little memory and time, because a message's memory is allocated before its bytes
        arrive.
        """
        self._limit_bytes = limit_bytes
        self._cancel_timeout()
        if within_s is not None:
            self._timeout = asyncio.get_running_loop().call_later(
                within_s, self._end, TimeoutError(f"no message within {within_s:g} s")
            )

    def send(self, message: object) -> None:
        """Send a message with its arrays. Does nothing once the connection has ended."""
        if self.is_open:
            arrays: list[NDArray[Any]] = []
            head = frame(message, arrays)
            self._transport.writelines([head, *map(bytes_of, arrays)])

    def hang_up(self) -> None:
        """Close the connection once everything has been sent."""
        self._transport.close()

    # Calls of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        end_on_silence(transport)
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        self._shared = memoryview(bytearray(SHARED_BUFFER_BYTES))
        self._buffers = self._frames()
        self._buffer = next(self._buffers)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared if len(self._buffer) < SHARED_BUFFER_BYTES else self._buffer

    def buffer_updated(self, count: int) -> None:
        try:
            if len(self._buffer) < SHARED_BUFFER_BYTES:
                self._distribute(self._shared[:count])
            else:
                self._filled(count)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_timeout()
        self._buffers.close()  # the generator refers to this object: such a cycle would wait for garbage collection
        self._shared = self._buffer = memoryview(b"")
        self.lost(self._error or error)

    # Distributing the received bytes to their buffers

    def _distribute(self, received: memoryview) -> None:
        while received:
            size = min(len(received), len(self._buffer))
            self._buffer[:size] = received[:size]
            received = received[size:]
            self._filled(size)

    def _filled(self, size: int) -> None:
        self._buffer = self._buffer[size:] if size < len(self._buffer) else next(self._buffers)

    def _frames(self) -> Generator[memoryview, None, None]:
        """Yield the buffer for the next bytes, again and again."""
        length, unfilled = bytearray(LENGTH.size), list[NDArray[Any]]()

        def allocated(_: object, form: tuple[str, Sequence[int], bytes | None]) -> NDArray[Any]:
            kind, shape, content = form
            dtype = np.dtype(kind)
            if dtype.hasobject or not self.takes_arrays:  # the bytes of objects are addresses in this process
                raise PermissionError(f"an array of {dtype}, or before the key")
            if content is not None:
                return np.ndarray(shape, dtype, bytearray(content))
            unfilled.append(np.empty(shape, dtype))
            return unfilled[-1]

        reader = msgspec.msgpack.Decoder(self.messages, dec_hook=allocated)
        while True:
            yield memoryview(length)
            (size,) = LENGTH.unpack(length)
            if not 0 < size <= self._limit_bytes:
                raise ValueError(f"a message of {size} bytes: 1 to {self._limit_bytes} are allowed")
            content = np.empty(size, np.uint8).data
            yield content
            message = reader.decode(content)
            yield from map(bytes_of, unfilled)
            unfilled.clear()
            self.on_message(message)
            del message  # it may hold the last reference to large arrays or to survivors

    def _end(self, error: Exception) -> None:
        log.warning("a connection was ended, because its peer violated the protocol: %r", error)
        self._error = error.with_traceback(None)  # the traceback would refer to this object
        self._transport.abort()

    def _cancel_timeout(self) -> None:
        if self._timeout:
            self._timeout.cancel()
            self._timeout = None


class Key(Message, frozen=True):
    """The first message of a connection. It proves that the application itself gave out the address.

    `caller`: the name of the calling process; "": it has none.
    """

    key: str
    caller: str = ""


class KeyedConnection(MessageConnection):
    """The calling end of a connection: it sends the key first, with its name."""

    def __init__(self, key: str, caller: str = "") -> None:
        self._key = Key(key, caller)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._key)


class AccessGate:
    """The key of a listening process, and its connections with and without the key, the latter oldest first."""

    def __init__(self, unauthorized_limit: int) -> None:
        self.unauthorized_limit = unauthorized_limit
        self.key = secrets.token_hex(16)
        self.authorized: set[AuthorizedConnection] = set()
        self.unauthorized: dict[AuthorizedConnection, None] = {}
        self._server: asyncio.Server | None = None

    async def open(self, wire: Wire, connection: "Callable[[], AuthorizedConnection]") -> str:
        """Listen for callers, each of which gets a `connection`; returns the address."""
        self._server, address = await wire.listen(connection)
        return address

    def close(self) -> None:
        """Stop to listen, and close every connection once everything has been sent."""
        if self._server:
            self._server.close()
        for connection in (*self.authorized, *self.unauthorized):
            connection.hang_up()


class AuthorizedConnection(MessageConnection):
    """The listening end of a connection. A subclass handles the messages that follow the key."""

    message_limit_bytes = MESSAGE_LIMIT_BYTES

    def __init__(self, gate: AccessGate) -> None:
        self._gate = gate

    @property
    def takes_arrays(self) -> bool:
        return self in self._gate.authorized  # memory for an array is allocated before its bytes arrive

    def on_authorized_message(self, message: Any) -> None:
        """As `on_message`, for messages after the key."""
        raise NotImplementedError

    def authorized_as(self, caller: str) -> None:
        """The caller has sent the key, and this name."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        unauthorized = self._gate.unauthorized
        if len(unauthorized) >= self._gate.unauthorized_limit:  # peers with the key send it at once: drop the oldest
            next(iter(unauthorized)).reject()
        unauthorized[self] = None
        self.allow(KEY_MESSAGE_LIMIT_BYTES, KEY_WITHIN_S)

    def reject(self) -> None:
        del self._gate.unauthorized[self]
        self._transport.abort()

    def on_message(self, message: Any) -> None:
        if self in self._gate.authorized:
            self.on_authorized_message(message)
            return
        if not (isinstance(message, Key) and secrets.compare_digest(message.key.encode(), self._gate.key.encode())):
            raise PermissionError("the first message is not the key of this process")
        self._gate.unauthorized.pop(self, None)
        self._gate.authorized.add(self)
        self.allow(self.message_limit_bytes)
        self.authorized_as(message.caller)

    def lost(self, error: Exception | None) -> None:
        self._gate.unauthorized.pop(self, None)
        self._gate.authorized.discard(self)
