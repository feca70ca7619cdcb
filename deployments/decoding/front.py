"""The front of a decoder: it converts texts to tokens and back; replicas generate the tokens.

A stream outlives its replica: another replica continues after the last token. It generates the same tokens as the first
one would, since a token depends only on the tokens before it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from isobatch.deployments.decoding.anatomy import DecoderShape
from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.grammars import Grammars
from isobatch.deployments.decoding.loop import DecodingError, TokenInbox, TokenStream
from isobatch.deployments.decoding.ramp_rules import GenerationDefaults
from isobatch.deployments.decoding.replica import DECODER, ReplicaState
from isobatch.deployments.decoding.scheduler import SHORTEST_RETRY_S, NewTokens, NoReplica, ReplicaFull
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
ARRIVES_WITHIN_S = 5.0  # the time for the last tokens to arrive once their replica has sent them
FULL_FOR_S = 0.05  # the time for which no replica is asked after all were full
MOST_ASKED = 3  # replicas of one kind that are asked for a place, one after the other
HURRIED = 0.25  # the share of the usual time for a replica to take a text if another one may take it

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
    the state of all replicas.
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
    grammars: Grammars | None = None
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
        obstacle = self.grammars.obstacle if self.grammars else "this server has no grammars"
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


@dataclass
class ReplicaGroup:
    """The replicas on one kind of device, as Serve's handle, and the number of texts that they write for this front.

    `patience_s`: the time for which a new text waits for any replica; Serve would let it wait without end. `count`: the
    number of replicas. `language`: of the front's tokens.
    """

    kind: str
    replicas: Any
    inbox: TokenInbox
    patience_s: float = SHORTEST_RETRY_S
    count: int = 1
    language: str = ""
    writing: int = 0
    _refused: int = 0  # in a row
    _refusal: ReplicaFull | None = None  # the latest
    _closed_until_s: float = 0.0

    @property
    def is_alive(self) -> bool:
        return self.inbox.has_alive(self.kind)

    async def write(self, request: TextRequest, trace: str, patience: float = 1.0) -> AsyncGenerator[NewTokens, None]:
        """The tokens of a sequence from one of the replicas, which stops when this generator is closed. `patience`: the
        share of `patience_s` for which it may be taken.

        After `count` refusals in a row, no replica is asked for `FULL_FOR_S`, since asking costs this process as much
        as many tokens. If no replica answers at all, none is asked for `SHORTEST_RETRY_S`. A text that has begun asks
        nevertheless, since full replicas take it.
        """
        if self._refusal and not request.replayed and time.monotonic() < self._closed_until_s:
            raise replace(self._refusal)
        self.writing += 1
        try:
            with self.inbox.stream() as stream:
                if request.requested_s:  # the tokens also take time on their way
                    request = replace(request, requested_s=request.requested_s - self.inbox.lag_s(time.time()))
                call = self.replicas.write.remote(request, self.inbox.address, stream.name, trace, self.language)
                ended: asyncio.Future[ReplicaFull | DecodingError | None] = asyncio.ensure_future(call)
                ended.add_done_callback(partial(_end, stream))
                begun = finished = False
                try:
                    if not await stream.is_taken(patience * self.patience_s):
                        raise NoReplica(SHORTEST_RETRY_S)
                    while not finished:
                        group = await stream.get()
                        finished = group.finish is not None
                        if group.tokens or finished:
                            if not begun:
                                self._refused, begun = 0, True
                            yield group
                except ReplicaFull as full:
                    self._note_refusal(full)
                    raise
                finally:
                    if not (finished or ended.done()):
                        call.cancel()
        finally:
            self.writing -= 1

    def _note_refusal(self, full: ReplicaFull) -> None:
        self._refused += 1
        is_absent = isinstance(full, NoReplica) and not self.is_alive
        if is_absent or self._refused >= self.count:
            closed_s = SHORTEST_RETRY_S if is_absent else FULL_FOR_S
            self._refusal, self._closed_until_s = full, time.monotonic() + closed_s


def _end(stream: TokenStream, ended: "asyncio.Future[ReplicaFull | DecodingError | None]") -> None:
    """Report how a replica's call has ended. Tokens that it sent may still be on their way."""
    if ended.cancelled():
        return
    if error := ended.exception():
        stream.fail(error if isinstance(error, Exception) else ConnectionError(repr(error)))
    elif reason := ended.result():
        stream.fail(reason)
    else:
        asyncio.get_running_loop().call_later(ARRIVES_WITHIN_S, stream.fail, ConnectionError("tokens were lost"))


async def written_by_any(
    groups: Iterable[ReplicaGroup], request: TextRequest, trace: str
) -> AsyncGenerator[NewTokens, None]:
    """The tokens of a sequence from the first group that is not full; or the refusal with the shortest wait. If one
    replica hangs and others do not, these are asked soon."""
    refusals = list[ReplicaFull]()
    for group in groups:
        for left in reversed(range(min(group.count, MOST_ASKED))):
            patience = HURRIED if left and group.is_alive else 1.0
            try:
                async with aclosing(group.write(request, trace, patience)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except ReplicaFull as full:
                refusals.append(full)
                if isinstance(full, NoReplica) and not group.is_alive:
                    break
    raise min(refusals, key=lambda full: (isinstance(full, NoReplica), full.retry_after_s))


SUMMED = ("residents", "waiting", "free_pages", "pages", "preempted", "tokens_per_s", "asked", "shared")


def summed(states: Sequence[ReplicaState], num_blocks: int, ramps: Sequence[int] = ()) -> dict[str, Any]:
    """The state of all replicas together, with the names of `/stats`. `ramps`: the blocks that have one."""
    total = {name: sum(getattr(state, name) for state in states) for name in SUMMED}
    splits = []
    for split, start in enumerate(sorted({start for state in states for start in state.launches})):
        launches = [state.launches[start] for state in states if start in state.launches]
        count, sequences, room = map(sum, zip(*launches, strict=True))
        splits.append({"split": split, "launches": count, "fill": sequences / room})
    return {
        "replicas": len(states),
        "ramps": list(ramps),
        "exits": {block: sum(state.depths.get(block, 0) for state in states) for block in range(num_blocks)},
        "residents": total["residents"],
        "waiting": total["waiting"],
        "pages": {"free": total["free_pages"], "of": total["pages"]},
        "prefix_hits": total["shared"] / max(1, total["asked"]),
        "preempted": total["preempted"],
        "tokens_per_s": total["tokens_per_s"],
        "splits": splits,
    }
