"""A day in seconds: the product's own dispatcher in virtual time, over latency tables, links and exit profiles.

Nothing is decided here. Inputs arrive, launches take what the tables say, inputs leave where they are sure; what is
admitted, batched, merged, retried, benched or dropped is decided by `deployments.dispatcher.Dispatcher`, as in service.
Events are batches, not inputs: that is what makes it fast.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf

import numpy as np

from deployments.dispatch.messages import Launch, Limits, Outcome, Refusal
from deployments.dispatch.planned import route_of
from deployments.dispatch.pools import Place
from deployments.dispatch.route import Route
from deployments.dispatcher import Dispatcher
from deployments.front.observed import Observed
from experiments.devices import Departure, Devices, Flight, Outage, Troubles
from experiments.host import Fronts, Host
from experiments.tally import Report, Tally
from experiments.workloads import Floats, Ints
from optimizer.plan import Plan
from optimizer.problem import Problem

# Arrivals in seconds, and after which block each is sure. A long run comes in many chunks.
Inputs = Iterable[tuple[Floats, Ints]]
CHUNK = 1 << 16
NOBODY: tuple[Floats, Ints] = np.empty(0), np.empty(0, np.int64)
SELF = 1  # a stream of random numbers of its own: inputs may be drawn from the same seed


@dataclass(frozen=True)
class World:
    """All that a run depends on but its inputs and its seed."""

    plan: Plan
    facts: Problem
    slo_s: float
    limits: Limits = field(default_factory=Limits)
    troubles: Troubles = field(default_factory=Troubles)
    host: Host | None = None  # nothing is known: serving costs nothing beside the devices, links take their latency
    fronts: int = 1  # that share the host's work; all ask one dispatcher


def simulate(
    world: World, inputs: Inputs, seconds: float, seed: int = 0, progress: Callable[[float], None] = lambda at_s: None
) -> Report:
    """Run until every input has ended; `progress` hears of the simulated time now and then."""
    simulation = Simulation(world, inputs, seconds, seed)
    for step in range(1, 201):
        simulation.run_until(seconds * step / 200)
        progress(simulation.now_s)
    return simulation.finish()


class Simulation:
    """One run, as far as it has come. What it holds at any time is what is inside the dispatcher.

    Whoever wants to interfere runs it until some time, looks by `observe`, lets it `follow` another plan, and goes on.
    """

    def __init__(self, world: World, inputs: Inputs, seconds: float, seed: int = 0) -> None:
        self.world, self.plan, self.now_s = world, world.plan, 0.0
        self.tally = Tally(seconds, world.slo_s, world.facts.num_blocks)
        self.host = world.host or Host()
        self.fronts = Fronts(world.fronts) if world.host else None
        random = np.random.default_rng([seed, SELF])
        self.devices = Devices(world.plan, world.facts, world.troubles, random, world.host)
        self.dispatcher = Dispatcher(self._route(), self.devices.groups(), world.limits)
        self._coming = _chunks(inputs)
        self._times_s, self._needs = NOBODY
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._flying: dict[int, Launch] = {}
        self._absent: set[str] = set()
        for outage in world.troubles.outages:
            self.at(outage.from_s, self._leave, outage)
            self.at(outage.until_s, self._return, outage)

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Something else that shall happen."""
        heapq.heappush(self._events, (time_s, next(self._order), action, arguments))

    def run_until(self, time_s: float) -> None:
        """Let inputs arrive, and happen what happens, up to then."""
        while len(self._times_s) or self._next_chunk():
            first_later = int(np.searchsorted(self._times_s, time_s))
            self._arrive(self._times_s[:first_later], self._needs[:first_later])
            self._times_s, self._needs = self._times_s[first_later:], self._needs[first_later:]
            if len(self._times_s):
                break
        self._until(time_s)
        if time_s < inf:
            self.now_s = time_s

    def finish(self) -> Report:
        """Until everything admitted has ended."""
        self.run_until(inf)
        self.tally.flush()
        return Report(self.tally, self.plan, self.world.facts)

    def follow(self, plan: Plan, load_s: float = 0.0) -> None:
        """Another plan from now on. Replicas that run other splits than before take `load_s` until they can."""
        self.plan = plan
        self.devices.follow(plan, self.now_s, load_s)
        self._reroute()
        self._tick(self.now_s)

    def observe(self) -> Observed:
        """What happened since this was last asked, or since the start."""
        kinds = {device.kind: device.count for device in self.world.facts.devices}
        for replica in self._absent:
            kinds[replica.partition("/")[0]] -= 1
        return self.tally.observed(self.now_s, kinds)

    def _next_chunk(self) -> bool:
        """Whether more inputs come."""
        self._times_s, sure_after = next(self._coming, NOBODY)
        self._needs = sure_after + 1
        return len(self._times_s) > 0

    def _arrive(self, times_s: Floats, needs: Ints) -> None:
        """An input is where it arrived, and as many rows deep as the blocks that it needs."""
        self.tally.arrive(times_s)
        arrivals = times_s.tolist()
        places = zip(arrivals, map(Place, arrivals, needs.tolist()), strict=True)
        if self.fronts:
            return self._knock(places)
        events, dispatcher, slo_s = self._events, self.dispatcher, self.world.slo_s
        admit, tick = dispatcher.admit, dispatcher.tick
        for at_s, place in places:
            if (events and events[0][0] <= at_s) or dispatcher.alarm_s < at_s:
                self._until(at_s)
            if isinstance(admit(at_s, at_s + slo_s, place), Refusal):
                self.tally.refuse(at_s)
            for launch in tick(at_s):
                self._begin(launch, at_s)
        return None

    def _knock(self, places: Iterable[tuple[float, Place]]) -> None:
        """Nobody is admitted before a front has found the time."""
        for at_s, place in places:
            self._until(at_s)
            self.now_s = at_s
            self._work(self.host.request_s / 2, self._admit, place)

    def _admit(self, place: Place) -> None:
        if isinstance(self.dispatcher.admit(self.now_s, self.now_s + self.world.slo_s, place), Refusal):
            self.tally.refuse(self.now_s)

    def _work(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        """What a front does once it has worked for it so long."""
        assert self.fronts
        self.at(self.fronts.done_s(self.now_s, seconds), action, *arguments)

    def _hear(self, at_s: float, action: Callable[..., None], *arguments: object) -> None:
        """What a replica says at some time has its way to go, and makes work for a front."""
        if self.fronts:
            self.at(at_s + self.host.launch_way_s / 2, self._work, self.host.launch_s / 2, action, *arguments)
        else:
            self.at(at_s, action, *arguments)

    def _until(self, end_s: float) -> None:
        """Let happen what happens up to then: events, and deadlines that pass between them."""
        events, dispatcher = self._events, self.dispatcher
        while True:
            event_s = events[0][0] if events else inf
            if dispatcher.alarm_s < event_s and dispatcher.alarm_s < end_s:
                self.now_s = max(dispatcher.alarm_s, self.now_s)
            elif event_s <= end_s and events:
                self.now_s, _, action, arguments = heapq.heappop(events)
                action(*arguments)
            else:
                return
            self._tick(self.now_s)

    def _tick(self, now_s: float) -> None:
        for launch in self.dispatcher.tick(now_s):
            self._begin(launch, now_s)
        for ending in self.dispatcher.endings():
            if ending.outcome is not Outcome.ANSWERED:
                self.tally.lose(ending.outcome, now_s, len(ending.tickets))

    def _begin(self, launch: Launch, now_s: float) -> None:
        if self.fronts:
            now_s = self.fronts.done_s(now_s, self.host.launch_s / 2) + self.host.launch_way_s / 2
        flight = self.devices.begin(launch, now_s)
        self._flying[launch.id] = launch
        kind = self.devices.kind(launch.group)
        self.tally.launch(launch, kind, flight.ends_s - flight.starts_s)
        if self.devices.fails():
            self._hear(flight.ends_s, self._fail, launch)
            return
        for departure in flight.early:
            self._hear(departure.at_s, self._release, launch, departure)
        self._hear(flight.ends_s, self._complete, launch, flight)

    def _release(self, launch: Launch, departure: Departure) -> None:
        if launch.id in self._flying:
            self.dispatcher.released(launch.id, departure.rows)
            self._answer(launch, departure)

    def _complete(self, launch: Launch, flight: Flight) -> None:
        if self._flying.pop(launch.id, None):
            self.dispatcher.completed(launch.id, self.now_s, flight.survivors)
            if flight.last:
                self._answer(launch, flight.last)

    def _fail(self, launch: Launch, reason: str = "the simulated replica failed", lost: bool = False) -> None:
        if self._flying.pop(launch.id, None):
            self.dispatcher.failed(launch.id, self.now_s, reason, lost=lost)

    def _answer(self, launch: Launch, departure: Departure) -> None:
        places, rows, now_s = launch.places, departure.rows, self.now_s
        if self.fronts:
            work_s, way_s = self.host.request_s / 2, self.host.request_way_s
            latencies_s = [self.fronts.done_s(now_s, work_s) + way_s - places[row].payload for row in rows]
        else:
            latencies_s = [now_s - places[row].payload for row in rows]
        self.tally.answer(now_s, departure.stop - 1, latencies_s)

    def _leave(self, outage: Outage) -> None:
        """The dispatcher learns that the replica has gone, and what it ran is lost."""
        self._absent.add(outage.replica)
        self._reroute()
        for launch in [each for each in self._flying.values() if each.replica == outage.replica]:
            self._fail(launch, "the simulated replica has gone", lost=True)

    def _return(self, outage: Outage) -> None:
        self._absent.discard(outage.replica)
        self._reroute()

    def _reroute(self) -> None:
        self.dispatcher.reroute(self._route(), self.devices.groups(self._absent))

    def _route(self) -> Route:
        return route_of(self.plan, self.world.facts, list(self.devices.groups()))


def _chunks(inputs: Inputs) -> Iterator[tuple[Floats, Ints]]:
    for times_s, sure_after in inputs:
        for start in range(0, len(times_s), CHUNK):
            yield times_s[start : start + CHUNK], sure_after[start : start + CHUNK]
