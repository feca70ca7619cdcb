"""From a front to one replica and back: orders go over a connection of their own, past Serve's handles.

A call through a handle took 2 to 3 ms, and 3.5 ms of processor time on both sides together: more than many a launch
(docs/serving.md). Serve still says who there is, and each replica where it is (`Whereabouts`).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

from deployments.replicas.framed import Framed, log
from deployments.replicas.holdings import LostError
from deployments.replicas.orders import Failed, Reply, frame_of_order, frame_of_reply, order_of, reply_of, rooms_of
from deployments.replicas.split import Departed, Order, Stayed

GONE = "the replica has gone"


class Whereabouts(NamedTuple):
    """Where a replica takes orders, and the secret by which it knows whom to take them from."""

    replica: str
    address: str
    key: str


class Line(Framed):
    """The front's end."""

    def __init__(self, key: str, on_lost: Callable[[], None]) -> None:
        self._key, self._on_lost = key, on_lost
        self._numbers = count()
        self._replies: dict[int, asyncio.Queue[Reply | None]] = {}  # None: nothing more will come
        self._retired = self._is_lost = False

    async def run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        if self._is_lost:
            raise ConnectionError(GONE)
        number = next(self._numbers)
        replies = self._replies[number] = asyncio.Queue()
        try:
            self.say(*frame_of_order(number, order))
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
        self.say({"end_if_stuck": after_s})

    def retire(self) -> None:
        """Nothing new is asked; what was asked is still answered."""
        self._retired = True
        self._rest()

    def _rest(self) -> None:
        if self._retired and not self._replies:
            self.hang_up()

    # What is heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.say({"key": self._key})

    def heard(self, described: Any) -> Iterator[memoryview]:
        reply, rooms = reply_of(described)
        yield from rooms
        if waiting := self._replies.get(described["to"]):  # else nobody waits for it any more
            waiting.put_nowait(reply)

    def lost(self) -> None:
        self._is_lost = True
        for waiting in self._replies.values():
            waiting.put_nowait(None)
        if not self._retired:
            self._on_lost()


async def line_to(where: Whereabouts, on_lost: Callable[[], None]) -> Line:
    host, _, port = where.address.rpartition(":")
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: Line(where.key, on_lost), host, int(port)))[1]


class Desk:
    """Where a replica takes orders. Whoever knows its key may give them."""

    def __init__(self, run: Callable[[Order], AsyncIterator[Departed | Stayed]], end_if_stuck: Callable[[float], None]):
        self.run, self.end_if_stuck = run, end_if_stuck
        self.key = secrets.token_hex(16)
        self.callers: set[Framed] = set()
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> str:
        """The address."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Caller(self), host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server:
            self._server.close()
        for caller in tuple(self.callers):
            caller.hang_up()


class _Caller(Framed):
    """The replica's end."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, described: Any) -> Iterator[memoryview]:
        if self not in self._desk.callers:
            if not secrets.compare_digest(described["key"], self._desk.key):
                raise PermissionError("its key is another")
            self._desk.callers.add(self)
        elif "run" in described:
            order = order_of(described)
            yield from rooms_of(order.parts)
            task = asyncio.get_running_loop().create_task(self._run(described["run"], order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._desk.end_if_stuck(described["end_if_stuck"])

    def lost(self) -> None:
        self._desk.callers.discard(self)

    async def _run(self, number: int, order: Order) -> None:
        try:
            async for reply in self._desk.run(order):
                self.say(*frame_of_reply(number, reply))
        except LostError as error:
            self.say(*frame_of_reply(number, Failed(str(error), is_loss=True)))
        except Exception as error:
            log.exception("a launch failed")
            self.say(*frame_of_reply(number, Failed(f"{type(error).__name__}: {error}", is_loss=False)))
