"""A canary: another application, with a new checkpoint, that computes a share of the requests too.

Each of these requests is computed by both networks. Clients get the canary's answers unless `shadow: true`. An input is
kept if the canary answered it in time with the same labels. Inputs of one request are much alike, so a request counts
once, with the share of its inputs that were kept. Once a confidence sequence, which stays valid however often it is
read, shows a mean share below `agreement`, this front sends the canary no more requests.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from isobatch.deployments.front.headers import DEADLINE, PRIORITY
from isobatch.deployments.front.incoming import IncomingRequest
from isobatch.deployments.named import CanaryTerms
from isobatch.deployments.serve_process import own_task
from isobatch.deployments.tracing import PARENT
from isobatch.profiles.agreement import bounds

log = logging.getLogger(__name__)
SURE = 0.99  # the confidence with which a canary must be worse than agreed
AT_ONCE = 64  # requests that a canary computes for one front: further ones do not go to it
TIME_SHARE = 0.8  # the share of a request's time that its canary may take, so that the own answer is still in time
AGAIN_S = 1.0  # between two attempts to reach an application that is starting
_FORWARDED = (b"content-type", b"content-encoding", PARENT.encode(), PRIORITY)
Headers = Mapping[bytes, bytes]


class NamedReply(NamedTuple):
    """A written reply, and the names of the labels in it, by input."""

    written: bytes
    names: tuple[object, ...]


PARKED = NamedReply(b"", ())  # the canary has no replicas, which says nothing against its checkpoint


class Canary:
    """`ask` sends a request to the canary's front, which may refuse it; `reach` raises while no front of it answers.

    `counts`: the sums over requests of the shares of inputs that were kept and missed, and 1 as `withdrawn` once this
    front sends the canary no more requests.
    """

    def __init__(
        self,
        terms: CanaryTerms,
        ask: Callable[[bytes, Headers], Awaitable[NamedReply | None]],
        reach: Callable[[], Awaitable[Any]],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.terms = terms
        self.counts = defaultdict[str, float](float)
        self._ask, self._reach, self._chance = ask, reach, chance
        self._reached = False
        self._tasks = set[asyncio.Task[Any]]()

    async def begin(self) -> None:
        """Wait until the canary first answers, so that the time of its start does not count against it."""
        while not self._reached:
            try:
                await self._reach()
                self._reached = True
            except Exception:
                await asyncio.sleep(AGAIN_S)

    def takes(self, incoming: IncomingRequest) -> bool:
        """Whether the canary computes this request too."""
        able = self._reached and not self.counts["withdrawn"] and not incoming.full and len(self._tasks) < AT_ONCE
        return able and self._chance() < self.terms.share

    async def reply(self, own: Awaitable[NamedReply], body: bytes, headers: Headers, within_s: float) -> bytes:
        """The reply for the client, who waits for `within_s`."""
        task = own_task(self._answer(body, headers, TIME_SHARE * within_s), self._tasks)
        try:
            mine = await own
        except BaseException:
            task.cancel()
            raise
        task.add_done_callback(lambda done: self._count(mine, _reply_of(done)))  # even if the client goes
        if self.terms.shadow:
            return mine.written
        await asyncio.wait([task])
        reply = _reply_of(task)
        return mine.written if reply in (None, PARKED) or self.counts["withdrawn"] else reply.written

    async def _answer(self, body: bytes, headers: Headers, within_s: float) -> NamedReply | None:
        """The canary's answer; None: it has none in time."""
        sent = {name: headers[name] for name in _FORWARDED if name in headers}
        try:
            async with asyncio.timeout(within_s):
                return await self._ask(body, sent | {DEADLINE: b"%.3f" % (1e3 * within_s)})
        except Exception as error:
            log.warning("the canary %s did not answer: %s", self.terms.application, type(error).__name__)
        return None

    def _count(self, mine: NamedReply, theirs: NamedReply | None) -> None:
        if theirs == PARKED:
            return
        names, counts = theirs.names if theirs else (), self.counts
        same = sum(own == other for own, other in zip(mine.names, names, strict=False))
        kept = same / len(mine.names) if mine.names else 1.0
        counts["kept"] += kept
        counts["missed"] += 1 - kept
        requests = round(counts["kept"] + counts["missed"])
        if not counts["withdrawn"] and bounds(counts["missed"], requests, SURE)[0] > 1 - self.terms.agreement:
            counts["withdrawn"] = 1
            log.warning(
                "the canary %s is withdrawn: it answered %.1f %% of the inputs of %d requests in time with the same "
                "labels, and %g %% must be",
                self.terms.application, 100 * counts["kept"] / requests, requests, 100 * self.terms.agreement,
            )  # fmt: skip


def _reply_of(done: asyncio.Task[NamedReply | None]) -> NamedReply | None:
    return None if done.cancelled() else done.result()
