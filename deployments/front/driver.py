"""Drives the dispatcher in real time, from one event loop: it admits inputs, sends launches, and returns answers.

Launches run on `Workers`: replicas on Ray Serve, or threads of this process.
"""

import asyncio
import logging
import secrets
import weakref
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, groupby
from math import inf, isfinite
from typing import Protocol

import numpy as np

from isobatch.deployments.dispatch.audits import OLDEST_S
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Ending, Fault, Launch, Outcome, Place, Refusal, RowKind
from isobatch.deployments.front.answers import Answer, RefusedError, Step
from isobatch.deployments.front.counts import Counts
from isobatch.deployments.front.load import FadingPeak
from isobatch.deployments.front.proxy import WatchedProxies
from isobatch.deployments.tracing import Span, current
from isobatch.deployments.transport.holdings import Claim, LostError, Share
from isobatch.deployments.transport.orders import Departed, LaunchError, Order, Stayed
from isobatch.deployments.transport.packed import Packed, take, wanting_best

log = logging.getLogger(__name__)
GRACE_S = 5.0  # survivors are held this much longer than the last deadline, since a launch may be running then
READ_S = 0.05  # the time to read replies that have already arrived, when a launch times out
MOST_NUMBERS = 2**24  # requests for the best scores have numbers below this, up to which float32 has all of them


class Workers(Protocol):
    def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        """Run one launch on one replica. If this raises, the launch has failed, and its inputs try again."""

    def suspect(self, replica: str) -> None:
        """Check a replica whose launch takes far too long. Returns at once."""

    def drop(self, address: str, key: str) -> None:
        """Let the holder drop the survivors with this key. Returns at once."""

    async def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _PendingAnswer:
    """The answer that a ticket waits for, and the launches that its input took part in."""

    answer: "asyncio.Future[Answer]"
    admitted_s: float
    since_s: float  # when its last step ended; at first, when it was admitted
    span: Span | None  # of its request, if that is traced
    passed_ramp: bool = False  # it passed an open ramp, so its answer may differ from the full network's
    steps: list[Step] = field(default_factory=list)

    def add_step(self, launch: Launch, started_s: float, computed_s: float, now_s: float, passes_ramp: bool) -> None:
        """The input took part in a launch. If its state was lost, it began again at block 0."""
        self.passed_ramp = passes_ramp or (self.passed_ramp and launch.cursor > 0)
        waited_ms, computed_ms = round(1e3 * (started_s - self.since_s), 3), round(1e3 * computed_s, 3)
        self.steps.append(Step(launch.cursor, waited_ms, computed_ms, len(launch.tickets)))
        self.since_s = now_s


