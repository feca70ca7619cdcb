"""The engine on a thread of its own, and streams of what it writes."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from deployments.decoding.engine import Engine
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Finish, Wanted

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class TokenStream:
    """What a sequence has written and nobody has read yet, of one launch or several: the reader takes all at once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._finish: Finish | None = None
        self._failed: Exception | None = None
        self._news = asyncio.Event()
        self.name = 0  # until it is opened

    def put(self, written: Written) -> None:
        self._tokens.extend(written.tokens)
        self._depths.extend(written.depths)
        self._finish = written.finish
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._failed = error
        self._news.set()

    async def get(self) -> Written:
        await self._news.wait()
        self._news.clear()
        if self._failed:
            raise self._failed
        group = Written(self.name, tuple(self._tokens), tuple(self._depths), self._finish)
        self._tokens, self._depths = [], []
        return group


class FullError(Exception):
    """There is no place now; there may be one in so many seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class EngineLoop:
    """Runs an engine until `end`. Streams belong to one event loop; the engine belongs to the thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams: dict[int, tuple[TokenStream, asyncio.AbstractEventLoop]] = {}
        self._failed = ""  # how decoding has failed
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._failed

    def end(self) -> None:
        self._orders.put(None)

    async def write(self, wanted: Wanted) -> AsyncGenerator[Written, None]:
        """What a sequence writes, in groups. Whoever stops listening cancels it."""
        stream, loop = TokenStream(), asyncio.get_running_loop()
        self._orders.put(lambda: self._open(wanted, stream, loop))
        try:
            while True:
                group = await stream.get()
                yield group
                if group.finish:
                    return
        finally:
            self._orders.put(lambda: self._close(stream))

    async def call(self, work: Callable[[Engine], Result]) -> Result:
        """What `work` returns or raises, on the engine's thread. Decoding goes on, whatever it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def order() -> None:
            try:
                told = partial(done.set_result, work(self._working()))
            except Exception as error:
                told = partial(done.set_exception, error)
            _tell(loop, partial(_settle, done, told))

        self._orders.put(order)
        return await done

    def _open(self, wanted: Wanted, stream: TokenStream, loop: asyncio.AbstractEventLoop) -> None:
        try:
            opened = self._working().open(wanted)
        except Exception as error:  # this text's alone: those of others go on
            _tell(loop, partial(stream.fail, error))
            return
        if isinstance(opened, Full):
            _tell(loop, partial(stream.fail, FullError(opened.retry_after_s)))
            return
        stream.name = opened
        self._streams[opened] = stream, loop

    def _close(self, stream: TokenStream) -> None:
        if stream.name in self._streams:
            del self._streams[stream.name]
            self._engine.cancel(stream.name)

    def _working(self) -> Engine:
        if self._failed:
            raise RuntimeError(self._failed)
        return self._engine

    def _run(self) -> None:
        """Decode until the end. Once decoding has failed, whoever asks for anything is told so."""
        try:
            while self._obey():
                self._step()
        except Exception as error:
            log.exception("decoding failed")
            self._failed = f"decoding failed: {error}"
            for stream, loop in self._streams.values():
                _tell(loop, partial(stream.fail, RuntimeError(self._failed)))
            self._streams.clear()
            while self._obey():
                pass

    def _obey(self) -> bool:
        """Carry out all orders; with nothing to decode, wait for one. Returns whether to go on."""
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
        for written in self._engine.step() or ():
            stream, loop = self._streams[written.name]
            if written.finish:
                del self._streams[written.name]
            _tell(loop, partial(stream.put, written))


def _settle(future: "asyncio.Future[Result]", told: Callable[[], None]) -> None:
    if not future.done():  # nobody may wait any more
        told()


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(what)
