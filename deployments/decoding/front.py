"""The front of a decoder: it turns texts into tokens and back, and passes on what replicas write.

A stream does not end with its replica: another one goes on after the tokens that were written. It writes what the
first would have written, since a token depends on those before it and on nothing else.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from deployments.decoding.anatomy import DecoderShape
from deployments.decoding.config import DecoderConfig
from deployments.decoding.metrics import ClientMeter
from deployments.decoding.replica import ReplicaState
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Finish, Sampling, Wanted
from deployments.decoding.texts import TextTokens
from deployments.front.answers import RefusedError, shown

log = logging.getLogger(__name__)
ATTEMPTS = 4  # replicas that a sequence may outlive, and one more
AGAIN_S = 0.5  # the wait before another replica is asked
PATIENCE_S = 30.0  # how long a text that has lost its replica waits for a place at another
FULL_FOR_S = 0.05  # so long after one was full none is asked

Ask = Callable[[Wanted], AsyncGenerator[Written | Full, None]]


@dataclass(frozen=True)
class TextPiece:
    """What was written since the last of these, as text, and the depth of each token."""

    text: str
    depths: tuple[int, ...]
    finish: Finish | None = None


class DecoderFront:
    """Answers for one decoder, whatever the protocol. `ask` has a sequence written by any replica."""

    def __init__(
        self,
        config: DecoderConfig,
        name: str,
        shape: DecoderShape,
        texts: TextTokens,
        stop: frozenset[int],
        ask: Ask,
        meter: ClientMeter,
    ) -> None:
        self.config, self.name, self.texts, self.meter = config, name, texts, meter
        self._shape, self._stop, self._ask = shape, stop, ask

    def wanted(self, prompt: Sequence[int], max_tokens: int | None, sampling: Sampling) -> Wanted:
        """What is to be written, once its lengths are checked."""
        vocabulary = self._shape.vocabulary
        if not prompt:
            raise RefusedError(400, "the prompt is empty: give at least one token")
        if max(prompt) >= vocabulary:
            raise RefusedError(400, f"prompt has token {max(prompt)}: the model knows {vocabulary} tokens")
        room = self._shape.room(len(prompt), self.texts.context)
        if max_tokens is None:
            max_tokens = min(self.config.max_tokens, max(1, room))
        if max_tokens > self.config.max_tokens:
            raise RefusedError(400, f"max_tokens = {max_tokens}: {self.config.max_tokens} are allowed")
        wanted = self._shape.wanted(prompt, max_tokens, self._stop, sampling)
        self._check_lengths(wanted, room)
        return wanted

    def _check_lengths(self, wanted: Wanted, room: int) -> None:
        context, told = self.texts.context, f"the prompt has {wanted.given} tokens"
        if len(wanted.source) > context:
            raise RefusedError(400, f"{told}: the model's encoder reads {context}")
        if wanted.source and wanted.max_tokens > room:
            raise RefusedError(400, f"max_tokens = {wanted.max_tokens}: the model writes {room} at most")
        if wanted.max_tokens > room:
            raise RefusedError(400, f"{told} and max_tokens is {wanted.max_tokens}: the model reads {context}")

    async def write(self, wanted: Wanted, stops: Sequence[str], share: float = 1.0) -> AsyncGenerator[TextPiece, None]:
        """The text of a sequence, as it is written; it is this share of a request."""
        speech, meter = self.texts.speech(stops), self.meter.sequence(wanted.given, share)
        try:
            async with aclosing(self._written(wanted)) as groups:
                async for group in groups:
                    meter.wrote(group.depths)
                    ended = group.finish is not None
                    said = [token for token in group.tokens if token not in self._stop]
                    text = speech.hear(said, ended)
                    if speech.stopped or ended:
                        meter.finished()
                    if speech.stopped:
                        yield TextPiece(text, group.depths, Finish.STOP)
                        return
                    yield TextPiece(text, group.depths, group.finish)
        except RefusedError:
            meter.refused()
            raise
        finally:
            meter.ended()

    async def _written(self, wanted: Wanted) -> AsyncGenerator[Written, None]:
        """What is written, by one replica after the other if need be."""
        left = wanted
        for attempt in range(ATTEMPTS):
            try:
                async with aclosing(self._where_room_is(left, begun=left is not wanted)) as groups:
                    async for group in groups:
                        yield group
                        if group.finish:
                            return
                        left = _after(left, group)
            except RefusedError:
                raise
            except Exception as error:
                if attempt + 1 == ATTEMPTS:
                    raise
                log.warning("a replica failed (%s); another one goes on", type(error).__name__)
                await asyncio.sleep(AGAIN_S)

    async def _where_room_is(self, wanted: Wanted, begun: bool) -> AsyncGenerator[Written, None]:
        """What a replica writes that has room. If all are full, a text is refused; one that is begun waits for a place,
        since its client has read a part of it."""
        until_s = self.meter.clock() + (PATIENCE_S if begun else 0.0)
        while True:
            full: Full | None = None
            async with aclosing(self._ask(wanted)) as groups:
                async for group in groups:
                    if isinstance(group, Full):  # says so before anything is written
                        full = group
                    else:
                        yield group
            if full is None:
                return
            if self.meter.clock() >= until_s:
                raise RefusedError(429, "too many sequences wait; try again later", full.retry_after_s)
            await asyncio.sleep(min(full.retry_after_s, AGAIN_S))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RefusedError(404, f"model = {shown(name)}: this server has {self.name}")


def _after(wanted: Wanted, group: Written) -> Wanted:
    """What is wanted once these tokens are written."""
    return replace(
        wanted,
        prompt=wanted.prompt + group.tokens,
        max_tokens=wanted.max_tokens - len(group.tokens),
        replayed=wanted.replayed + group.depths,
    )


@dataclass
class ReplicaGroup:
    """Replicas on one kind of device, by Serve's handle to them, and how many texts they are writing for this front."""

    kind: str
    replicas: Any
    writing: int = 0
    _full: Full | None = None  # what the last that was full has said
    _full_until_s: float = 0.0

    async def write(self, wanted: Wanted, trace: str) -> AsyncGenerator[Written | Full, None]:
        """What one of them writes; it is told when nobody listens any more.

        For a moment after one was full none is asked: that would cost this process as much as passing on many tokens.
        """
        if self._full and time.monotonic() < self._full_until_s:
            yield self._full
            return
        self.writing += 1
        groups = self.replicas.options(stream=True).write.remote(wanted, trace)
        try:
            async for group in groups:
                if isinstance(group, Full):
                    self._full, self._full_until_s = group, time.monotonic() + FULL_FOR_S
                yield group
        except (asyncio.CancelledError, GeneratorExit):
            groups.cancel()
            raise
        finally:
            self.writing -= 1