class Driver:
    """Must be used from one event loop, with a monotonic clock."""

    def __init__(
        self, dispatcher: Dispatcher, workers: Workers, clock: Callable[[], float], counts: Counts | None = None
    ) -> None:
        self.dispatcher = dispatcher
        self.counts = counts or Counts()
        self.lag = FadingPeak()  # the time from a known answer until its request continues: delays of the event loop
        self.proxies = WatchedProxies()
        self.observe_latency_ms: Callable[[float], None] = lambda latency_ms: None  # of each answered request
        self._workers = workers
        self._clock = clock
        self._traced = False  # whether any request was traced
        self._requests = 0  # requests that wait for their answers
        self._numbers = count(secrets.randbelow(MOST_NUMBERS))  # other fronts have other numbers
        self._drained: asyncio.Future[None] | None = None  # done when no request waits any more
        self._launch_tasks: set[asyncio.Task[None]] = set()
        self._pumping = False  # whether `_pump` runs in this turn of the event loop
        self._alarm: asyncio.TimerHandle | None = None
        self._wake_s = inf  # when the alarm goes off

    async def answer(
        self, inputs: Packed, within_s: float, full: bool = False, waits: bool = True, priority: int = 0, best: int = 0
    ) -> list[Answer]:
        """The answers to all inputs of one request, in their order. All are admitted, or none.

        `full`: answers of the full network. `waits`: the client waits for as long as the SLO. `best`: how many of the
        highest scores matter (0: all), if the policy supports this.
        """
        if best:
            inputs = wanting_best(inputs, next(self._numbers) % MOST_NUMBERS, best)
        tickets = self._admit(inputs, self._clock() + within_s, full, waits)
        if best:  # the other scores may be far from the full network's, so they are not audited
            for ticket in tickets:
                ticket.kind = RowKind.PLAIN
        if priority:
            for ticket in tickets:
                ticket.priority = priority
        replies: list[_PendingAnswer] = [ticket.reply for ticket in tickets]
        self._requests += 1
        self.pump()
        try:
            answers = (
                [await replies[0].answer]
                if len(replies) == 1
                else await asyncio.gather(*[reply.answer for reply in replies])
            )
            now_s = self._clock()
            self.lag.add(now_s, now_s - max(reply.since_s for reply in replies))
            return answers
        except (RefusedError, asyncio.CancelledError) as ended:
            if not isinstance(ended, RefusedError) or ended.status == 500:
                self._excuse(tickets)
            raise
        finally:
            # If the client has gone or one input failed, the other answers are neither needed nor counted.
            for ticket, reply in zip(tickets, replies, strict=True):
                reply.answer.cancel()
                self.dispatcher.abandon(ticket)
            self._requests -= 1
            if self._drained and not self._requests and not self._drained.done():
                self._drained.set_result(None)

    def _excuse(self, tickets: Sequence[Ticket]) -> None:
        """Count the inputs of a request that failed, or whose client left, unless they are answered or late."""
        now_s = self._clock()
        for ticket in tickets:
            answer: asyncio.Future[Answer] = ticket.reply.answer
            is_answered = answer.done() and not answer.cancelled() and answer.exception() is None
            if not (is_answered or ticket.is_late(now_s)):
                self.counts.input_excused(ticket.weight)

    def counted(self) -> Counts:
        """The counts, including the requests that proxies have refused."""
        if refused := self.proxies.new_refusals():
            self.counts.refused_outside(refused)
        return self.counts

    def benched(self) -> list[str]:
        """The replicas that are too slow for plans to count on."""
        return self.dispatcher.benched(self._clock())

    def pump(self) -> None:
        """Pump once per turn of the event loop, so that inputs that arrive together are sent together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send the launches that are due, report inputs that have ended, and set the alarm for the next deadline."""
        self._pumping = False
        now_s = self._clock()
        for launch in self.dispatcher.tick(now_s):
            if inputs := len(launch.tickets) - launch.shadows:
                weight = launch.weight - launch.shadow_weight
                self.counts.launch_began(launch.group, launch.cursor, inputs, weight, launch.room)
            task = asyncio.get_running_loop().create_task(self._run_launch(launch, now_s))
            self._launch_tasks.add(task)
            task.add_done_callback(self._launch_tasks.discard)
        for ending in self.dispatcher.endings():
            self._report(ending)
        self._set_alarm(now_s)

    async def close(self) -> None:
        """Returns when no request waits any more. Launches that still run are abandoned."""
        while self._requests:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        for ending in self.dispatcher.endings():
            self._report(ending)
        while self._launch_tasks:  # until then a turn of the event loop may begin others
            for task in self._launch_tasks:
                task.cancel()
            await asyncio.wait(self._launch_tasks)
        if self._alarm:
            self._alarm.cancel()
        await self._workers.close()

    def _admit(self, inputs: Packed, deadline_s: float, full: bool, waits: bool) -> list[Ticket]:
        now_s, weights = self._clock(), self.weights(inputs)
        self.counts.inputs_arrived(len(inputs), sum(weights), full)
        places = [Place(inputs, row) for row in range(len(inputs))]
        tickets = self.dispatcher.admit_all(now_s, deadline_s, places, weights, full)
        if isinstance(tickets, Refusal):
            if waits:
                self.counts.inputs_refused(len(inputs), sum(weights))
            refused = RefusedError(503, f"refused: {tickets.reason}", retry_after_s=tickets.retry_after_s)
            refused.shows_overload = not tickets.parked
            raise refused
        loop, span = asyncio.get_running_loop(), current()
        self._traced = self._traced or span is not None
        for ticket in tickets:
            ticket.reply = _PendingAnswer(loop.create_future(), now_s, now_s, span)
        return tickets

    def weights(self, inputs: Packed) -> Sequence[int]:
        """The weight of each input: its tokens where the plan counts them, else 1."""
        length = self.dispatcher.route.length
        if length is None or inputs.lengths is None:
            return (length or 1,) * len(inputs)
        tokens: list[int] = inputs.lengths.tolist()
        return tokens

    async def _run_launch(self, launch: Launch, started_s: float) -> None:
        """Run one launch, and report to the dispatcher: which inputs left, and that it completed or failed."""
        span = self._span(launch, started_s) if self._traced else None
        try:
            order = self._order(launch, started_s, span)
            async with self._time_limit(launch):
                async for reply in self._workers.run(launch.replica, order):
                    if isinstance(reply, Departed):
                        self._depart(launch, reply, started_s)
                    else:
                        self._complete(launch, reply, started_s)
        except Exception as error:
            self._fail(launch, error)
            if span:
                span.failed(error)
        if span:
            span.end()
        self.pump()

    def _span(self, launch: Launch, started_s: float) -> Span | None:
        """The span of a launch with traced inputs: it belongs to the request of one, and has links to the others.

        The wait of each of these inputs in the queue gets a span, too.
        """
        spans = dict[Span, None]()  # of requests, each once
        for ticket in launch.tickets:
            reply: _PendingAnswer = ticket.reply
            if reply.span and not ticket.ended:
                about = {"block": launch.cursor}
                reply.span.tracing.span("queue", reply.span, begun_s=reply.since_s, about=about).end(started_s)
                spans[reply.span] = None
        if not spans:
            return None
        first, *others = spans
        about = {"block": launch.cursor, "stop": launch.stop, "inputs": len(launch.tickets)}
        return first.tracing.span("launch", first, "PRODUCER", started_s, others, about | {"group": launch.group})

    def _fail(self, launch: Launch, error: Exception) -> None:
        """Report a failed launch. If it hung, the holder of its survivors may hang, so they count as lost, too."""
        hung = isinstance(error, TimeoutError) and any(isinstance(place.payload, Claim) for place in launch.places)
        fault, reason = Fault.NETWORK, f"{type(error).__name__}: {error}"
        if isinstance(error, LaunchError):
            reason = str(error)  # it begins with the type of the replica's error
        elif isinstance(error, LostError):
            fault = Fault.STATE
        elif isinstance(error, ConnectionError | TimeoutError):
            fault = Fault.REPLICA
        log.warning("a launch of %d inputs failed on replica %s: %s", len(launch.tickets), launch.replica, reason)
        self.dispatcher.failed(launch.id, self._clock(), reason, fault, lost=hung)

    @asynccontextmanager
    async def _time_limit(self, launch: Launch) -> AsyncIterator[None]:
        """Cancel a launch that takes far too long. It then counts as failed, and its replica is checked.

        If this process itself was blocked, replies that arrived meanwhile are read first.
        """
        limit_s, loop = launch.timeout_s, asyncio.get_running_loop()
        if not isfinite(limit_s):
            yield
            return
        try:
            async with asyncio.timeout(None) as limit:
                due_s = loop.time() + limit_s
                alarm = loop.call_at(due_s, lambda: limit.reschedule(loop.time() + max(READ_S, loop.time() - due_s)))
                try:
                    yield
                finally:
                    alarm.cancel()
        except TimeoutError:
            self._workers.suspect(launch.replica)
            raise

    def _order(self, launch: Launch, now_s: float, span: Span | None) -> Order:
        left_s = max((ticket.deadline_s - now_s for ticket in launch.tickets if not ticket.ended), default=0.0)
        if launch.kinds:
            left_s = max(left_s, OLDEST_S)
        hold_s, parts = left_s + GRACE_S, parts_of(launch.places)
        trace = span.traceparent if span else ""
        return Order(launch.stop, launch.ramps, parts, launch.keep, hold_s=hold_s, kinds=launch.kinds, trace=trace)

    def _depart(self, launch: Launch, departed: Departed, started_s: float) -> None:
        """Answer the inputs that left."""
        exits, now_s, passes_ramp = departed.exits, self._clock(), _passes_ramp(launch)
        self.counts.end_windows(self.dispatcher.route)
        rows, blocks, answers = exits.rows.tolist(), exits.blocks.tolist(), exits.answers()
        edges = self.dispatcher.route.edges
        for row, (label, score), block, logits in zip(rows, answers, blocks, exits.logits_by_input, strict=True):
            ticket = launch.tickets[row]
            reply: _PendingAnswer = ticket.reply
            if reply.answer.done():
                continue
            level = bisect_right(edges, block) if edges else None  # of a cascade
            reply.add_step(launch, started_s, departed.computed_s, now_s, passes_ramp)
            took_s, in_time, full = now_s - reply.admitted_s, not ticket.is_late(now_s), ticket.kind is RowKind.FULL
            self.counts.input_left(block, took_s, in_time, ticket.weight, full, reply.passed_ramp)
            reply.answer.set_result(Answer(label, score, block, tuple(reply.steps), level=level, logits=logits))
        labels = exits.comparable if launch.kinds else ()
        self.dispatcher.released(launch.id, now_s, rows, blocks, labels)
        for audit in self.dispatcher.audits() if launch.kinds else ():
            self.counts.audit_ended(audit.block, audit.agrees)

    def _complete(self, launch: Launch, stayed: Stayed, started_s: float) -> None:
        """The launch ended; its survivors wait for the next one."""
        now_s, rows, passes_ramp = self._clock(), stayed.rows.tolist(), _passes_ramp(launch)
        for row in rows:
            ticket = launch.tickets[row]
            if not ticket.ended:
                ticket.reply.add_step(launch, started_s, stayed.computed_s, now_s, passes_ramp)
        if stayed.survivors is not None:
            self._claim(stayed.survivors)
        places = {row: Place(stayed.survivors, index) for index, row in enumerate(rows)}
        followed_s = self.dispatcher.completed(launch.id, now_s, places, stayed.stop)
        shape = launch.cursor, launch.stop, launch.size
        self.counts.launch_ended(launch.replica, *shape, stayed.computed_s, followed_s)

    def _claim(self, survivors: Packed | Claim) -> None:
        """Drop held survivors when the last ticket or launch that refers to them has ended."""
        held = isinstance(survivors, Claim)
        self.counts.survivor_bytes["held" if held else "by_value"] += survivors.size_bytes
        if isinstance(survivors, Claim):
            weakref.finalize(survivors, self._workers.drop, survivors.address, survivors.key).atexit = False

    def _report(self, ending: Ending) -> None:
        for block, weight in ending.unfinished:
            self.counts.input_unfinished(block, weight)
        for ticket in ending.tickets:
            reply: _PendingAnswer = ticket.reply
            if reply.answer.done():
                continue
            match ending.outcome:
                case Outcome.EXPIRED:
                    reply.answer.set_exception(RefusedError(504, "the deadline passed before the answer was known"))
                case Outcome.FAILED:
                    reply.answer.set_exception(RefusedError(500, _failure(ending)))
                case _:
                    reply.answer.cancel()

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


def _failure(ending: Ending) -> str:
    if ending.fault is Fault.NETWORK:
        return f"the network failed: {ending.reason.partition(':')[0]}; the replica's log says where"
    return f"given up, since several replicas were lost while they ran this input; the last error: {ending.reason}"


def parts_of(places: Sequence[Place]) -> tuple[Packed | Share, ...]:
    """The parts of an order. Neighbouring rows of the same batch are one part."""
    parts = list[Packed | Share]()
    for _, run in groupby(places, key=lambda place: id(place.payload)):
        (source, *_), rows = zip(*run, strict=True)
        if isinstance(source, Claim):
            parts.append(Share(source, np.array(rows)))
        else:
            parts.append(source if len(source) == 1 else take(source, np.array(rows)))
    return tuple(parts)
