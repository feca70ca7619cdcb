"""Fetches the survivors that another process holds: straight from replica to replica, past the front.

Ray's own ways were measured too. A call by value costs 10 ms for each MiB beyond a quarter of one; a reference into
Ray's object store costs 2 to 4 ms more than a socket of our own (docs/transfers.md).
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from msgspec.msgpack import Decoder

from deployments.transport.connection import MessageConnection
from deployments.transport.frames import Message, PackedForm, buffers
from deployments.transport.guarded import AuthorizedConnection, Door, Key
from deployments.transport.holdings import Holdings, LostError, Share, place
from deployments.transport.packed import Packed, take
from deployments.transport.wire import Wire

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # how long to wait for a holder that neither answers nor breaks the connection
TIDY_S = 1.0  # how often expired survivors are dropped, even without calls
IDLE_S = 30.0  # how long an unused connection is kept, since its holder may have gone
DROP_S = 0.01  # drops for one holder are collected for so long and sent together
MOST_STRANGERS = 1024  # connections without the key: many replicas may come at the same moment
ASKED_BYTES = 2**20  # the longest message to a holder: room for the keys and rows of more inputs than can be inside


class Fetch(Message, frozen=True):
    """Asks a holder for survivors: of each key these rows, or all (None)."""

    wanted: list[tuple[str, list[int] | None]]


class Fetched(Message, frozen=True):
    """The holder's answer, followed by the arrays; no parts if it no longer holds one of them."""

    parts: list[PackedForm]


class Drop(Message, frozen=True):
    """Tells a holder the keys of survivors that are no longer needed."""

    keys: list[str]


