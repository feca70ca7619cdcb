"""The event loop runs the product's own dispatcher in virtual time, over devices that return the times of launches.

The loop decides nothing: as in service, the dispatcher (`deployments/dispatch/dispatcher.py`) decides which inputs are
admitted, batched, merged, retried or dropped. The time of a launch comes either from a latency table
(`cluster/simulator/table_devices.py`) or from a real launch (`cluster/bench/real_device.py`). The loop is fast because
its events are batches, not inputs.

No table has the costs of serving beside the devices, the fronts' work and travel time:
`experiments/fidelity/calibration.py` measures them where the live graph runs.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Ending, Launch, Outcome, Place, Refusal


class HostCosts(BaseModel):
    """Seconds of the front's work and of travel, for each request and launch; by default everything is free.

    Half of a request's work is done before it is admitted, half when its answer is known; half of a launch's before it
    leaves for its replica, half when it is back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    request_s: float = Field(0.0, ge=0, description="a front's work for a request")
    launch_s: float = Field(0.0, ge=0, description="a front's work for a launch")
    request_way_s: float = Field(0.0, ge=0, description="of a request, there and back, while no front works for it")
    launch_way_s: float = Field(0.0, ge=0, description="of a launch, to its replica and back")
    turn_s: float = Field(0.0, ge=0, description="of a device for every launch, beside what its table says")


class FrontWorkers:
    """A number of workers with one queue, served in the order in which work comes."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def done_s(self, now_s: float, seconds: float) -> float:
        """The time at which work that comes now is done.

        >>> one = FrontWorkers(1)
        >>> one.done_s(1.0, 0.5), one.done_s(1.2, 0.5), one.done_s(9.0, 0.5)
        (1.5, 2.0, 9.5)
        """
        done_s = max(now_s, self._free_s[0]) + seconds
        heapq.heapreplace(self._free_s, done_s)
        return done_s


Arriving = tuple[float, Place, int, bool]  # arrival time in s, place of its state, weight, asks for the whole network


class Departure(NamedTuple):
    """Rows of a launch that are answered after block `stop - 1`; `answers` are empty where only times matter."""

    at_s: float
    stop: int
    rows: Sequence[int]
    answers: Sequence[Any] = ()

    def only(self, rows: Sequence[int]) -> "Departure":
        answers = dict(zip(self.rows, self.answers, strict=True)) if self.answers else {}
        return self._replace(rows=rows, answers=[answers[row] for row in rows] if answers else ())


class LaunchSchedule(NamedTuple):
    """The course of a launch: its times, its departures and its survivors."""

    starts_s: float
    ends_s: float
    early: Sequence[Departure]  # before the end
    last: Departure | None  # at the end
    survivors: Mapping[int, Place]
    stop: int | None = None  # the next block of survivors, if the launch ended early


class Devices(Protocol):
    def begin(self, launch: Launch, now_s: float) -> LaunchSchedule:
        """Begin a launch that reaches its replica now, and return its course."""

    def kind(self, group: str) -> str:
        """The kind of device of a group's replicas."""


class Listener(Protocol):
    """Receives every event of the run, to count it."""

    def refuse(self, at_s: float, weight: int) -> None: ...

    def lose(self, ending: Ending, at_s: float) -> None:
        """Admitted inputs have ended without an answer of the network."""

    def launch(self, launch: Launch, kind: str, took_s: float) -> None: ...

    def audit(self, block: int, agrees: bool) -> None: ...

    def answer(self, now_s: float, launch: Launch, departure: Departure, ends_s: Sequence[float] | None) -> None:
        """Rows have left; `ends_s`: when each row's answer reaches its client, if later than now."""


