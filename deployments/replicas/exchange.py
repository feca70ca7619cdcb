"""From holder to holder: survivors go straight to the replica that runs them next, and past the front.

Ray's own ways were measured too. A call by value costs 10 ms for each MiB beyond a quarter of one; a reference into
Ray's object store costs 2 to 4 ms more than a socket of our own (docs/serving.md has the table).
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from itertools import chain
from typing import Any

import numpy as np

from deployments.replicas.frames import Connection, buffers, describe, frame, read_frame, room_for
from deployments.replicas.holdings import Holdings, LostError, Share
from deployments.replicas.wire import Packed, take

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # with a holder that neither answers nor breaks the connection
TIDY_S = 1.0  # how often what is past its time is dropped, even if nobody calls
IDLE_S = 30.0  # how long a connection is kept that nobody uses: its holder may be long gone
DROP_S = 0.01  # drops to one holder are told together


class Exchange:
    """Gives what is held here to whoever can name it, and gets what others hold."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._idle: dict[str, list[Connection]] = defaultdict(list)
        self._unwanted: dict[str, list[str]] = {}  # keys to be dropped, by holder
        self._server: asyncio.Server | None = None
        self._askers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> None:
        """From now on others can ask here."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, host, 0)
        self._holdings.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        self._do(self._tidy())

    def close(self) -> None:
        if self._server:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for connection in chain.from_iterable(self._idle.values()):
            connection.close()
        for writer in tuple(self._askers):
            writer.close()

    async def gather(self, parts: Sequence[Packed | Share]) -> tuple[Packed | Share, ...]:
        """The same, with what others hold brought here."""
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
        """Tell the holder, soon, that nobody needs this any more. Any thread may: each of them collects garbage."""
        if holder == self._holdings.address:
            self._holdings.drop([key])
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget, holder, key)

    def _forget(self, holder: str, key: str) -> None:
        if not self._unwanted:
            self._loop.call_later(DROP_S, self._tell)
        self._unwanted.setdefault(holder, []).append(key)

    # Asking others

    async def _fetch(self, holder: str, shares: Sequence[Share]) -> list[Packed]:
        wanted = [[share.held.key, None if share.is_whole else share.rows.tolist()] for share in shares]
        try:
            async with asyncio.timeout(PATIENCE_S), self._connection(holder) as connection:
                await connection.say({"fetch": wanted})
                reply = await connection.hear()
                found = [await connection.fill(room_for(part)) for part in reply["parts"]]
        except (OSError, EOFError) as error:
            raise LostError(f"{holder} is gone, and the survivors that it held with it ({error})") from error
        if not found:
            raise LostError(f"{holder} no longer holds the survivors that it was asked for")
        return found

    @contextlib.asynccontextmanager
    async def _connection(self, holder: str) -> AsyncIterator[Connection]:
        """A connection that nobody else uses; what broke off in the middle is of no use again."""
        connections = self._idle.get(holder)
        connection = connections.pop() if connections else await Connection(holder).open()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        connection.used_s = self._loop.time()
        self._idle[holder].append(connection)

    def _tell(self) -> None:
        unwanted, self._unwanted = self._unwanted, {}
        for holder, keys in unwanted.items():
            self._do(self._tell_one(holder, keys))

    async def _tell_one(self, holder: str, keys: list[str]) -> None:
        with contextlib.suppress(OSError):  # a holder that is gone holds nothing
            async with asyncio.timeout(PATIENCE_S), self._connection(holder) as connection:
                await connection.say({"drop": keys})

    # Answering others

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._askers.add(writer)
        try:
            while True:
                await self._answer(await read_frame(reader), writer)
        except (OSError, EOFError):
            pass  # it has no more questions
        except Exception as error:
            log.warning("a connection was ended that is none of ours: %r", error)
        self._askers.discard(writer)
        writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._holdings.drop(asked.get("drop", ()))
        if "fetch" not in asked:
            return
        try:
            parts = [await self._packed(key, rows) for key, rows in asked["fetch"]]
        except LostError:
            parts = []
        writer.write(frame({"parts": [describe(part) for part in parts]}))
        for buffer in [buffer for part in parts for buffer in buffers(part)]:
            writer.write(buffer)
        await writer.drain()

    async def _packed(self, key: str, wanted: list[int] | None) -> Packed:
        state = self._holdings.get(key)
        rows = np.arange(len(state)) if wanted is None else np.array(wanted, np.int64)
        if isinstance(state, Packed):
            return take(state, rows)
        return await asyncio.to_thread(self._holdings.packed, key, rows)  # it waits for the device

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            self._holdings.expire()
            self._hang_up()

    def _hang_up(self) -> None:
        before_s = self._loop.time() - IDLE_S
        for holder, connections in list(self._idle.items()):
            for unused in [each for each in connections if each.used_s < before_s]:
                unused.close()
                connections.remove(unused)
            if not connections:
                del self._idle[holder]

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
