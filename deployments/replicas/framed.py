"""A connection that carries frames both ways: a short description, then the arrays that it describes.

What is large is received straight into the arrays that it will be; small things share a buffer, so that a frame costs
one look at the socket.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, cast

from deployments.replicas.frames import LENGTH, checked, frame

log = logging.getLogger(__name__)
SMALL = 2**16


class Framed(asyncio.BufferedProtocol):
    """Whoever listens says by `heard` what follows a description, and by `lost` what an end of the connection means."""

    def heard(self, content: Any) -> Iterator[memoryview]:
        """A frame begins with this. Yield the rooms for the bytes that follow, none of them empty; then act."""
        raise NotImplementedError

    def lost(self) -> None:
        """Nothing more can be said or heard."""

    def say(self, content: object, rest: Iterable[memoryview] = ()) -> None:
        """In one go, so that it travels as one. To a connection that is lost, nothing is said."""
        if not self._transport.is_closing():
            self._transport.writelines([frame(content), *rest])

    def hang_up(self) -> None:
        """What was said before still arrives."""
        self._transport.close()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance
        self._shared = memoryview(bytearray(SMALL))
        self._rooms = self._frames()
        self._room = next(self._rooms)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared if len(self._room) < SMALL else self._room

    def buffer_updated(self, count: int) -> None:
        try:
            if len(self._room) < SMALL:
                self._take(self._shared[:count])
            else:
                self._filled(count)
        except Exception as error:
            log.warning("a connection was ended that is none of ours: %r", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost()

    # How what comes in finds its place

    def _take(self, came: memoryview) -> None:
        while came:
            size = min(len(came), len(self._room))
            self._room[:size] = came[:size]
            came = came[size:]
            self._filled(size)

    def _filled(self, size: int) -> None:
        self._room = self._room[size:] if size < len(self._room) else next(self._rooms)

    def _frames(self) -> Iterator[memoryview]:
        """The room for whatever comes next."""
        length = bytearray(LENGTH.size)
        while True:
            yield memoryview(length)
            description = bytearray(checked(*LENGTH.unpack(length)))
            yield memoryview(description)
            yield from self.heard(json.loads(description.decode()))
