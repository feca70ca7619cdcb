"""Access to a process that listens for others of its application: a connection must first send the process's key.

Until it has sent the key, a connection gets little memory and little time, and takes no place from one with the key.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from isobatch.deployments.transport.connection import MESSAGE_LIMIT_BYTES, Message, MessageConnection
from isobatch.deployments.transport.wire import Wire

KEY_MESSAGE_LIMIT_BYTES = 256  # of the first message: a key is 32 characters long
KEY_WITHIN_S = 5.0  # from the connection to its first message


class Key(Message, frozen=True):
    """The first message of a connection. It proves that the application itself gave out the address."""

    key: str


class KeyedConnection(MessageConnection):
    """The calling end of a connection: it sends the key first."""

    def __init__(self, key: str) -> None:
        self._key = key

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(Key(self._key))


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

    def lost(self, error: Exception | None) -> None:
        self._gate.unauthorized.pop(self, None)
        self._gate.authorized.discard(self)
