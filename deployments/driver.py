"""Drive the dispatcher in real time: inputs come in, launches go out, answers come back. One event loop owns it all.

What runs a launch is behind `Workers`: replicas on Ray Serve, or threads of this process.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from typing import Protocol

import numpy as np

from deployments.dispatch.messages import Ending, Launch, Outcome, Refusal
from deployments.dispatch.pools import Place
from deployments.dispatcher import Dispatcher
from deployments.front.answers import Answer, RefusedError, Step
from deployments.front.counting import Counting
from deployments.front.tally import Tally
from deployments.replicas.holdings import Held, LostError, Share
from deployments.replicas.split import Departed, Order, Stayed
from deployments.replicas.wire import Packed, take

GRACE_S = 5.0  # how long survivors are held beyond their last deadline: a launch may be under way then


class Workers(Protocol):
    def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        """One launch on one replica. Whatever it raises makes the launch fail, and its inputs try again."""
        ...

    def suspect(self, replica: str) -> None:
        """A launch there takes far too long. Returns at once."""
        ...

    def drop(self, address: str, key: str) -> None:
        """What is held there under this key is not needed any more. Returns at once."""
        ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _Waiting:
    """Somebody who waits for the answer to one ticket."""

    reply: "asyncio.Future[Answer]"
    admitted_s: float
    since_s: float  # when it was admitted, or its last step ended
    deadline_s: float
    steps: list[Step] = field(default_factory=list)

    def step(self, block: int, started_s: float, computed_s: float, now_s: float) -> None:
        self.steps.append(Step(block, 1e3 * (started_s - self.since_s), 1e3 * computed_s))
        self.since_s = now_s


class Driver:
    """Must be used from one event loop, with a clock that only grows."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: Workers,
        clock: Callable[[], float],
        counting: Counting | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.tally = Tally()
        self.counting = counting or Counting({})
        self._workers = workers
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}
        self._flights: set[asyncio.Task[None]] = set()
        self._pumping = False  # it will be, in a moment
        self._alarm: asyncio.TimerHandle | None = None
        self._wake_s: float | None = None  # what the alarm is set to

    async def answer(self, inputs: Packed, within_s: float) -> list[Answer]:
        """The answers to all inputs of one request, in their order. All are admitted, or none."""
        tickets = self._admit(inputs, self._clock() + within_s)
        replies = [self._waiting[ticket].reply for ticket in tickets]
        self.pump()
        try:
            return [await replies[0]] if len(replies) == 1 else await asyncio.gather(*replies)
        finally:
            for ticket in tickets:  # the client went away, or one of the inputs failed: nobody waits for the others
                self.dispatcher.abandon(ticket)

    def pump(self) -> None:
        """Once for all that arrives in one turn of the event loop: the busier it is, the more goes out together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Launch what can be launched, tell who has ended, and see to it that deadlines are noticed."""
        self._pumping = False
        now_s = self._clock()
        for launch in self.dispatcher.tick(now_s):
            self.tally.launched(launch.group, launch.cursor, len(launch.tickets), launch.room)
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

    def _admit(self, inputs: Packed, deadline_s: float) -> list[int]:
        now_s = self._clock()
        self.counting.arrivals += len(inputs)
        tickets: list[int] = []
        loop = asyncio.get_running_loop()
        for row in range(len(inputs)):
            ticket = self.dispatcher.admit(now_s, deadline_s, Place(inputs, row))
            if isinstance(ticket, Refusal):
                for admitted in tickets:
                    self.dispatcher.abandon(admitted)
                raise RefusedError(503, f"refused: {ticket.reason}", retry_after_s=max(1, round(ticket.retry_after_s)))
            tickets.append(ticket)
            self._waiting[ticket] = _Waiting(loop.create_future(), now_s, now_s, deadline_s)
        return tickets

    async def _fly(self, launch: Launch, started_s: float) -> None:
        try:
            order = self._order(launch, started_s)
            async with self._patience(launch):
                async for reply in self._workers.run(launch.replica, order):
                    if isinstance(reply, Departed):
                        self._depart(launch, reply, started_s)
                    else:
                        self._stay(launch, reply, started_s)
        except Exception as error:
            self._fail(launch, error)
        self.pump()

    def _fail(self, launch: Launch, error: Exception) -> None:
        """Where a launch hung, its replica may have waited for a holder that hangs: what was held is not trusted."""
        found_out = isinstance(error, LostError)
        hung = isinstance(error, TimeoutError) and any(isinstance(place.payload, Held) for place in launch.places)
        reason = f"{type(error).__name__}: {error}"
        self.dispatcher.failed(launch.id, self._clock(), reason, lost=found_out or hung, blame=not found_out)

    @asynccontextmanager
    async def _patience(self, launch: Launch) -> AsyncIterator[None]:
        """A launch that hangs has failed, and whoever runs it should be looked after."""
        limit_s = self.dispatcher.patience_s(launch.id)
        try:
            async with asyncio.timeout(limit_s if isfinite(limit_s) else None):
                yield
        except TimeoutError:
            self._workers.suspect(launch.replica)
            raise

    def _order(self, launch: Launch, now_s: float) -> Order:
        waiting = [self._waiting[ticket] for ticket in launch.tickets if ticket in self._waiting]
        left_s = max((one.deadline_s - now_s for one in waiting), default=0.0)
        return Order(launch.stop, launch.ramps, parts_of(launch.places), launch.keep, hold_s=left_s + GRACE_S)

    def _depart(self, launch: Launch, departed: Departed, started_s: float) -> None:
        exits, now_s = departed.exits, self._clock()
        scores, rows = exits.probabilities.max(axis=1), exits.rows.tolist()
        told = zip(rows, exits.labels.tolist(), scores.tolist(), exits.blocks.tolist(), strict=True)
        for row, label, score, block in told:
            waiting = self._waiting.get(launch.tickets[row])
            if waiting and not waiting.reply.done():
                waiting.step(launch.cursor, started_s, departed.computed_s, now_s)
                self.counting.answered(block, now_s - waiting.admitted_s, now_s <= waiting.deadline_s)
                waiting.reply.set_result(Answer(label, score, block, tuple(waiting.steps)))
        self.dispatcher.released(launch.id, rows)

    def _stay(self, launch: Launch, stayed: Stayed, started_s: float) -> None:
        now_s, rows = self._clock(), stayed.rows.tolist()
        self.counting.launched(launch.replica, launch.cursor, launch.stop, len(launch.tickets), stayed.computed_s)
        for row in rows:
            if waiting := self._waiting.get(launch.tickets[row]):
                waiting.step(launch.cursor, started_s, stayed.computed_s, now_s)
        if stayed.survivors is not None:
            self._claim(stayed.survivors)
        places = {row: Place(stayed.survivors, index) for index, row in enumerate(rows)}
        self.dispatcher.completed(launch.id, now_s, places)

    def _claim(self, survivors: Packed | Held) -> None:
        """What is held for us is dropped when nobody can ask for it any more: no ticket, and no launch under way."""
        held = isinstance(survivors, Held)
        self.tally.survivor_bytes["held" if held else "by_value"] += survivors.size_bytes
        if isinstance(survivors, Held):
            weakref.finalize(survivors, self._workers.drop, survivors.address, survivors.key).atexit = False

    def _report(self, ending: Ending) -> None:
        for ticket in ending.tickets:
            waiting = self._waiting.pop(ticket)
            if waiting.reply.done():
                continue
            match ending.outcome:
                case Outcome.EXPIRED:
                    waiting.reply.set_exception(RefusedError(504, "the deadline passed before the answer was known"))
                case Outcome.FAILED:
                    waiting.reply.set_exception(RuntimeError(ending.reason))
                case _:
                    waiting.reply.cancel()

    def _set_alarm(self, now_s: float) -> None:
        wake_s = self.dispatcher.wake_s()
        if wake_s == self._wake_s:
            return
        if self._alarm:
            self._alarm.cancel()
        self._wake_s = wake_s
        delay_s = None if wake_s is None else max(0.0, wake_s - now_s)
        self._alarm = None if delay_s is None else asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._wake_s = None
        self._pump()


def parts_of(places: Sequence[Place]) -> tuple[Packed | Share, ...]:
    """Neighbours that come from one batch are taken from it together."""
    runs = [list(run) for _, run in groupby(places, key=lambda place: id(place.payload))]
    return tuple(_part(run[0].payload, [place.row for place in run]) for run in runs)


def _part(source: Packed | Held, rows: list[int]) -> Packed | Share:
    if isinstance(source, Held):
        return Share(source, np.array(rows))
    return source if len(source) == 1 else take(source, np.array(rows))
