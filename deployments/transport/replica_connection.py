"""The connection between a front and one replica: orders go over it and replies come back, past Serve's handles.

A call through a handle took 2 to 3 ms, and 3.5 ms of processor time on both sides together, more than many launches.
Serve still lists the replicas, and each replica tells its address (`ReplicaAddress`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import NamedTuple

from msgspec.msgpack import Decoder

from deployments.transport.connection import MessageConnection, log
from deployments.transport.frames import Message, buffers
from deployments.transport.guarded import AuthorizedConnection, Door, Key
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
from deployments.transport.wire import Wire

GONE = "the replica has gone"
MOST_STRANGERS = 64  # connections without the key: there are few fronts


class EndIfStuck(Message, frozen=True):
    """Tells the replica to end its process if its present launch has taken longer than this."""

    after_s: float


class ReplicaAddress(NamedTuple):
    """The address at which a replica takes orders, the key that a front must show, and which network it runs."""

    replica: str
    address: str
    key: str
    weights: str = ""  # a hash; "": nobody knows


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


async def connect_to(wire: Wire, where: ReplicaAddress, on_lost: Callable[[], None]) -> ReplicaConnection:
    connection = await wire.connect(lambda: ReplicaConnection(where.key, on_lost), where.address)
    if not connection.is_open:  # nobody has it yet, so nobody would make another when `on_lost` is called
        raise ConnectionError(GONE)
    return connection


class OrderServer:
    """Takes a replica's orders, from every front that shows the key."""

    def __init__(self, run: Callable[[Order], AsyncIterator[Departed | Stayed]], end_if_stuck: Callable[[float], None]):
        self.run, self.end_if_stuck = run, end_if_stuck
        self.door = Door(MOST_STRANGERS)
        self._server: asyncio.Server | None = None

    async def open(self, wire: Wire) -> str:
        """Take orders from now on; returns the address."""
        self._server, address = await wire.listen(lambda: _Caller(self))
        return address

    def close(self) -> None:
        if self._server:
            self._server.close()
        self.door.close()


class _Caller(AuthorizedConnection):
    """The replica's end of the connection."""

    messages = Decoder(Key | OrderForm | EndIfStuck)

    def __init__(self, server: OrderServer) -> None:
        super().__init__(server.door)
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, message: OrderForm | EndIfStuck) -> Iterator[memoryview]:
        if isinstance(message, OrderForm):
            order = order_of(message)
            yield from buffers(order.parts)
            task = asyncio.get_running_loop().create_task(self._run(message.number, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, EndIfStuck):
            self._server.end_if_stuck(message.after_s)

    async def _run(self, number: int, order: Order) -> None:
        try:
            async for reply in self._server.run(order):
                self.say(*message_of_reply(number, reply))
        except LostError as error:
            self.say(*message_of_reply(number, Failed(str(error), is_loss=True)))
        except Exception as error:
            log.exception("a launch failed")
            self.say(*message_of_reply(number, Failed(f"{type(error).__name__}: {error}", is_loss=False)))
