"""Real launches, virtual queues: every batch is computed on the device, and time advances by what it took.

The dispatcher that serves decides what is launched. What it costs to get inputs to it and answers away is left out:
this measures a device under a load, not a front door. On the host a launch takes its own processor time, so that a busy
machine can be measured on.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from math import inf

import numpy as np
from numpy.typing import NDArray

from deployments.dispatch.messages import Launch, Limits, Refusal
from deployments.dispatch.pools import Place
from deployments.dispatch.route import Route, stops
from deployments.dispatcher import Dispatcher
from experiments.workloads import Floats
from profiles.measure import Stopwatch
from profiles.model import Batch, Exits, Launched, SplitModel

GROUP = DEVICE = "device"
ENOUGH = 0.99  # of the inputs must be answered in time


@dataclass(frozen=True)
class Source:
    """Inputs, encoded one by one before anything is timed; and what is right, where that is known."""

    inputs: Sequence[Batch]
    labels: NDArray[np.int64] | None = None


@dataclass
class Record:
    """What became of what was offered."""

    seconds: float
    slo_s: float
    offered: int = 0
    latencies_s: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    ended_s: float = 0.0  # when the last answer was given

    @property
    def in_time(self) -> int:
        return sum(latency <= self.slo_s for latency in self.latencies_s)

    @property
    def kept(self) -> bool:
        """Whether nearly all were answered in time."""
        return self.in_time >= ENOUGH * self.offered

    @property
    def goodput_per_s(self) -> float:
        """Answers in time, by the second until the last one: what comes for less long than the SLO may all be answered
        in time after it, by a device that could not go on like that."""
        return self.in_time / max(self.seconds, self.ended_s)

    def latency_ms(self, share: float) -> float | None:
        """Of what was answered; None where nothing was."""
        return 1e3 * float(np.quantile(self.latencies_s, share)) if self.latencies_s else None

    @property
    def accuracy(self) -> float | None:
        return float(np.mean(self.right)) if self.right else None


class Rehearsal:
    """One run of a route on one device."""

    def __init__(self, route: Route, model: SplitModel, stopwatch: Stopwatch, source: Source, slo_s: float) -> None:
        self._dispatcher = Dispatcher(route, {GROUP: [DEVICE]}, Limits(retries=0))
        self._model, self._stopwatch, self._source, self._slo_s = model, stopwatch, source, slo_s
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._admitted: dict[int, tuple[float, int]] = {}  # by ticket: when, and which input
        self._free_s = 0.0

    def run(self, due_s: Floats) -> Record:
        """Offer an input at each of these times, and go on until the last one has ended."""
        self._record = Record(float(due_s[-1]), self._slo_s, len(due_s))
        for number, due in enumerate(due_s.tolist()):
            self._until(due)
            row = number % len(self._source.inputs)
            ticket = self._dispatcher.admit(due, due + self._slo_s, Place(self._source.inputs[row], 0))
            if not isinstance(ticket, Refusal):
                self._admitted[ticket] = (due, row)
            self._tick(due)
        self._until(inf)
        return self._record

    def _until(self, end_s: float) -> None:
        """Let happen what happens up to then: launches that end, and deadlines that pass."""
        while True:
            event_s = self._events[0][0] if self._events else inf
            wake_s = self._dispatcher.wake_s()
            if wake_s is not None and wake_s < min(event_s, end_s):
                self._tick(wake_s)
            elif self._events and event_s <= end_s:
                _, _, action, arguments = heapq.heappop(self._events)
                action(event_s, *arguments)
                self._tick(event_s)
            else:
                return

    def _tick(self, now_s: float) -> None:
        for launch in self._dispatcher.tick(now_s):
            self._begin(launch, now_s)
        for ending in self._dispatcher.endings():
            for ticket in ending.tickets:
                self._admitted.pop(ticket, None)

    def _begin(self, launch: Launch, now_s: float) -> None:
        """Compute it now; it will have happened when the device has done what it had before."""
        at_s = max(now_s, self._free_s)
        rows, survivors = np.arange(len(launch.places)), None
        for launched, took_s in legs(self._model, launch, self._stopwatch):
            at_s += took_s
            self._at(at_s, self._release, launch, rows[launched.exits.rows], launched.exits)
            rows, survivors = np.delete(rows, launched.exits.rows), launched.survivors
        self._free_s = at_s
        self._at(at_s, self._complete, launch, rows, survivors)

    def _at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action, arguments))

    def _release(self, now_s: float, launch: Launch, rows: NDArray[np.int64], exits: Exits) -> None:
        for row, label, block in zip(rows.tolist(), exits.labels.tolist(), exits.blocks.tolist(), strict=True):
            if known := self._admitted.get(launch.tickets[row]):
                self._note(now_s - known[0], known[1], label, block)
                self._record.ended_s = now_s
        self._dispatcher.released(launch.id, rows.tolist())

    def _note(self, latency_s: float, source_row: int, label: int, block: int) -> None:
        self._record.latencies_s.append(latency_s)
        self._record.blocks.append(block)
        if self._source.labels is not None:
            self._record.right.append(label == int(self._source.labels[source_row]))

    def _complete(self, now_s: float, launch: Launch, rows: NDArray[np.int64], survivors: Batch | None) -> None:
        places = {row: Place(survivors, index) for index, row in enumerate(rows.tolist())}
        self._dispatcher.completed(launch.id, now_s, places)


def legs(model: SplitModel, launch: Launch, stopwatch: Stopwatch) -> Iterator[tuple[Launched, float]]:
    """From ramp to ramp, as a replica runs it (deployments/replicas/split.py)."""
    here: Batch | None = None
    for stop in stops(launch.cursor, launch.stop, launch.ramps):

        def leg(batch: Batch | None = here, stop: int = stop) -> Launched:
            return model.run(batch or _gathered(model, launch), stop, launch.ramps)

        launched, took_s = stopwatch(leg)
        yield launched, took_s
        if (here := launched.survivors) is None:
            return


def _gathered(model: SplitModel, launch: Launch) -> Batch:
    """Neighbours that come from one batch are taken from it together."""
    runs = [list(run) for _, run in groupby(launch.places, key=lambda place: id(place.payload))]
    return model.merge([_taken(model, run[0].payload, [place.row for place in run]) for run in runs])


def _taken(model: SplitModel, batch: Batch, rows: list[int]) -> Batch:
    return batch if rows == list(range(len(batch))) else model.select(batch, np.array(rows))
