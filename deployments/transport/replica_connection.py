"""The connection between a front and one replica, for orders and replies. It is used instead of Serve's handles.

A call through a handle took 2 to 3 ms, and 3.5 ms of processor time on both sides together, more than many launches.
Serve still lists the replicas, and each returns its address (`ReplicaAddress`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

from isobatch.deployments.transport.connection import (
    AccessGate,
    AuthorizedConnection,
    Key,
    KeyedConnection,
    Message,
    log,
)
from isobatch.deployments.transport.holdings import Claim, Holdings, LostError
from isobatch.deployments.transport.orders import Departed, Failed, NumberedOrder, NumberedReply, Order, Stayed
from isobatch.deployments.transport.wire import Wire
from isobatch.profiles.model import NOBODY

GONE = "the replica has gone"
UNAUTHORIZED_LIMIT = 64  # connections without the key; there are far fewer fronts
# The time that survivors are held after the connection of their front was lost, so that other replicas may fetch them.
HELD_AFTER_S = 30.0
MOST_CLAIMED = 4096  # claims of a front that are remembered: it has long dropped most of the earlier ones


Reply = Departed | Stayed | Failed
DropSurvivors = Callable[[str, str], None]  # has the holder at this address drop the survivors with this key


class EndIfStuck(Message, frozen=True):
    """Tells the replica to end its process if its current launch has taken longer than `after_s`."""

    after_s: float


class WarmUp(Message, frozen=True):
    """Asks the replica to run full batches of its splits of this plan, in JSON, before requests need them."""

    number: int  # the reply carries the same number
    plan: str


class ReplicaAddress(NamedTuple):
    """The address at which a replica takes orders, the key that a front must send, and the network that it runs."""

    replica: str
    address: str
    key: str
    weights: str = ""  # a hash of the network's files; "": unknown
    device_id: str = ""  # of the device that it shares with replicas of other applications; "": it has its own


class ReplicaConnection(KeyedConnection):
    """The front's end of the connection."""

    messages = NumberedReply

    def __init__(self, key: str, on_lost: Callable[[], None], front: str, drop: DropSurvivors) -> None:
        super().__init__(key, front)
        self._on_lost, self._drop = on_lost, drop
        self._numbers = count()
        self._replies: dict[int, asyncio.Queue[Reply | None]] = {}  # None: the last reply has come
        self._warm_ups = set[int]()  # the numbers of those that run
        self._retired = False

    def run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        return self._call(lambda number: NumberedOrder(number, order))

    async def warm_up(self, plan: str) -> None:
        """Returns when the replica has run full batches of its splits of this plan, in JSON."""

        def message(number: int) -> Message:
            self._warm_ups.add(number)
            return WarmUp(number, plan)

        async for _ in self._call(message):
            pass

    async def _call(self, message: Callable[[int], Message]) -> AsyncIterator[Departed | Stayed]:
        """The replies to a message, which gets a number."""
        if not self.is_open:
            raise ConnectionError(GONE)
        number = next(self._numbers)
        replies = self._replies[number] = asyncio.Queue()
        try:
            self.send(message(number))
            while not isinstance(reply := await replies.get(), Stayed):
                if reply is None:
                    raise ConnectionError(GONE)
                if isinstance(reply, Failed):
                    raise reply.error
                yield reply
            yield reply
        finally:
            del self._replies[number]
            self._warm_ups.discard(number)
            self._close_if_done()

    def end_if_stuck(self, after_s: float) -> None:
        self.send(EndIfStuck(after_s))

    def retire(self) -> None:
        """Close the connection once all orders are answered. No others may be sent. Warm-ups need not end."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and self._replies.keys() <= self._warm_ups:
            self.hang_up()

    # Received messages

    def on_message(self, message: NumberedReply) -> None:
        reply = message.reply
        if waiting := self._replies.get(message.number):
            waiting.put_nowait(reply)
        elif isinstance(reply, Stayed) and isinstance(reply.survivors, Claim):  # its caller no longer waits
            self._drop(reply.survivors.address, reply.survivors.key)

    def lost(self, error: Exception | None) -> None:
        for waiting in self._replies.values():
            waiting.put_nowait(None)
        if not self._retired:
            self._on_lost()


async def connect_to(
    wire: Wire, replica: ReplicaAddress, on_lost: Callable[[], None], front: str = "",
    drop: DropSurvivors = lambda address, key: None,
) -> ReplicaConnection:  # fmt: skip
    """Connect to a replica, which knows a front that connects again by its name: it continues to hold its survivors.

    `drop` is called for survivors of launches whose caller no longer waits.
    """
    connection = await wire.connect(lambda: ReplicaConnection(replica.key, on_lost, front, drop), replica.address)
    if not connection.is_open:  # `on_lost` was called before the caller had the connection, and so had no effect
        raise ConnectionError(GONE)
    return connection


class OrderServer:
    """Takes a replica's orders from every front that has the key."""

    def __init__(
        self,
        run: Callable[[Order], AsyncIterator[Departed | Stayed]],
        warm_up: Callable[[str], Awaitable[None]],
        end_if_stuck: Callable[[float], None],
        holdings: Holdings,
        held_after_s: float = HELD_AFTER_S,
    ) -> None:
        self.run, self.warm_up, self.end_if_stuck = run, warm_up, end_if_stuck
        self.holdings, self.held_after_s = holdings, held_after_s
        self.gate = AccessGate(UNAUTHORIZED_LIMIT)
        self.fronts = WeakValueDictionary[str, _FrontConnection]()  # the last connection of each, by its name

    async def open(self, wire: Wire) -> str:
        """Start to take orders; returns the address."""
        return await self.gate.open(wire, lambda: _FrontConnection(self))

    def close(self) -> None:
        self.gate.close()


