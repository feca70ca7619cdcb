"""Who may come in where a process listens: whoever shows its key, at once and before anything else.

Until then a connection gets little memory, little time, and no place that somebody with the key would need.
"""

import secrets
from collections.abc import Iterator
from typing import Any

from deployments.transport.connection import MessageConnection
from deployments.transport.frames import LONGEST, Message

KEY_BYTES = 256  # the longest first message, from a guest that has not shown the key yet
KEY_WITHIN_S = 5.0


class Key(Message, frozen=True):
    """The first message of a guest: it proves that the application told it where to ask."""

    key: str


class Door:
    """The key of a process that listens, who has shown it, and who has not yet, in the order in which they came."""

    def __init__(self, most_strangers: int) -> None:
        self.most_strangers = most_strangers
        self.key = secrets.token_hex(16)
        self.guests: set[AuthorizedConnection] = set()
        self.strangers: dict[AuthorizedConnection, None] = {}

    def close(self) -> None:
        """Hang up on everybody, when everything has been sent."""
        for guest in (*self.guests, *self.strangers):
            guest.hang_up()


class AuthorizedConnection(MessageConnection):
    """The listening end of a connection. A subclass acts on what guests with the key say, in `told`."""

    longest = LONGEST  # bytes of their messages

    def __init__(self, door: Door) -> None:
        self._door = door

    def told(self, message: Any) -> Iterator[memoryview]:
        """As `heard`, once the key was shown."""
        raise NotImplementedError

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        strangers = self._door.strangers
        if len(strangers) >= self._door.most_strangers:  # whoever has the key shows it at once, so the oldest has none
            next(iter(strangers)).shut_out()
        strangers[self] = None
        self.allow(KEY_BYTES, KEY_WITHIN_S)

    def shut_out(self) -> None:
        del self._door.strangers[self]
        self._transport.abort()

    def heard(self, message: Any) -> Iterator[memoryview]:
        if self in self._door.guests:
            yield from self.told(message)
            return
        if not (isinstance(message, Key) and secrets.compare_digest(message.key.encode(), self._door.key.encode())):
            raise PermissionError("its key is another")
        self._door.strangers.pop(self, None)
        self._door.guests.add(self)
        self.allow(self.longest)

    def lost(self, error: Exception | None) -> None:
        self._door.strangers.pop(self, None)
        self._door.guests.discard(self)
