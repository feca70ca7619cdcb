"""Fetches survivors from the replica that holds them, not through the front.

Ray's own transfers are slower: a call by value costs 10 ms for each MiB beyond a quarter of one, and a reference into
Ray's object store costs 2 to 4 ms more than a socket of our own.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from itertools import chain
from typing import Any

import numpy as np

from isobatch.deployments.transport.connection import AccessGate, AuthorizedConnection, Key, KeyedConnection, Message
from isobatch.deployments.transport.holdings import Holdings, LostError, Share, public_address
from isobatch.deployments.transport.packed import Packed, take
from isobatch.deployments.transport.wire import Wire

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # how long to wait for a holder that neither answers nor breaks the connection
EXPIRE_EVERY_S = 1.0  # how often expired survivors are dropped, even without calls
IDLE_S = 30.0  # how long an unused connection stays open, since its holder may have ended
DROP_DELAY_S = 0.01  # drops for one holder are collected for this time and sent together
UNAUTHORIZED_LIMIT = 1024  # connections without the key: many replicas may connect at the same moment
REQUEST_LIMIT_BYTES = 2**20  # of a message to a holder: room for the keys and rows of all admitted inputs


class Fetch(Message, frozen=True):
    """Requests survivors from their holder: of each key these rows, or all of them (None)."""

    wanted: list[tuple[str, list[int] | None]]


class Fetched(Message, frozen=True):
    """The holder's answer, followed by the arrays. Without parts: it no longer holds some of the survivors."""

    parts: list[Packed]


class Drop(Message, frozen=True):
    """Tells a holder that the survivors with these keys are no longer needed."""

    keys: list[str]


