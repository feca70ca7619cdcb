"""The front of a decoder: it converts texts to tokens and back; replicas generate the tokens.

A stream outlives its replica: another replica continues after the last token. It generates the same tokens as the first
one would, since a token depends only on the tokens before it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from isobatch.deployments.decoding.anatomy import DecoderShape
from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.loop import DecodingError
from isobatch.deployments.decoding.ramp_rules import GenerationDefaults
from isobatch.deployments.decoding.replica import DECODER
from isobatch.deployments.decoding.scheduler import NewTokens, NoReplica, ReplicaFull
from isobatch.deployments.decoding.sequences import FAILURES, Finish, TextRequest, TextTerms, TokenLogprobs
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.headers import RequestHeaders
from isobatch.deployments.front.load import RetryTimes
from isobatch.deployments.front.proxy import Burden, WatchedProxies
from isobatch.deployments.tracing import Tracing, current

log = logging.getLogger(__name__)
ATTEMPTS = 4  # replicas that are tried for a sequence, one after the other
MOST_FAILED = 2  # times that decoding of a text may fail, alone or with its replica: the text may be the cause
RETRY_AFTER_S = 0.5  # the wait before another replica is tried
MAX_WAIT_S = 30.0  # the time for which a text that has lost its replica waits for a place at another one

WriteTokens = Callable[[TextRequest], AsyncGenerator[NewTokens, None]]


@dataclass(frozen=True)
class TextPiece:
    """The text that is new since the last piece, and its tokens with the depth of each; `logprobs` if they are asked
    for."""

    text: str
    depths: tuple[int, ...]
    finish: Finish | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(eq=False)
class DecoderFront:
    """Generates texts with one decoder, for any protocol.

    `write_tokens` yields a sequence from any replica, or raises `ReplicaFull` before its first token. `state` returns
    the state of all replicas. `no_grammars`: why texts can follow no grammar; empty: they can.
    """

    config: DecoderConfig
    name: str
    shape: DecoderShape
    texts: TextTokens
    stop: frozenset[int]
    write_tokens: WriteTokens
    meter: ClientMeter
    state: Callable[[], Awaitable[dict[str, Any]]]
    key: bytes | None = None
    tracing: Tracing | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    no_grammars: str = "this server has no grammars"
    _retries: RetryTimes = field(default_factory=RetryTimes)

    def burden(self) -> Burden:
        """The load of this front, for the limits of the proxies before it."""
        return self.meter.burden()

    @property
    def proxies(self) -> WatchedProxies:
        return self.meter.proxies

    async def missing(self) -> list[str]:
        """The parts of the network that have no replica now."""
        return [] if (await self.state())["replicas"] else [DECODER]

    async def stats(self) -> dict[str, Any]:
        """The counts since the start, and the present state of all replicas."""
        about = {"schema_version": 2, "model": self.name, "requests": self.meter.counted()}
        return {**about, **await self.state()}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that is refused, cancelled or fails in this context, and raise every failure as a
        `RefusedError`."""
        try:
            yield
        except RefusedError as refused:
            self.ended_early(refused)
            raise
        except Exception as error:
            self.ended_early(error)
            log.exception("a text could not be written")
            raise RefusedError(500, f"this server failed: {type(error).__name__}; its log says where") from error
        except (asyncio.CancelledError, GeneratorExit):
            self.meter.ended("cancelled")
            raise

    def ended_early(self, error: Exception) -> None:
        """Count a request that is refused or fails."""
        is_refused = isinstance(error, RefusedError) and error.status != 500
        self.meter.ended("refused" if is_refused else "failed")
        if span := current():
            span.failed(error)

    def request(self, prompt: Sequence[int], terms: TextTerms) -> TextRequest:
        """The request for a text, with checked lengths."""
        vocabulary = self.shape.vocabulary
        if not prompt:
            raise RefusedError(400, "the prompt is empty: give at least one token")
        for name, tokens in (("prompt", prompt), ("logit_bias", [token for token, _ in terms.sampling.bias])):
            if max(tokens, default=0) >= vocabulary:
                raise RefusedError(400, f"{name} has token {max(tokens)}: the model knows {vocabulary} tokens")
        room = self.shape.room(len(prompt), self.texts.context)
        most, max_tokens = self.config.max_tokens, terms.max_tokens
        if max_tokens is None:
            max_tokens = min(most, terms.usual_tokens or self.defaults.max_new_tokens or most, max(1, room))
        if max_tokens > most:
            raise RefusedError(400, f"max_tokens = {max_tokens}: {most} are allowed")
        if terms.min_tokens > max_tokens:
            raise RefusedError(400, f"min_tokens = {terms.min_tokens}: max_tokens is only {max_tokens}")
        if terms.sampling.grammar:
            self._check_grammar(terms)
        stop = frozenset[int]() if terms.ignore_eos else self.stop
        request = self.shape.request(prompt, max_tokens, stop, terms.sampling)
        self._check_lengths(request, room)
        return replace(request, min_tokens=terms.min_tokens, full=terms.full)

    def _check_grammar(self, terms: TextTerms) -> None:
        obstacle = self.no_grammars
        if terms.min_tokens or terms.ignore_eos:
            obstacle = "such a text ends with its JSON: leave out min_tokens and ignore_eos"
        if obstacle:
            raise RefusedError(400, f"response_format: {obstacle}")

    def _check_lengths(self, request: TextRequest, room: int) -> None:
        context, sentence = self.texts.context, f"the prompt has {request.given} tokens"
        if len(request.source) > context:
            raise RefusedError(400, f"{sentence}: the model's encoder reads {context}")
        if request.source and request.max_tokens > room:
            raise RefusedError(400, f"max_tokens = {request.max_tokens}: the model writes {room} at most")
        if request.max_tokens > room:
            raise RefusedError(400, f"{sentence} and max_tokens is {request.max_tokens}: the model reads {context}")

    async def write(
        self, request: TextRequest, stops: Sequence[str], share: float = 1.0, begun_s: float | None = None
    ) -> AsyncGenerator[TextPiece, None]:
        """The pieces of a text, as they are written. `share`: of this text in its HTTP request, which reached this
        front at `begun_s` by the meter's clock (None: now)."""
        age_s = 0.0 if begun_s is None else self.meter.clock() - begun_s
        # A stop string may be a special token, which no text shows. Some tokenizers have more than the network knows.
        stop = frozenset(each for each in request.stop | self.texts.silent(stops) if each < self.shape.vocabulary)
        request = replace(request, requested_s=time.time() - age_s, stop=stop)
        text = self.texts.growing_text(stops, self.stop, request.min_tokens, request.prompt)
        meter = self.meter.sequence(request.given, share, age_s)
        try:
            async with aclosing(self._by_replicas(request)) as groups:
                async for group in groups:
                    new, taken = text.add(group.tokens, last=group.finish is not None)
                    meter.wrote(group.depths[:taken])
                    finish = Finish.STOP if text.stopped else group.finish
                    if finish:
                        meter.finished()
                        self._retries.answered(self.meter.clock())
                    yield TextPiece(new, group.depths[:taken], finish, group.tokens[:taken], group.logprobs[:taken])
                    if text.stopped:
                        return
        except RefusedError as refused:
            if refused.retry_after_s is not None:  # otherwise the text is the cause, not the load
                meter.refused()
            raise
        finally:
            meter.ended()

    async def whole(
        self, request: TextRequest, stops: Sequence[str], share: float = 1.0, begun_s: float | None = None
    ) -> TextPiece:
        async with aclosing(self.write(request, stops, share, begun_s)) as pieces:
            written = [piece async for piece in pieces]
        names = ("depths", "tokens", "logprobs")
        depths, tokens, logprobs = (tuple(each for piece in written for each in getattr(piece, name)) for name in names)
        finish = written[-1].finish if written else None
        return TextPiece("".join(piece.text for piece in written), depths, finish, tokens, logprobs)

    async def _by_replicas(self, request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        """The tokens of a sequence, from another replica if one fails."""
        left, failed = request, 0
        for attempt in range(ATTEMPTS):
            try:
                async with aclosing(self._by_any_replica(left, begun=left is not request)) as groups:
                    async for group in groups:
                        if group.finish is Finish.UNDEFINED:
                            raise RefusedError(422, FAILURES[group.finish])
                        if group.finish is Finish.FAILED:
                            raise DecodingError(FAILURES[group.finish])
                        yield group
                        if group.finish:
                            return
                        left = _continued(left, group)
            except RefusedError:
                raise
            except Exception as error:
                failed += isinstance(error, DecodingError)
                if failed == MOST_FAILED:
                    sentence = f"given up, since the network failed {failed} times while it wrote this text"
                    raise RefusedError(500, f"{sentence}; the logs of replicas say where") from error
                if attempt + 1 == ATTEMPTS:
                    raise
                log.warning("a replica failed (%s); another one goes on", type(error).__name__)
                await asyncio.sleep(RETRY_AFTER_S)

    async def _by_any_replica(self, request: TextRequest, begun: bool) -> AsyncGenerator[NewTokens, None]:
        """The tokens of a sequence from a replica that has a place for it.

        If all replicas are full, a new text is refused. A text that has begun waits, as its client has read a part.
        """
        until_s = self.meter.clock() + (MAX_WAIT_S if begun else 0.0)
        while True:
            try:
                async with aclosing(self.write_tokens(request)) as groups:
                    async for group in groups:
                        yield group
                return
            except ReplicaFull as full:
                refused, after_s = full, full.retry_after_s
            if (now_s := self.meter.clock()) >= until_s:
                self._retries.refused(now_s)
                after_s = self._retries.retry_after_s(after_s)
                if isinstance(refused, NoReplica):
                    raise RefusedError(503, "no replica is running; try again later", after_s)
                raise RefusedError(429, "too many sequences wait; try again later", after_s)
            await asyncio.sleep(min(after_s, RETRY_AFTER_S))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RefusedError(404, f"model = {shown(name)}: this server has {self.name}")


def ends_at(about: RequestHeaders) -> float | None:
    """The deadline of a request that is read now, by the event loop's clock; None: it has none."""
    return None if about.within_s is None else asyncio.get_running_loop().time() - about.waited_s + about.within_s


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Refuse a request whose deadline passes in this context."""
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise RefusedError(504, "the deadline passed before the text was complete") from error


def _continued(request: TextRequest, group: NewTokens) -> TextRequest:
    """The request for the rest of a text after these tokens."""
    return replace(
        request,
        prompt=request.prompt + group.tokens,
        max_tokens=request.max_tokens - len(group.tokens),
        replayed=request.replayed + group.depths,
        requested_s=0.0,  # its first token has come
    )
