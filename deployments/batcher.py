"""Gather the inputs of many requests into batches, compute them on one thread, and answer each input when it leaves.

A batch is whoever gathered while the one before was computed: a lone input starts at once, and under load batches fill
by themselves, without a timer. All state belongs to the event loop; the thread only computes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from deployments.answers import Answer, RefusedError
from deployments.split import run_through
from profiles.model import Batch, Exits, SplitModel

Clock = Callable[[], float]


@dataclass(eq=False)
class _Ticket:
    """One input that waits: row `row` of what its request brought."""

    source: Batch
    row: int
    reply: "asyncio.Future[Answer]"
    arrived_s: float


def label_names(model: SplitModel) -> tuple[str, ...]:
    """What the network calls its labels, if it says so; their numbers otherwise."""
    return tuple(getattr(model, "labels", None) or map(str, range(model.num_labels)))


class Batcher:
    """Must be used from one event loop."""

    def __init__(
        self, model: SplitModel, ramps: Collection[int], *, max_batch: int, max_waiting: int, clock: Clock
    ) -> None:
        self._model = model
        self._ramps = ramps
        self._names = label_names(model)
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: deque[_Ticket] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._computing: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def answer(self, encoded: Batch) -> list[Answer]:
        """The answers to all inputs of one request, in their order."""
        if self.waiting + len(encoded) > self._max_waiting:
            sentence = f"{self.waiting} inputs are waiting and {self._max_waiting} may: try again later"
            raise RefusedError(503, sentence, retry_after_s=1)
        loop, now = asyncio.get_running_loop(), self._clock()
        tickets = [_Ticket(encoded, row, loop.create_future(), now) for row in range(len(encoded))]
        self._waiting.extend(tickets)
        if self._computing is None:
            self._computing = asyncio.create_task(self._compute())
        # A client that goes away cancels its replies: they are skipped when the next batch forms.
        return await asyncio.gather(*(ticket.reply for ticket in tickets))

    async def _compute(self) -> None:
        """Launch batches until nobody waits."""
        loop = asyncio.get_running_loop()
        try:
            while tickets := self._take():
                error: Exception = RuntimeError("the network ended and some inputs had not left it. This is a bug.")
                try:
                    await loop.run_in_executor(self._thread, self._launch, loop, tickets)
                except Exception as raised:
                    error = raised
                _fail(tickets, error)
        finally:
            self._computing = None

    def _take(self) -> list[_Ticket]:
        tickets: list[_Ticket] = []
        while self._waiting and len(tickets) < self._max_batch:
            ticket = self._waiting.popleft()
            if not ticket.reply.done():
                tickets.append(ticket)
        return tickets

    def _launch(self, loop: asyncio.AbstractEventLoop, tickets: Sequence[_Ticket]) -> None:
        """On the thread: replies go back to the loop at each ramp."""
        started_s = self._clock()
        for exits in run_through(self._model, self._merged(tickets), self._ramps):
            loop.call_soon_threadsafe(self._deliver, tickets, exits, started_s, self._clock())

    def _merged(self, tickets: Sequence[_Ticket]) -> Batch:
        parts = []
        for _, group in groupby(tickets, key=lambda ticket: id(ticket.source)):
            members = list(group)
            parts.append(self._model.select(members[0].source, np.array([ticket.row for ticket in members])))
        return parts[0] if len(parts) == 1 else self._model.merge(parts)

    def _deliver(self, tickets: Sequence[_Ticket], exits: Exits, started_s: float, now_s: float) -> None:
        scores = exits.probabilities.max(axis=1)
        for row, label, score, block in zip(exits.rows, exits.labels, scores, exits.blocks, strict=True):
            ticket = tickets[row]
            if not ticket.reply.done():
                queued_ms, computed_ms = 1e3 * (started_s - ticket.arrived_s), 1e3 * (now_s - started_s)
                name = self._names[label]
                ticket.reply.set_result(Answer(int(label), name, float(score), int(block), queued_ms, computed_ms))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _fail(tickets: Sequence[_Ticket], error: Exception) -> None:
    """Whoever has no answer yet gets none."""
    for ticket in tickets:
        if not ticket.reply.done():
            ticket.reply.set_exception(error)