class Exchange:
    """Sends the survivors held by this process to callers that have their keys, and fetches those that others hold."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._idle: dict[str, list[_HolderConnection]] = defaultdict(list)
        self._unwanted: dict[str, list[str]] = {}  # keys to be dropped, by holder
        self.gate = AccessGate(UNAUTHORIZED_LIMIT)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, wire: Wire) -> None:
        """Start to answer other processes. The address in the claims of this process contains its key."""
        self._loop, self._wire = asyncio.get_running_loop(), wire
        address = await self.gate.open(wire, lambda: _RequesterConnection(self))
        self._holdings.address = f"{self.gate.key}@{address}"
        self._start(self._clean_up())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for connection in chain.from_iterable(self._idle.values()):
            connection.hang_up()
        self.gate.close()

    async def gather(self, parts: Sequence[Packed | Share]) -> tuple[Packed | Share, ...]:
        """The same parts, after fetching those that other processes hold."""
        remote: dict[str, dict[int, Share]] = defaultdict(dict)
        for index, part in enumerate(parts):
            if isinstance(part, Share) and not self._holdings.has(part.claim):
                remote[part.claim.address][index] = part
        if not remote:
            return tuple(parts)
        replies = await asyncio.gather(
            *(self._fetch(holder, list(shares.values())) for holder, shares in remote.items())
        )
        local = dict(enumerate(parts))
        for shares, fetched in zip(remote.values(), replies, strict=True):
            local |= zip(shares, fetched, strict=True)
        return tuple(local.values())

    def drop(self, holder: str, key: str) -> None:
        """Tell the holder soon that it can drop this. Any thread may call: garbage is collected in all of them."""
        if holder == self._holdings.address:
            self._holdings.drop([key])
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drop_later, holder, key)

    def _drop_later(self, holder: str, key: str) -> None:
        if holder not in self._unwanted:
            self._unwanted[holder] = []
            self._start(self._send_drop(holder))
        self._unwanted[holder].append(key)

    # Requests to other processes

    async def _fetch(self, holder: str, shares: Sequence[Share]) -> list[Packed]:
        wanted = [(share.claim.key, None if share.is_complete else share.rows.tolist()) for share in shares]
        try:
            async with asyncio.timeout(PATIENCE_S), self._connection(holder) as connection:
                fetched = await connection.fetch(wanted)
        except (OSError, EOFError) as error:
            reason = f"{public_address(holder)} is gone, and the survivors that it held with it ({error})"
            raise LostError(reason) from error
        if not fetched:
            raise LostError(f"{public_address(holder)} no longer holds the requested survivors")
        return fetched

    @contextlib.asynccontextmanager
    async def _connection(self, holder: str) -> "AsyncIterator[_HolderConnection]":
        """Lend a connection exclusively. A connection that broke in the middle of a request is not used again."""
        idle = self._idle[holder]
        while idle and not idle[-1].is_open:
            idle.pop()
        if idle:
            connection = idle.pop()
        else:
            key, _, address = holder.rpartition("@")
            connection = await self._wire.connect(lambda: _HolderConnection(key), address)
        try:
            yield connection
        except BaseException:
            connection.hang_up()
            raise
        connection.used_s = self._loop.time()
        self._idle[holder].append(connection)

    async def _send_drop(self, holder: str) -> None:
        await asyncio.sleep(DROP_DELAY_S)
        keys = self._unwanted.pop(holder)
        with contextlib.suppress(OSError):  # a holder that has ended has nothing to drop
            async with asyncio.timeout(PATIENCE_S), self._connection(holder) as connection:
                connection.send(Drop(keys))

    # Answers to other processes

    def answer(self, request: Fetch | Drop, requester: "_RequesterConnection") -> None:
        if isinstance(request, Drop):
            self._holdings.drop(request.keys)
        else:
            self._start(self._answer(request, requester))

    async def _answer(self, request: Fetch, requester: "_RequesterConnection") -> None:
        try:
            parts = [await self._packed(key, rows) for key, rows in request.wanted]
        except LostError:
            parts = []
        except Exception as error:
            log.warning("a connection was ended, because its request cannot be answered: %r", error)
            requester.hang_up()
            return
        requester.send(Fetched(parts))

    async def _packed(self, key: str, wanted: list[int] | None) -> Packed:
        state = self._holdings.get(key)
        rows = np.arange(len(state)) if wanted is None else np.array(wanted, np.int64)
        if isinstance(state, Packed):
            return take(state, rows)
        return await asyncio.to_thread(self._holdings.packed, key, rows)  # in a thread, because it waits for the device

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self._holdings.expire()
            before_s = self._loop.time() - IDLE_S
            for holder, connections in list(self._idle.items()):
                for unused in [connection for connection in connections if connection.used_s < before_s]:
                    unused.hang_up()
                    connections.remove(unused)
                if not connections:
                    del self._idle[holder]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _HolderConnection(KeyedConnection):
    """A connection to a holder, for one request at a time."""

    messages = Fetched
    used_s = 0.0  # when it was last used
    _reply: asyncio.Future[list[Packed]] | None = None

    async def fetch(self, wanted: list[tuple[str, list[int] | None]]) -> list[Packed]:
        if not self.is_open:
            raise EOFError("the connection ended")
        self._reply = asyncio.get_running_loop().create_future()
        self.send(Fetch(wanted))
        return await self._reply

    def on_message(self, message: Fetched) -> None:
        if self._reply is None or self._reply.done():
            raise ValueError("an answer without a request")
        self._reply.set_result(message.parts)

    def lost(self, error: Exception | None) -> None:
        if self._reply and not self._reply.done():
            self._reply.set_exception(error or EOFError("the connection ended"))


class _RequesterConnection(AuthorizedConnection):
    """A connection from a process that requests survivors held by this one."""

    messages = Key | Fetch | Drop
    message_limit_bytes = REQUEST_LIMIT_BYTES

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.gate)
        self._exchange = exchange

    def on_authorized_message(self, message: Fetch | Drop) -> None:
        self._exchange.answer(message, self)

    def pause_writing(self) -> None:
        """Read no further requests from a process that does not read the answers."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.is_open:
            self._transport.resume_reading()
