"""Tokens on their way from replicas to a front, over one connection from each replica.

A replica sends the tokens of a launch as one message. As streamed answers of Serve's handles, they would be a message
for each text, and cost the replica's process more than the launch of a small network. Serve still routes each text to a
replica, by a call that lasts as long as the text.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from isobatch.deployments.decoding.loop import TokenStream
from isobatch.deployments.decoding.scheduler import NewTokens
from isobatch.deployments.front.load import FadingPeak
from isobatch.deployments.transport.access import AccessGate, AuthorizedConnection, Key, KeyedConnection
from isobatch.deployments.transport.connection import Message
from isobatch.deployments.transport.wire import Wire

UNAUTHORIZED_LIMIT = 64  # connections without the key; there are far fewer replicas


class WrittenTokens(Message, frozen=True):
    """New tokens of texts, each named by the front's number for it."""

    groups: tuple[NewTokens, ...]
    sent_s: float  # in Unix time


class TokenAddress(NamedTuple):
    """Where a front reads tokens, and the key that a replica must send."""

    address: str
    key: str


class TokenInbox:
    """The front's end: a stream for each text that replicas write for it."""

    def __init__(self) -> None:
        self.gate = AccessGate(UNAUTHORIZED_LIMIT)
        self.streams: dict[int, TokenStream] = {}
        self._numbers = count(1)
        self.address = TokenAddress("", self.gate.key)
        self.lag = FadingPeak()  # the time that tokens were on their way

    async def open(self, wire: Wire) -> None:
        self.address = TokenAddress(await self.gate.open(wire, lambda: _ReplicaEnd(self)), self.gate.key)

    def close(self) -> None:
        self.gate.close()

    @contextmanager
    def stream(self) -> Iterator[TokenStream]:
        """The stream of a new text, with a number of its own."""
        stream = TokenStream()
        stream.name = next(self._numbers)
        self.streams[stream.name] = stream
        try:
            yield stream
        finally:
            del self.streams[stream.name]


class _ReplicaEnd(AuthorizedConnection):
    """The connection of one replica, at the front."""

    messages = Key | WrittenTokens

    def __init__(self, inbox: TokenInbox) -> None:
        super().__init__(inbox.gate)
        self._inbox = inbox

    def on_authorized_message(self, message: WrittenTokens) -> None:
        now_s = time.time()
        self._inbox.lag.add(now_s, now_s - message.sent_s)
        for group in message.groups:
            if stream := self._inbox.streams.get(group.name):  # otherwise its client has gone
                stream.put(group)


class TokenOutlet(KeyedConnection):
    """The replica's end: what is written in one turn of the event loop is sent together."""

    messages = Key  # the front sends nothing

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._groups: list[NewTokens] = []

    def put(self, number: int, group: NewTokens) -> None:
        if not self.is_open:
            raise ConnectionError("the front has gone")
        if not self._groups:
            asyncio.get_running_loop().call_soon(self._flush)
        self._groups.append(replace(group, name=number))

    def _flush(self) -> None:
        self.send(WrittenTokens(tuple(self._groups), time.time()))
        self._groups.clear()

    def on_message(self, message: Any) -> None:
        raise PermissionError("a front sends nothing here")


class TokenOutlets:
    """A replica's connections to all fronts that it writes for."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._connecting = wire, asyncio.Lock()
        self._outlets: dict[TokenAddress, TokenOutlet] = {}

    async def to(self, front: TokenAddress) -> TokenOutlet:
        """The connection to a front, which the first text for it opens."""
        async with self._connecting:
            outlet = self._outlets.get(front)
            if outlet is None or not outlet.is_open:
                outlet = await self._wire.connect(lambda: TokenOutlet(front.key), front.address)
                self._outlets[front] = outlet
            return outlet
