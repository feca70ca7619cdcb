"""A day in seconds: the product's own dispatcher in virtual time, over latency tables, links and exit profiles.

Nothing is decided here. Inputs arrive, launches take what the tables say, inputs leave where they are sure; what is
admitted, batched, merged, retried, benched or dropped is decided by `deployments.dispatcher.Dispatcher`, as in service.
Events are batches, not inputs: that is what makes it fast.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

import numpy as np

from deployments.dispatch.messages import Launch, Limits, Outcome, Refusal
from deployments.dispatch.pools import Place
from deployments.dispatcher import Dispatcher
from deployments.planned import route_of
from experiments.devices import Devices, Flight, Outage, Troubles
from experiments.tally import Fill, Report, Tally
from experiments.workloads import Floats, Ints
from optimizer.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.problem import Problem

# Arrivals in seconds, and after which block each is sure. A long run comes in many chunks.
Inputs = Iterable[tuple[Floats, Ints]]
CHUNK = 1 << 16
SELF = 1  # a stream of random numbers of its own: inputs may be drawn from the same seed


@dataclass(frozen=True)
class World:
    """All that a run depends on but its inputs and its seed."""

    plan: Plan
    facts: Problem
    slo_s: float
    limits: Limits = field(default_factory=Limits)
    troubles: Troubles = field(default_factory=Troubles)
    front_s: float = 0.0  # what the front door adds to every answer, there and back


def simulate(
    world: World, inputs: Inputs, seconds: float, seed: int = 0, progress: Callable[[float], None] = lambda at_s: None
) -> Report:
    """Run until every input has ended; `progress` hears of the simulated time now and then.

    Where a plan has pipelines side by side, each takes inputs at random, in proportion to what it sustains.
    """
    tally, random = Tally(seconds, world.slo_s), np.random.default_rng([seed, SELF])
    lanes = [Simulator(replace(world, plan=lane), tally, random) for lane in world.plan.lanes]
    paces = [evaluate(lane, world.facts).goodput_per_s for lane in world.plan.lanes]
    for times_s, sure_after in _chunks(inputs):
        taken = random.choice(len(lanes), len(times_s), p=np.divide(paces, sum(paces))) if len(lanes) > 1 else 0
        for number, lane in enumerate(lanes):
            mine = np.broadcast_to(taken == number, times_s.shape)
            lane.feed(times_s[mine], sure_after[mine])
        progress(float(times_s[-1]))
    for lane in lanes:
        lane.finish()
    tally.flush()
    price = evaluate(world.plan, world.facts).cost_per_hour
    return Report(tally, tuple(lane.fills for lane in lanes), price)


def _chunks(inputs: Inputs) -> Inputs:
    for times_s, sure_after in inputs:
        for start in range(0, len(times_s), CHUNK):
            yield times_s[start : start + CHUNK], sure_after[start : start + CHUNK]


class Simulator:
    """One pipeline's run. What it holds at any time is what is inside the dispatcher."""

    def __init__(self, world: World, tally: Tally, random: np.random.Generator) -> None:
        self.world, self.tally = world, tally
        self.devices = Devices(world.plan, world.facts, world.troubles, random)
        route = route_of(world.plan, world.facts, list(self.devices.groups))
        self.dispatcher = Dispatcher(route, self.devices.groups, world.limits)
        self.now_s = 0.0
        self.fills = {split.start: Fill(split.batch_size) for split in world.plan.splits}
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

    def feed(self, times_s: Floats, sure_after: Ints) -> None:
        """Let these inputs arrive, later than all before."""
        self.tally.arrive(times_s)
        events, dispatcher, slo_s = self._events, self.dispatcher, self.world.slo_s
        for at_s, depth in zip(times_s.tolist(), (sure_after + 1).tolist(), strict=True):
            if (events and events[0][0] <= at_s) or (dispatcher.wake_s() or at_s) < at_s:
                self._until(at_s)
            # An input is where it arrived, and as many rows deep as the blocks that it needs.
            if isinstance(dispatcher.admit(at_s, at_s + slo_s, Place(at_s, depth)), Refusal):
                self.tally.refused[self.tally.window(at_s)] += 1
            for launch in dispatcher.tick(at_s):
                self._begin(launch, at_s)

    def finish(self) -> None:
        """Until everything admitted has ended."""
        self._until(inf)

    def _until(self, end_s: float) -> None:
        """Let happen what happens up to then: events, and deadlines that pass between them."""
        while True:
            event_s = self._events[0][0] if self._events else inf
            wake_s = self.dispatcher.wake_s()
            if wake_s is not None and wake_s < min(event_s, end_s):
                self._tick(max(wake_s, self.now_s))
            elif event_s <= end_s and self._events:
                self.now_s, _, action, arguments = heapq.heappop(self._events)
                action(*arguments)
                self._tick(self.now_s)
            else:
                return

    def _tick(self, now_s: float) -> None:
        for launch in self.dispatcher.tick(now_s):
            self._begin(launch, now_s)
        for ending in self.dispatcher.endings():
            if ending.outcome is Outcome.EXPIRED:
                self.tally.expired[self.tally.window(now_s)] += len(ending.tickets)
            elif ending.outcome is Outcome.FAILED:
                self.tally.failed[self.tally.window(now_s)] += len(ending.tickets)

    def _begin(self, launch: Launch, now_s: float) -> None:
        flight = self.devices.begin(launch, now_s)
        self._flying[launch.id] = launch
        self.fills[launch.cursor].add(len(launch.places), flight.ends_s - flight.starts_s)
        if self.devices.fails():
            self.at(flight.ends_s, self._fail, launch)
            return
        for at_s, rows in flight.early:
            self.at(at_s, self._release, launch, rows)
        self.at(flight.ends_s, self._complete, launch, flight)

    def _release(self, launch: Launch, rows: Sequence[int]) -> None:
        if launch.id in self._flying:
            self.dispatcher.released(launch.id, rows)
            self._answer(launch, rows)

    def _complete(self, launch: Launch, flight: Flight) -> None:
        if self._flying.pop(launch.id, None):
            self.dispatcher.completed(launch.id, self.now_s, flight.survivors)
            self._answer(launch, flight.last)

    def _fail(self, launch: Launch, reason: str = "the simulated replica failed") -> None:
        if self._flying.pop(launch.id, None):
            self.dispatcher.failed(launch.id, self.now_s, reason)

    def _answer(self, launch: Launch, rows: Sequence[int]) -> None:
        since_s, places = self.now_s + self.world.front_s, launch.places
        self.tally.answer(self.now_s, [since_s - places[row].payload for row in rows])

    def _leave(self, outage: Outage) -> None:
        """The dispatcher learns that the replica has gone, and what it ran is lost."""
        self._absent.add(outage.replica)
        self._reroute()
        for launch in [each for each in self._flying.values() if each.replica == outage.replica]:
            self._fail(launch, "the simulated replica has gone")

    def _return(self, outage: Outage) -> None:
        self._absent.discard(outage.replica)
        self._reroute()

    def _reroute(self) -> None:
        here = {name: [each for each in all_ if each not in self._absent] for name, all_ in self.devices.groups.items()}
        self.dispatcher.reroute(self.dispatcher.route, here)
