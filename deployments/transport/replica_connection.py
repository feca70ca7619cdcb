"""The connection between a front and one replica: orders go over it and replies come back, past Serve's handles.

A call through a handle took 2 to 3 ms, and 3.5 ms of processor time on both sides together, more than many launches
(docs/serving.md). Serve still lists the replicas, and each replica tells its address (`Whereabouts`).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import NamedTuple

from msgspec.msgpack import Decoder

from deployments.transport.connection import MessageConnection, log
from deployments.transport.frames import Message, buffers
from deployments.transport.holdings import LostError
from deployments.transport.orders import (
    Departed,
    Failed,
    Order,
    OrderForm,
    Reply,
    ReplyForm,
    Stayed,
    message_of_order,
    message_of_reply,
    order_of,
    reply_of,
)

GONE = "the replica has gone"
KEY_BYTES = 256  # the longest first message, from a caller that has not shown the key yet
KEY_WITHIN_S = 5.0
MOST_STRANGERS = 64  # the most connections without the key


class Key(Message, frozen=True):
    """The first message of a front: it proves that Serve told it where the replica is."""

    key: str


class EndIfStuck(Message, frozen=True):
    """Tells the replica to end its process if its present launch has taken longer than this."""

    after_s: float


class Whereabouts(NamedTuple):
    """The address at which a replica takes orders, and the key that a front must show."""

    replica: str
    address: str
    key: str


class ReplicaConnection(MessageConnection):
    """The front's end of the connection."""

    messages = Decoder(ReplyForm)

    def __init__(self, key: str, on_lost: Callable[[], None]) -> None:
        self._key, self._on_lost = key, on_lost
        self._numbers = count()
        self._replies: dict[int, asyncio.Queue[Reply | None]] = {}  # None: the last reply has come
        self._retired = False

    async def run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        if not self.is_open:
            raise ConnectionError(GONE)
        number = next(self._numbers)
        replies = self._replies[number] = asyncio.Queue()
        try:
            self.say(*message_of_order(number, order))
            while not isinstance(reply := await replies.get(), Stayed):
                if reply is None:
                    raise ConnectionError(GONE)
                if isinstance(reply, Failed):
                    raise reply.error
                yield reply
            yield reply
        finally:
            del self._replies[number]
            self._rest()

    def end_if_stuck(self, after_s: float) -> None:
        self.say(EndIfStuck(after_s))

    def retire(self) -> None:
        """Hang up when all orders are answered; the caller sends no others."""
        self._retired = True
        self._rest()

    def _rest(self) -> None:
        if self._retired and not self._replies:
            self.hang_up()

    # Received messages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.say(Key(self._key))

    def heard(self, message: ReplyForm) -> Iterator[memoryview]:
        reply, unfilled = reply_of(message)
        yield from unfilled
        if waiting := self._replies.get(message.number):  # else its caller has given up
            waiting.put_nowait(reply)

    def lost(self, error: Exception | None) -> None:
        for waiting in self._replies.values():
            waiting.put_nowait(None)
        if not self._retired:
            self._on_lost()


async def connect_to(where: Whereabouts, on_lost: Callable[[], None]) -> ReplicaConnection:
    host, _, port = where.address.rpartition(":")
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: ReplicaConnection(where.key, on_lost), host, int(port)))[1]


class OrderServer:
    """Takes a replica's orders, from every front that shows the key."""

    def __init__(self, run: Callable[[Order], AsyncIterator[Departed | Stayed]], end_if_stuck: Callable[[float], None]):
        self.run, self.end_if_stuck = run, end_if_stuck
        self.key = secrets.token_hex(16)
        self.callers: set[MessageConnection] = set()
        self.strangers: dict[_Caller, None] = {}  # connections without the key, in the order in which they came
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> str:
        """Take orders from now on; returns the address."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Caller(self), host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server:
            self._server.close()
        for caller in tuple(self.callers):
            caller.hang_up()


class _Caller(MessageConnection):
    """The replica's end of the connection."""

    messages = Decoder(Key | OrderForm | EndIfStuck)

    def __init__(self, server: OrderServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        strangers = self._server.strangers
        if len(strangers) >= MOST_STRANGERS:  # a front shows the key at once, so the oldest has none
            next(iter(strangers)).shut_out()
        strangers[self] = None
        self.allow(KEY_BYTES, KEY_WITHIN_S)

    def shut_out(self) -> None:
        del self._server.strangers[self]
        self._transport.abort()

    def heard(self, message: Key | OrderForm | EndIfStuck) -> Iterator[memoryview]:
        if self not in self._server.callers:
            self._admit(message)
        elif isinstance(message, OrderForm):
            order = order_of(message)
            yield from buffers(order.parts)
            task = asyncio.get_running_loop().create_task(self._run(message.number, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, EndIfStuck):
            self._server.end_if_stuck(message.after_s)

    def lost(self, error: Exception | None) -> None:
        self._server.strangers.pop(self, None)
        self._server.callers.discard(self)

    def _admit(self, message: Message) -> None:
        if not (isinstance(message, Key) and secrets.compare_digest(message.key, self._server.key)):
            raise PermissionError("its key is another")
        self._server.strangers.pop(self, None)
        self.allow()
        self._server.callers.add(self)

    async def _run(self, number: int, order: Order) -> None:
        try:
            async for reply in self._server.run(order):
                self.say(*message_of_reply(number, reply))
        except LostError as error:
            self.say(*message_of_reply(number, Failed(str(error), is_loss=True)))
        except Exception as error:
            log.exception("a launch failed")
            self.say(*message_of_reply(number, Failed(f"{type(error).__name__}: {error}", is_loss=False)))