class EventLoop:
    """Runs events in order of time, with a dispatcher, devices and a listener."""

    def __init__(
        self, dispatcher: Dispatcher, devices: Devices, tally: Listener, slo_s: float, host: HostCosts | None = None,
        fronts: int = 1,
    ) -> None:  # fmt: skip
        self.dispatcher, self.now_s = dispatcher, 0.0
        self._devices, self._tally, self._slo_s = devices, tally, slo_s
        self._host = host or HostCosts()
        self._fronts = FrontWorkers(fronts) if host else None
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action, arguments))

    def arrive(self, arrivals: Iterable[Arriving]) -> None:
        """Let inputs arrive at ascending times, and run all events up to the last arrival."""
        if self._fronts:
            for at_s, place, weight, full in arrivals:  # each is admitted once a front has done its work for it
                self.run_until(at_s)
                self.now_s = at_s
                self._work(self._host.request_s / 2, self._admit, place, weight, full)
            return
        events, dispatcher, slo_s = self._events, self.dispatcher, self._slo_s
        admit, tick = dispatcher.admit, dispatcher.tick
        for at_s, place, weight, full in arrivals:
            if (events and events[0][0] <= at_s) or dispatcher.wake_s < at_s:
                self.run_until(at_s)
            if isinstance(admit(at_s, at_s + slo_s, place, weight, full), Refusal):
                self._tally.refuse(at_s, weight)
            for launch in tick(at_s):
                self._begin(launch, at_s)

    def run_until(self, end_s: float) -> None:
        """Run events up to this time, and notice the deadlines that pass between them."""
        events, dispatcher = self._events, self.dispatcher
        while True:
            event_s = events[0][0] if events else inf
            if dispatcher.wake_s < event_s and dispatcher.wake_s < end_s:
                self.now_s = max(dispatcher.wake_s, self.now_s)
            elif event_s <= end_s and events:
                self.now_s, _, action, arguments = heapq.heappop(events)
                action(*arguments)
            else:
                return
            self.tick(self.now_s)

    def tick(self, now_s: float) -> None:
        """Begin the launches of the dispatcher, and count the inputs that it dropped."""
        for launch in self.dispatcher.tick(now_s):
            self._begin(launch, now_s)
        for ending in self.dispatcher.endings():
            if ending.outcome is not Outcome.ANSWERED:
                self._tally.lose(ending, now_s)

    def _admit(self, place: Place, weight: int, full: bool) -> None:
        if isinstance(self.dispatcher.admit(self.now_s, self.now_s + self._slo_s, place, weight, full), Refusal):
            self._tally.refuse(self.now_s, weight)

    def _work(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        """Do this action once a front has worked for these seconds."""
        assert self._fronts
        self.at(self._fronts.done_s(self.now_s, seconds), action, *arguments)

    def _hear(self, at_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Do this action for a replica's message, once it has travelled to a front and the front has worked for it."""
        if self._fronts:
            self.at(at_s + self._host.launch_way_s / 2, self._work, self._host.launch_s / 2, action, *arguments)
        else:
            self.at(at_s, action, *arguments)

    def _begin(self, launch: Launch, now_s: float) -> None:
        if self._fronts:
            now_s = self._fronts.done_s(now_s, self._host.launch_s / 2) + self._host.launch_way_s / 2
        course = self._devices.begin(launch, now_s)
        self._tally.launch(launch, self._devices.kind(launch.group), course.ends_s - course.starts_s)
        for departure in course.early:
            self._hear(departure.at_s, self._answer, launch, departure)
        self._hear(course.ends_s, self._complete, launch, course)

    def _complete(self, launch: Launch, course: LaunchSchedule) -> None:
        if course.last:
            self._answer(launch, course.last)
        self.dispatcher.completed(launch.id, self.now_s, course.survivors, course.stop)

    def _answer(self, launch: Launch, departure: Departure) -> None:
        """Report departed rows to the dispatcher, and count those that had no answer before."""
        now_s, ends_s, blocks = self.now_s, None, [departure.stop - 1] * len(departure.rows)
        fresh = self.dispatcher.released(launch.id, now_s, departure.rows, blocks, departure.answers)
        if len(fresh) < len(departure.rows):
            departure = departure.only(fresh)
        for audit in self.dispatcher.audits() if launch.kinds else ():
            self._tally.audit(audit.block, audit.agrees)
        if self._fronts:
            work_s, way_s = self._host.request_s / 2, self._host.request_way_s
            ends_s = [self._fronts.done_s(now_s, work_s) + way_s for _ in departure.rows]
        self._tally.answer(now_s, launch, departure, ends_s)