async def written_by_any(
    groups: Iterable[ReplicaGroup], wanted: Wanted, trace: str
) -> AsyncGenerator[Written | Full, None]:
    """What the first of these groups writes that is not full; if all are, what the one says that has room soonest."""
    full = list[Full]()
    for asked, group in enumerate(groups, 1):
        async with aclosing(group.write(wanted, trace)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Full):  # says so before anything is written
                    full.append(piece)
                else:
                    yield piece
        if len(full) < asked:
            return
    yield min(full, key=lambda each: each.retry_after_s)


def summed(states: Sequence[ReplicaState], num_blocks: int, ramps: Sequence[int] = ()) -> dict[str, Any]:
    """The state of all replicas together, with the names that `isobatch serve` shows. `ramps`: blocks with one."""
    depths = {block: sum(state.depths.get(block, 0) for state in states) for block in range(num_blocks)}
    starts = sorted({start for state in states for start in state.launches})
    fills = []
    for start in starts:
        ran = [state.launches[start] for state in states if start in state.launches]
        count, sequences, room = map(sum, zip(*ran, strict=True))
        fills.append((count, sequences / room))
    return {
        "replicas": len(states),
        "ramps": list(ramps),
        "exits": depths,
        "residents": sum(state.residents for state in states),
        "waiting": sum(state.waiting for state in states),
        "pages": {
            "free": sum(state.free_pages for state in states),
            "of": sum(state.pages for state in states),
        },
        "preempted": sum(state.preempted for state in states),
        "tokens_per_s": sum(state.tokens_per_s for state in states),
        "splits": [{"split": split, "launches": count, "fill": fill} for split, (count, fill) in enumerate(fills)],
    }
