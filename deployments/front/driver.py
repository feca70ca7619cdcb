"""Drives the dispatcher in real time, from one event loop: it admits inputs, sends launches, and returns answers.

Launches run on `Workers`: replicas on Ray Serve, or threads of this process.
"""

import asyncio
import logging
import weakref
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf, isfinite
from typing import Protocol

import numpy as np

from deployments.dispatch.audits import OLDEST_S
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.messages import Ending, Fault, Launch, Outcome, Place, Refusal
from deployments.front.answers import Answer, RefusedError, Step
from deployments.front.counts import Counts
from deployments.front.load import FadingPeak
from deployments.tracing import Span, current
from deployments.transport.holdings import Claim, LostError, Share
from deployments.transport.orders import Departed, Order, Stayed
from deployments.transport.packed import Packed, take

log = logging.getLogger(__name__)
GRACE_S = 5.0  # how long survivors are held beyond their last deadline: a launch may be under way then
HEAR_S = 0.05  # how long replies that have come already may take to be heard


class Workers(Protocol):
    def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        """Run one launch on one replica. If this raises, the launch has failed, and its inputs are tried again."""
        ...

    def suspect(self, replica: str) -> None:
        """Look at a replica whose launch takes far too long. Returns at once."""
        ...

    def drop(self, address: str, key: str) -> None:
        """Let the holder forget the survivors under this key, which are no longer needed. Returns at once."""
        ...

    async def close(self) -> None: ...


class Refusing(Protocol):
    """A proxy before a front, which refuses requests that would find no place there."""

    @property
    def refused(self) -> int:
        """So many requests until now."""
        ...


@dataclass(eq=False)
class _Waiting:
    """A caller that waits for the answer to one ticket."""

    reply: "asyncio.Future[Answer]"
    admitted_s: float
    since_s: float  # when it was admitted, or its last step ended
    deadline_s: float
    weight: int
    full: bool = False
    passed: bool = False  # an open ramp, which might have let it go
    steps: list[Step] = field(default_factory=list)
    known: Answer | None = None  # of a cascade: what the levels so far say

    def step(self, launch: Launch, started_s: float, computed_s: float, now_s: float, passes: bool) -> None:
        """It took part in a launch that `passes` an open ramp or not. Where its state was lost, it begins again."""
        self.passed = passes or (self.passed and launch.cursor > 0)
        waited_ms = 1e3 * (started_s - self.since_s)
        self.steps.append(Step(launch.cursor, waited_ms, 1e3 * computed_s, len(launch.tickets)))
        self.since_s = now_s


