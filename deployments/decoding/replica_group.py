"""The replicas of a decoder as a front sees them: one writes each text, and others are asked if it has no place."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from isobatch.deployments.decoding.loop import DecodingError, TokenInbox, TokenStream
from isobatch.deployments.decoding.replica import ReplicaState
from isobatch.deployments.decoding.scheduler import SHORTEST_RETRY_S, NeverFits, NewTokens, NoReplica, ReplicaFull
from isobatch.deployments.decoding.sequences import TextRequest

ARRIVES_WITHIN_S = 5.0  # the time for the last tokens to arrive once their replica has sent them
FULL_FOR_S = 0.05  # the time for which no replica is asked after all were full
MOST_ASKED = 3  # replicas of one kind that are asked for a place, one after the other
HURRIED = 0.25  # the share of the usual time for a replica to take a text if another one may take it


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
                if request.requested_s:
                    request = replace(request, requested_s=self._by_its_clock(request.requested_s))
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
                    if not isinstance(full, NeverFits):
                        self._note_refusal(full)
                    raise
                finally:
                    if not (finished or ended.done()):
                        call.cancel()
        finally:
            self.writing -= 1

    def _by_its_clock(self, requested_s: float) -> float:
        """The time of a request by a replica's clock, less the time that tokens are on their way; 0, which stands for
        now, while no replica has shown its clock: one that is ahead would refuse the text as too old."""
        return requested_s - self.inbox.lag_s(time.time()) if self.inbox.least_s else 0.0

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
    refusals, groups = list[ReplicaFull](), list(groups)
    for place, group in enumerate(groups):
        elsewhere = any(each.is_alive for each in groups[place + 1 :])
        for left in reversed(range(min(group.count, MOST_ASKED))):
            patience = HURRIED if elsewhere or (left and group.is_alive) else 1.0
            try:
                async with aclosing(group.write(request, trace, patience)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except ReplicaFull as full:
                refusals.append(full)
                if isinstance(full, NeverFits) or (isinstance(full, NoReplica) and not group.is_alive):
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
        **{name: total[name] for name in ("residents", "waiting", "preempted", "tokens_per_s")},
        "pages": {"free": total["free_pages"], "of": total["pages"]},
        "prefix_hits": total["shared"] / max(1, total["asked"]),
        "splits": splits,
    }