class _FrontConnection(AuthorizedConnection):
    """The replica's end of the connection."""

    messages = Key | NumberedOrder | WarmUp | EndIfStuck

    def __init__(self, server: OrderServer) -> None:
        super().__init__(server.gate)
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._caller = ""
        self._claimed = deque[str](maxlen=MOST_CLAIMED)  # keys of survivors that this front has claims on

    def lost(self, error: Exception | None) -> None:
        super().lost(error)
        self._drop_later()

    def authorized_as(self, caller: str) -> None:
        """Take over the survivors that are held for this front's last connection, so that they are not dropped."""
        if not caller:
            return
        if before := self._server.fronts.get(caller):
            self._claimed.extend(before._claimed)
            before._claimed.clear()
        self._server.fronts[caller], self._caller = self, caller

    def on_authorized_message(self, message: NumberedOrder | WarmUp | EndIfStuck) -> None:
        if isinstance(message, EndIfStuck):
            self._server.end_if_stuck(message.after_s)
            return
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: NumberedOrder | WarmUp) -> None:
        number = message.number
        try:
            if isinstance(message, WarmUp):
                await self._server.warm_up(message.plan)
                self.send(NumberedReply(number, Stayed(None, NOBODY, 0.0)))
                return
            async for reply in self._server.run(message.order):
                if isinstance(reply, Stayed) and isinstance(reply.survivors, Claim):
                    self._note(reply.survivors.key)
                self.send(NumberedReply(number, reply))
        except LostError as error:
            self.send(NumberedReply(number, Failed(str(error), is_loss=True)))
        except Exception as error:
            log.exception("a warm-up failed" if isinstance(message, WarmUp) else "a launch failed")
            self.send(NumberedReply(number, Failed(f"{type(error).__name__}: {error}", is_loss=False)))

    def _note(self, key: str) -> None:
        last = self._server.fronts.get(self._caller, self)  # the front may have connected again meanwhile
        last._claimed.append(key)
        if not last.is_open:
            last._drop_later()

    def _drop_later(self) -> None:
        """Drop the survivors of a front that may have vanished: their deadlines may be a day away."""
        asyncio.get_running_loop().call_later(self._server.held_after_s, self._drop)

    def _drop(self) -> None:
        self._server.holdings.drop(self._claimed)