class Driver:
    """Must be used from one event loop, with a monotonic clock."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: Workers,
        clock: Callable[[], float],
        counts: Counts | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.counts = counts or Counts()
        self.lag = FadingPeak()  # how long an answer that is known waits until who asked for it goes on
        self._proxies = dict[Refusing, int]()  # how many of the requests that each has refused are counted
        self._workers = workers
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}
        self._spans: dict[int, Span] = {}  # of the requests that are traced, by ticket
        self._flights: set[asyncio.Task[None]] = set()
        self._pumping = False  # whether `_pump` is due in this turn of the event loop
        self._alarm: asyncio.TimerHandle | None = None
        self._wake_s = inf  # when the alarm goes off

    async def answer(self, inputs: Packed, within_s: float, full: bool = False, waits: bool = True) -> list[Answer]:
        """The answers to all inputs of one request, in their order. All are admitted, or none.

        `full`: they are those of the full network. `waits`: the client waits for as long as the SLO.
        """
        tickets = self._admit(inputs, self._clock() + within_s, full, waits)
        waiting = [self._waiting[ticket] for ticket in tickets]
        self.pump()
        try:
            if self.dispatcher.limits.degrades:
                await self._in_time(waiting, within_s)
            answers = (
                [await waiting[0].reply] if len(waiting) == 1 else await asyncio.gather(*[w.reply for w in waiting])
            )
            now_s = self._clock()
            self.lag.saw(now_s, now_s - max(each.since_s for each in waiting))
            return answers
        finally:
            # If the client went away or one input failed, the others are no longer needed, nor is any answer counted.
            for ticket, each in zip(tickets, waiting, strict=True):
                each.reply.cancel()
                self.dispatcher.abandon(ticket)

    async def _in_time(self, waiting: Sequence[_Waiting], within_s: float) -> None:
        """When the time is over, answer who is on the way through the next level of a cascade."""
        await asyncio.wait([each.reply for each in waiting], timeout=within_s)
        for each in waiting:
            if not each.reply.done() and each.known:
                self._degrade(each, each.known)

    def _degrade(self, waiting: _Waiting, known: Answer) -> None:
        self.counts.degraded[known.exit_block] += 1
        waiting.since_s = self._clock()  # what it has waited for until now was the next level
        waiting.reply.set_result(replace(known, steps=tuple(waiting.steps)))

    def watch(self, proxy: Refusing) -> None:
        """Count what a proxy before this front refuses from now on, too."""
        self._proxies[proxy] = proxy.refused

    def counted(self) -> Counts:
        """The counts, with what proxies have refused meanwhile."""
        for proxy, counted in self._proxies.items():
            self._proxies[proxy] = now = proxy.refused
            if now > counted:
                self.counts.refused_outside(now - counted)
        return self.counts

    def benched(self) -> list[str]:
        """The replicas that are too slow to be counted on."""
        return self.dispatcher.benched(self._clock())

    def pump(self) -> None:
        """Pump once for all that arrives in one turn of the event loop, so that a busy front sends more together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send the launches that are due, answer inputs that have ended, and set the alarm for the next deadline."""
        self._pumping = False
        now_s = self._clock()
        for launch in self.dispatcher.tick(now_s):
            if inputs := len(launch.tickets) - launch.shadows:
                weight = launch.weight - launch.shadow_weight
                self.counts.launch_began(launch.group, launch.cursor, inputs, weight, launch.room)
            flight = asyncio.get_running_loop().create_task(self._fly(launch, now_s))
            self._flights.add(flight)
            flight.add_done_callback(self._flights.discard)
        for ending in self.dispatcher.endings():
            self._report(ending)
        self._set_alarm(now_s)

    async def close(self) -> None:
        """Returns when everything admitted has ended."""
        while self._waiting:
            await asyncio.wait([waiting.reply for waiting in self._waiting.values()])
            self._pump()
        if self._alarm:
            self._alarm.cancel()
        await self._workers.close()

    def _admit(self, inputs: Packed, deadline_s: float, full: bool, waits: bool) -> list[int]:
        now_s, weights = self._clock(), self.weights(inputs)
        self.counts.inputs_arrived(len(inputs), sum(weights), full)
        places = [Place(inputs, row) for row in range(len(inputs))]
        tickets = self.dispatcher.admit_all(now_s, deadline_s, places, weights, full)
        if isinstance(tickets, Refusal):
            if waits:
                self.counts.inputs_refused(len(inputs), sum(weights))
            raise RefusedError(503, f"refused: {tickets.reason}", retry_after_s=tickets.retry_after_s)
        loop = asyncio.get_running_loop()
        for ticket, weight in zip(tickets, weights, strict=True):
            self._waiting[ticket] = _Waiting(loop.create_future(), now_s, now_s, deadline_s, weight, full)
        if span := current():
            self._spans.update(dict.fromkeys(tickets, span))
        return tickets

    def weights(self, inputs: Packed) -> Sequence[int]:
        """What each input weighs: its tokens where the plan counts them, else 1."""
        length = self.dispatcher.route.length
        if length is None or inputs.lengths is None:
            return (length or 1,) * len(inputs)
        tokens: list[int] = inputs.lengths.tolist()
        return tokens

    async def _fly(self, launch: Launch, started_s: float) -> None:
        span = self._span(launch, started_s) if self._spans else None
        try:
            order = self._order(launch, started_s, span)
            async with self._time_limit(launch):
                async for reply in self._workers.run(launch.replica, order):
                    if isinstance(reply, Departed):
                        self._depart(launch, reply, started_s)
                    else:
                        self._stay(launch, reply, started_s)
        except Exception as error:
            self._fail(launch, error)
            if span:
                span.failed(error)
        if span:
            span.end()
        self.pump()

    def _span(self, launch: Launch, started_s: float) -> Span | None:
        """The span of a launch with inputs that are traced; it belongs to one request, and is linked with the others.

        Where each of these inputs has waited until now is a span, too.
        """
        traced = {ticket: self._spans[ticket] for ticket in launch.tickets if ticket in self._spans}
        for ticket, span in traced.items():
            since_s = self._waiting[ticket].since_s
            span.tracing.span("queue", span, begun_s=since_s, about={"block": launch.cursor}).end(started_s)
        if not traced:
            return None
        first, *others = dict.fromkeys(traced.values())
        about = {"block": launch.cursor, "stop": launch.stop, "inputs": len(launch.tickets)}
        return first.tracing.span("launch", first, "PRODUCER", started_s, others, about | {"group": launch.group})

    def _fail(self, launch: Launch, error: Exception) -> None:
        """Fail a launch. If it hung, a holder may hang, so the survivors that it was to use are given up, too."""
        hung = isinstance(error, TimeoutError) and any(isinstance(place.payload, Claim) for place in launch.places)
        reason = f"{type(error).__name__}: {error}"
        log.warning("a launch of %d inputs failed on replica %s: %s", len(launch.tickets), launch.replica, reason)
        self.dispatcher.failed(launch.id, self._clock(), reason, _fault(error), lost=hung)

    @asynccontextmanager
    async def _time_limit(self, launch: Launch) -> AsyncIterator[None]:
        """Cancel a launch that takes far too long, which then counts as failed, and suspect its replica.

        A time for which this process itself was held up does not count: replies that came meanwhile are heard first.
        """
        limit_s, loop = self.dispatcher.timeout_s(launch.id), asyncio.get_running_loop()
        if not isfinite(limit_s):
            yield
            return
        try:
            async with asyncio.timeout(None) as limit:
                due_s = loop.time() + limit_s
                alarm = loop.call_at(due_s, lambda: limit.reschedule(loop.time() + max(HEAR_S, loop.time() - due_s)))
                try:
                    yield
                finally:
                    alarm.cancel()
        except TimeoutError:
            self._workers.suspect(launch.replica)
            raise

    def _order(self, launch: Launch, now_s: float, span: Span | None) -> Order:
        waiting = [self._waiting[ticket] for ticket in launch.tickets if ticket in self._waiting]
        left_s = max((one.deadline_s - now_s for one in waiting), default=0.0)
        if launch.kinds:
            left_s = max(left_s, OLDEST_S)
        hold_s, parts = left_s + GRACE_S, parts_of(launch.places)
        trace = span.traceparent if span else ""
        return Order(launch.stop, launch.ramps, parts, launch.keep, hold_s=hold_s, kinds=launch.kinds, trace=trace)

    def _depart(self, launch: Launch, departed: Departed, started_s: float) -> None:
        exits, now_s, passes = departed.exits, self._clock(), _passes_ramp(launch)
        self.counts.look(self.dispatcher.route)
        rows, blocks, said = exits.rows.tolist(), exits.blocks.tolist(), exits.answers()
        for row, (label, score), block in zip(rows, said, blocks, strict=True):
            waiting = self._waiting.get(launch.tickets[row])
            if waiting and not waiting.reply.done():
                if departed.stays:
                    waiting.known = Answer(label, score, block, (), level=self._level(block), degraded=True)
                    continue
                waiting.step(launch, started_s, departed.computed_s, now_s, passes)
                in_time, took_s = now_s <= waiting.deadline_s, now_s - waiting.admitted_s
                self.counts.input_left(block, took_s, in_time, waiting.weight, waiting.full, waiting.passed)
                waiting.reply.set_result(Answer(label, score, block, tuple(waiting.steps), level=self._level(block)))
        if departed.stays:
            self.dispatcher.passed(launch.id, max(blocks, default=-1) + 1)
            return
        self.dispatcher.released(launch.id, now_s, rows, blocks, [label for label, _ in said] if launch.kinds else ())
        for audit in self.dispatcher.audits() if launch.kinds else ():
            self.counts.audit_ended(audit.block, audit.agrees)

    def _level(self, block: int) -> int | None:
        """The level of a cascade that this block belongs to; None: the network is no cascade."""
        edges = self.dispatcher.route.edges
        return bisect_right(edges, block) if edges else None

    def _stay(self, launch: Launch, stayed: Stayed, started_s: float) -> None:
        now_s, rows, passes = self._clock(), stayed.rows.tolist(), _passes_ramp(launch)
        for row in rows:
            if waiting := self._waiting.get(launch.tickets[row]):
                waiting.step(launch, started_s, stayed.computed_s, now_s, passes)
        if stayed.survivors is not None:
            self._claim(stayed.survivors)
        places = {row: Place(stayed.survivors, index) for index, row in enumerate(rows)}
        followed_s = self.dispatcher.completed(launch.id, now_s, places, stayed.stop)
        shape = launch.cursor, launch.stop, launch.size
        self.counts.launch_ended(launch.replica, *shape, stayed.computed_s, followed_s)

    def _claim(self, survivors: Packed | Claim) -> None:
        """Drop held survivors when the last reference to them ends: no ticket and no launch needs them then."""
        held = isinstance(survivors, Claim)
        self.counts.survivor_bytes["held" if held else "by_value"] += survivors.size_bytes
        if isinstance(survivors, Claim):
            weakref.finalize(survivors, self._workers.drop, survivors.address, survivors.key).atexit = False

    def _report(self, ending: Ending) -> None:
        for block, weight in ending.unfinished:
            self.counts.input_unfinished(block, weight)
        for ticket in ending.tickets:
            waiting = self._waiting.pop(ticket)
            self._spans.pop(ticket, None)
            if waiting.reply.done():
                continue
            match ending.outcome:
                case Outcome.EXPIRED | Outcome.DEGRADED if waiting.known and self.dispatcher.limits.degrades:
                    self._degrade(waiting, waiting.known)
                case Outcome.EXPIRED | Outcome.DEGRADED:
                    waiting.reply.set_exception(RefusedError(504, "the deadline passed before the answer was known"))
                case Outcome.FAILED:
                    waiting.reply.set_exception(RefusedError(500, _given_up(ending)))
                case _:
                    waiting.reply.cancel()

    def _set_alarm(self, now_s: float) -> None:
        wake_s = self.dispatcher.wake_s
        if wake_s == self._wake_s:
            return
        if self._alarm:
            self._alarm.cancel()
        self._wake_s = wake_s
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(max(0.0, wake_s - now_s), self._wake) if isfinite(wake_s) else None

    def _wake(self) -> None:
        self._wake_s = inf
        self._pump()


def _passes_ramp(launch: Launch) -> bool:
    return any(launch.cursor <= ramp < launch.stop for ramp in launch.ramps)


def _given_up(ending: Ending) -> str:
    if ending.fault is Fault.NETWORK:
        return f"the network failed: {ending.reason.partition(':')[0]}; the replica's log says where"
    return f"given up, since one replica after the other was lost while it ran this; at last: {ending.reason}"


def _fault(error: Exception) -> Fault:
    if isinstance(error, LostError):
        return Fault.STATE
    return Fault.REPLICA if isinstance(error, ConnectionError | TimeoutError) else Fault.NETWORK


def parts_of(places: Sequence[Place]) -> tuple[Packed | Share, ...]:
    """The parts of an order; neighbouring rows of the same batch make one part."""
    runs = [list(run) for _, run in groupby(places, key=lambda place: id(place.payload))]
    return tuple(_part(run[0].payload, [place.row for place in run]) for run in runs)


def _part(source: Packed | Claim, rows: list[int]) -> Packed | Share:
    if isinstance(source, Claim):
        return Share(source, np.array(rows))
    return source if len(source) == 1 else take(source, np.array(rows))
