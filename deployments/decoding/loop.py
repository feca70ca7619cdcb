"""Runs the engine on a thread of its own, and streams its tokens to fronts, over one connection each.

A replica sends the tokens of a launch as one message. As streamed answers of Serve's handles, they would be a message
for each text, and cost the replica's process more than the launch of a small network. Serve still routes each text to a
replica, by a call that lasts as long as the text.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.scheduler import NewTokens, ReplicaFull
from isobatch.deployments.decoding.sequences import Finish, TextRequest, TokenLogprobs
from isobatch.deployments.front.load import FadingPeak
from isobatch.deployments.own_cores import as_computing
from isobatch.deployments.replica.local_workers import Result, WorkQueue, result_on
from isobatch.deployments.transport.connection import AccessGate, AuthorizedConnection, Key, KeyedConnection, Message
from isobatch.deployments.transport.wire import Wire

log = logging.getLogger(__name__)


class TokenStream:
    """The tokens of a sequence that are not read yet, from one launch or several: the reader takes all at once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish: Finish | None = None
        self._failed: Exception | None = None
        self._news = asyncio.Event()
        self.name = 0  # of the sequence; 0 until it is opened
        self.writer: object = None  # the connection over which its tokens come

    def put(self, written: NewTokens) -> None:
        self._tokens.extend(written.tokens)
        self._depths.extend(written.depths)
        self._logprobs.extend(written.logprobs)
        self._finish = written.finish
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._failed = error
        self._news.set()

    async def is_taken(self, within_s: float) -> bool:
        """Whether a replica takes the sequence within this time, or fails."""
        try:
            async with asyncio.timeout(within_s):
                return await self._news.wait()
        except TimeoutError:
            return False

    async def get(self) -> NewTokens:
        await self._news.wait()
        self._news.clear()
        if self._failed and self._finish is None:
            raise self._failed
        group = NewTokens(self.name, tuple(self._tokens), tuple(self._depths), self._finish, tuple(self._logprobs))
        self._tokens, self._depths, self._logprobs = [], [], []
        return group


class DecodingError(RuntimeError):
    """Decoding of a text has failed, alone or with its replica. The text may be the cause."""


