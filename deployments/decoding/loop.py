"""Runs the engine on a thread of its own, and streams the tokens that it writes."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.scheduler import NewTokens, ReplicaFull
from isobatch.deployments.decoding.sequences import Finish, TextRequest

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class TokenStream:
    """The tokens of a sequence that are not read yet, from one launch or several: the reader takes all at once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._finish: Finish | None = None
        self._failed: Exception | None = None
        self._news = asyncio.Event()
        self.name = 0  # of the sequence; 0 until it is opened

    def put(self, written: NewTokens) -> None:
        self._tokens.extend(written.tokens)
        self._depths.extend(written.depths)
        self._finish = written.finish
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._failed = error
        self._news.set()

    async def get(self) -> NewTokens:
        await self._news.wait()
        self._news.clear()
        if self._failed:
            raise self._failed
        group = NewTokens(self.name, tuple(self._tokens), tuple(self._depths), self._finish)
        self._tokens, self._depths = [], []
        return group


class EngineLoop:
    """Runs an engine until `end`. The engine is used on its thread only, each stream in one event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams: dict[int, tuple[TokenStream, asyncio.AbstractEventLoop]] = {}
        self._failed = ""  # the error with which decoding has ended; empty while it runs
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._failed

    def end(self) -> None:
        self._orders.put(None)

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
        """Run `work` on the engine's thread, and return its result. Decoding goes on if it raises an error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def order() -> None:
            try:
                finish = partial(done.set_result, work(self._working_engine()))
            except Exception as error:
                finish = partial(done.set_exception, error)
            _call_soon(loop, partial(_unless_done, done, finish))

        self._orders.put(order)
        return await done

    def _open(self, request: TextRequest, stream: TokenStream, loop: asyncio.AbstractEventLoop) -> None:
        try:
            opened = self._working_engine().open(request, request.age_s(time.time()))
            if isinstance(opened, ReplicaFull):
                raise opened
        except Exception as error:  # an error of this text alone: others go on
            _call_soon(loop, partial(stream.fail, error))
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

    def _run(self) -> None:
        """Decode until the end. After a failure, every order is answered with its error."""
        try:
            while self._carry_out_orders():
                self._step()
        except Exception as error:
            log.exception("decoding failed")
            self._failed = f"decoding failed: {error}"
            for stream, loop in self._streams.values():
                _call_soon(loop, partial(stream.fail, RuntimeError(self._failed)))
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


def _unless_done(future: "asyncio.Future[Result]", finish: Callable[[], None]) -> None:
    if not future.done():  # its caller may have been cancelled
        finish()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