class Exchange:
    """Gives the survivors that are held here to any caller with their keys, and fetches those that others hold."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._idle: dict[str, list[_Fetcher]] = defaultdict(list)
        self._unwanted: dict[str, list[str]] = {}  # keys to be dropped, by holder
        self._server: asyncio.Server | None = None
        self.door = Door(MOST_STRANGERS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, wire: Wire) -> None:
        """Let others ask here from now on; the address that claims name holds the key."""
        self._loop, self._wire = asyncio.get_running_loop(), wire
        self._server, address = await wire.listen(lambda: _Asker(self))
        self._holdings.address = f"{self.door.key}@{address}"
        self._do(self._tidy())

    def close(self) -> None:
        if self._server:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for connection in chain.from_iterable(self._idle.values()):
            connection.hang_up()
        self.door.close()

    async def gather(self, parts: Sequence[Packed | Share]) -> tuple[Packed | Share, ...]:
        """The same parts, after fetching the survivors that others hold."""
        away: dict[str, dict[int, Share]] = defaultdict(dict)
        for index, part in enumerate(parts):
            if isinstance(part, Share) and not self._holdings.has(part.held):
                away[part.held.address][index] = part
        if not away:
            return tuple(parts)
        brought = await asyncio.gather(*(self._fetch(holder, list(shares.values())) for holder, shares in away.items()))
        here = dict(enumerate(parts))
        for shares, packed in zip(away.values(), brought, strict=True):
            here |= zip(shares, packed, strict=True)
        return tuple(here.values())

    def drop(self, holder: str, key: str) -> None:
        """Tell the holder soon that this is not needed any more. Any thread may call, as each collects garbage."""
        if holder == self._holdings.address:
            self._holdings.drop([key])
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget, holder, key)

    def _forget(self, holder: str, key: str) -> None:
        if not self._unwanted:
            self._loop.call_later(DROP_S, self._tell)
        self._unwanted.setdefault(holder, []).append(key)

    # Questions to others

    async def _fetch(self, holder: str, shares: Sequence[Share]) -> list[Packed]:
        wanted = [(share.held.key, None if share.is_whole else share.rows.tolist()) for share in shares]
        try:
            async with asyncio.timeout(PATIENCE_S), self._connection(holder) as connection:
                found = await connection.fetch(wanted)
        except (OSError, EOFError) as error:
            raise LostError(f"{place(holder)} is gone, and the survivors that it held with it ({error})") from error
        if not found:
            raise LostError(f"{place(holder)} no longer holds the survivors that it was asked for")
        return found

    @contextlib.asynccontextmanager
    async def _connection(self, holder: str) -> "AsyncIterator[_Fetcher]":
        """Lend a connection exclusively. A connection that broke in the middle of an exchange is not used again."""
        connection = self._pooled(holder) or await self._connect(holder)
        try:
            yield connection
        except BaseException:
            connection.hang_up()
            raise
        connection.used_s = self._loop.time()
        self._idle[holder].append(connection)

    def _pooled(self, holder: str) -> "_Fetcher | None":
        connections = self._idle.get(holder, [])
        while connections:
            if (connection := connections.pop()).is_open:
                return connection
        return None

    async def _connect(self, holder: str) -> "_Fetcher":
        return await self._wire.connect(lambda: _Fetcher(holder.partition("@")[0]), place(holder))

    def _tell(self) -> None:
        unwanted, self._unwanted = self._unwanted, {}
        for holder, keys in unwanted.items():
            self._do(self._tell_one(holder, keys))

    async def _tell_one(self, holder: str, keys: list[str]) -> None:
        with contextlib.suppress(OSError):  # a holder that is gone holds nothing to drop
            async with asyncio.timeout(PATIENCE_S), self._connection(holder) as connection:
                connection.say(Drop(keys))

    # Answers to others

    def answer(self, asked: Fetch | Drop, asker: "_Asker") -> None:
        if isinstance(asked, Drop):
            self._holdings.drop(asked.keys)
        else:
            self._do(self._answer(asked, asker))

    async def _answer(self, asked: Fetch, asker: "_Asker") -> None:
        try:
            parts = [await self._packed(key, rows) for key, rows in asked.wanted]
        except LostError:
            parts = []
        except Exception as error:
            log.warning("a connection was ended, as it asked for what cannot be: %r", error)
            asker.hang_up()
            return
        asker.say(Fetched([PackedForm.of(part) for part in parts]), buffers(parts))

    async def _packed(self, key: str, wanted: list[int] | None) -> Packed:
        state = self._holdings.get(key)
        rows = np.arange(len(state)) if wanted is None else np.array(wanted, np.int64)
        if isinstance(state, Packed):
            return take(state, rows)
        return await asyncio.to_thread(self._holdings.packed, key, rows)  # in a thread, since it waits for the device

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            self._holdings.expire()
            self._hang_up()

    def _hang_up(self) -> None:
        before_s = self._loop.time() - IDLE_S
        for holder, connections in list(self._idle.items()):
            for unused in [each for each in connections if each.used_s < before_s]:
                unused.hang_up()
                connections.remove(unused)
            if not connections:
                del self._idle[holder]

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Fetcher(MessageConnection):
    """A connection to a holder, for one question at a time."""

    messages = Decoder(Fetched)
    used_s = 0.0
    _found: asyncio.Future[list[Packed]] | None = None

    def __init__(self, key: str) -> None:
        self._key = key

    async def fetch(self, wanted: list[tuple[str, list[int] | None]]) -> list[Packed]:
        if not self.is_open:
            raise EOFError("the connection ended")
        self._found = asyncio.get_running_loop().create_future()
        self.say(Fetch(wanted))
        return await self._found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.say(Key(self._key))

    def heard(self, message: Fetched) -> Iterator[memoryview]:
        parts = [form.allocate() for form in message.parts]
        yield from buffers(parts)
        if self._found is None or self._found.done():
            raise ValueError("an answer to no question")
        self._found.set_result(parts)

    def lost(self, error: Exception | None) -> None:
        if self._found and not self._found.done():
            self._found.set_exception(error or EOFError("the connection ended"))


class _Asker(AuthorizedConnection):
    """A connection from a process that asks for survivors held here."""

    messages = Decoder(Key | Fetch | Drop)
    longest = ASKED_BYTES

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.door)
        self._exchange = exchange

    def told(self, message: Fetch | Drop) -> Iterator[memoryview]:
        self._exchange.answer(message, self)
        yield from ()

    def pause_writing(self) -> None:
        """Read no more questions from a process that does not read the answers."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.is_open:
            self._transport.resume_reading()