class EngineLoop:
    """Runs an engine until `end`. The engine is used on its thread only, each stream in one event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: WorkQueue = SimpleQueue()
        self._streams: dict[int, tuple[TokenStream, asyncio.AbstractEventLoop]] = {}
        self._failed = ""  # the error with which decoding has ended; empty while it runs
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._failed

    def end(self) -> None:
        self._orders.put(None)

    def join(self) -> None:
        """Wait until the launch that runs has ended, after `end`."""
        self._thread.join()

    async def write(self, request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        """The tokens of a sequence, in groups. The sequence is cancelled when this generator is closed."""
        stream, loop = TokenStream(), asyncio.get_running_loop()
        self._orders.put(lambda: self._open(request, stream, loop))
        try:
            while True:
                group = await stream.get()
                yield group
                if group.finish:
                    return
        finally:
            self._orders.put(lambda: self._close(stream))

    async def call(self, work: Callable[[Engine], Result]) -> Result:
        """Run `work` on the engine's thread, and return its result. Decoding continues if it raises an error."""
        return await result_on(self._orders, lambda: work(self._working_engine()))

    def _open(self, request: TextRequest, stream: TokenStream, loop: asyncio.AbstractEventLoop) -> None:
        try:
            opened = self._working_engine().open(request, request.age_s(time.time()))
        except Exception as error:  # an error of this text alone: others continue
            _call_soon(loop, partial(stream.fail, error))
            return
        if isinstance(opened, ReplicaFull):
            _call_soon(loop, partial(stream.fail, opened))
            return
        stream.name = opened
        self._streams[opened] = stream, loop

    def _close(self, stream: TokenStream) -> None:
        if stream.name in self._streams:
            del self._streams[stream.name]
            self._engine.cancel(stream.name)

    def _working_engine(self) -> Engine:
        if self._failed:
            raise RuntimeError(self._failed)
        return self._engine

    @as_computing()
    def _run(self) -> None:
        """Decode until the end. After a failure, every order is answered with its error."""
        try:
            while self._carry_out_orders():
                self._step()
        except Exception as error:
            log.exception("decoding failed")
            self._failed = f"decoding failed: {error}"
            for stream, loop in self._streams.values():
                _call_soon(loop, partial(stream.fail, DecodingError(self._failed)))
            self._streams.clear()
            while self._carry_out_orders():
                pass

    def _carry_out_orders(self) -> bool:
        """Carry out all orders; if there is nothing to decode, wait for one. Return False at the end."""
        block = not self._streams
        while True:
            try:
                order = self._orders.get(block)
            except Empty:
                return True
            if order is None:
                return False
            order()
            block = False

    def _step(self) -> None:
        """Run a launch, and wake each event loop once for all of its tokens."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, NewTokens]]] = {}
        for written in self._engine.step() or ():
            stream, loop = self._streams[written.name]
            if written.finish:
                del self._streams[written.name]
            by_loop.setdefault(loop, []).append((stream, written))
        for name, full in self._engine.scheduler.take_late():
            stream, loop = self._streams.pop(name)
            _call_soon(loop, partial(stream.fail, full))
        for loop, news in by_loop.items():
            _call_soon(loop, partial(_put_all, news))


def _put_all(news: Iterable[tuple[TokenStream, NewTokens]]) -> None:
    for stream, written in news:
        stream.put(written)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


LEAST_RISES = 0.1  # seconds by which the least lag of a replica rises in a second, as its clock may be reset
UNAUTHORIZED_LIMIT = 64  # connections without the key; there are far fewer replicas
BEAT_S = 1.0  # between two signs of life of a replica, which come between its launches
# A replica without a sign of life for longer hangs: texts go on elsewhere, and Serve replaces it. A launch of a large
# network with 1,024 tokens of prompts may take most of this time on a slow processor.
HANGS_S = 120.0


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
        self.least_s: dict[object, float] = {}  # by replica: the least lag of its tokens, by the clocks of both ends
        self.delay = FadingPeak()  # the lag of tokens beyond the least one
        self._watching: asyncio.Task[None] | None = None

    async def open(self, wire: Wire) -> None:
        self.address = TokenAddress(await self.gate.open(wire, lambda: _ReplicaEnd(self)), self.gate.key)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        if self._watching:
            self._watching.cancel()
        self.gate.close()

    async def _watch(self) -> None:
        """End the connections of replicas that hang. Beats are counted, since this process may have hung itself."""
        while True:
            await asyncio.sleep(BEAT_S)
            for end in self._ends:
                end.missed += 1
                if end.hangs:
                    log.warning("a replica hangs: its texts go on elsewhere")
                    end.abort()

    def has_alive(self, kind: str) -> bool:
        """Whether a replica on this kind of device gave a sign of life just now."""
        return any(end.kind == kind and end.missed <= 2 for end in self._ends)

    @property
    def _ends(self) -> "list[_ReplicaEnd]":
        return [each for each in self.gate.authorized if isinstance(each, _ReplicaEnd)]

    def lag_s(self, now_s: float) -> float:
        """The time that tokens are on their way, by the replica clock that is farthest ahead, as any replica may get
        the next text. It is negative if that clock is ahead of this one."""
        return min(self.least_s.values(), default=0.0) + self.delay.at(now_s)

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
        self._inbox, self._heard_s = inbox, 0.0
        self.missed = 0  # beats since the last message
        self.kind = ""

    @property
    def hangs(self) -> bool:
        return self.missed * BEAT_S > HANGS_S

    def abort(self) -> None:
        """Close the connection at once: a peer that hangs reads nothing any more."""
        self._transport.abort()

    def authorized_as(self, caller: str) -> None:
        self.kind = caller

    def lost(self, error: Exception | None) -> None:
        """Its texts fail at once: Ray may notice much later that a process or a node has gone."""
        super().lost(error)
        self._inbox.least_s.pop(self, None)
        # A text may be the reason that a replica hangs: it must not go on to all others.
        failed, why = (DecodingError, "the replica hangs") if self.hangs else (ConnectionError, "the replica has gone")
        for stream in self._inbox.streams.values():
            if stream.writer is self:
                stream.fail(failed(why))

    def on_authorized_message(self, message: WrittenTokens) -> None:
        self.missed, now_s, known = 0, time.time(), self._inbox.least_s
        lag_s, since_s = now_s - message.sent_s, max(0.0, now_s - self._heard_s)
        known[self] = min(lag_s, known.get(self, lag_s) + LEAST_RISES * since_s)
        self._heard_s = now_s
        self._inbox.delay.add(now_s, lag_s - known[self])
        for group in message.groups:
            if stream := self._inbox.streams.get(group.name):  # otherwise its client has gone
                stream.writer = self
                stream.put(group)


class TokenOutlet(KeyedConnection):
    """The replica's end: it sends the tokens of one turn of the event loop together."""

    messages = Key  # the front sends nothing

    def __init__(self, key: str, kind: str) -> None:
        super().__init__(key, kind)
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
    """A replica's connections to all fronts that it writes for. `kind`: of its device."""

    def __init__(self, wire: Wire, kind: str = "") -> None:
        self._wire, self._kind = wire, kind
        self._connecting = WeakValueDictionary[TokenAddress, asyncio.Lock]()  # a lost front may take minutes
        self._outlets = WeakValueDictionary[TokenAddress, TokenOutlet]()  # each lives as long as its connection
        self._beat_s = time.monotonic()  # the last sign of life

    @property
    def hangs(self) -> bool:
        return time.monotonic() - self._beat_s > HANGS_S

    async def beat(self, turn: Callable[[], Awaitable[object]]) -> None:
        """Show fronts that this replica works, until cancelled; `turn` returns between two launches."""
        while True:
            await turn()
            self._beat_s = time.monotonic()
            for outlet in tuple(self._outlets.values()):
                outlet.send(WrittenTokens((), time.time()))
            await asyncio.sleep(BEAT_S)

    async def to(self, front: TokenAddress) -> TokenOutlet:
        """The connection to a front, which the first text for it opens."""
        async with self._connecting.setdefault(front, asyncio.Lock()):
            outlet = self._outlets.get(front)
            if outlet is None or not outlet.is_open:
                outlet = await self._wire.connect(lambda: TokenOutlet(front.key, self._kind), front.address)
                self._outlets[front] = outlet
            return outlet
