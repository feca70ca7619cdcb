"""One simulated run: the event loop over latency tables, links and exit profiles, with a plan that may change."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from isobatch.cluster.load.workloads import Floats, Ints
from isobatch.cluster.simulator.event_loop import EventLoop, HostCosts
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.table_devices import TableDevices, group_names
from isobatch.cluster.simulator.tally import Tally
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits, Place
from isobatch.deployments.dispatch.route import Route, route_of
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError

# Arrival times in seconds, the block after which each input is sure, and, for texts of different lengths, their tokens.
Chunk = tuple[Floats, Ints] | tuple[Floats, Ints, Ints]
Chunks = Iterable[Chunk]
CHUNK = 1 << 16  # inputs that are generated at once, so that memory stays small
NO_INPUTS = np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)
# Random streams of one seed, each with its own number: a change of one stream leaves the others as they are.
JITTER_SEED = 1
LENGTHS_SEED = 3
AUDITS_SEED = 4
FULL_SEED = 5  # of the inputs that ask for the whole network


@dataclass(frozen=True)
class World:
    """Everything that a run depends on, except its inputs and its seed."""

    plan: Plan
    facts: Problem
    slo_s: float
    limits: Limits = field(default_factory=Limits)
    jitter: float = 0.0  # standard deviation of the logarithm of a launch's time
    host: HostCosts | None = None  # None: serving costs nothing beside the devices, and links take their latency
    fronts: int = 1  # how many fronts share the host's work; they all use one dispatcher
    full_share: float = 0.0  # the share of inputs that ask for the whole network (`X-Full`)
    share: float = 1.0  # of a cell: its share of the fleet and of the fleet's inputs

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < inf:
            raise UserError(f"jitter = {self.jitter} must be 0 or more and finite")
        object.__setattr__(self, "facts", self.facts.for_plan(self.plan))

    @cached_property
    def route(self) -> Route:
        """The plan's stages, which all runs in this world share, also in other processes."""
        return self.route_of(self.plan)

    def route_of(self, plan: Plan) -> Route:
        running = self.facts.without_exits if self.limits.answers_early else self.facts
        return route_of(plan, running, group_names(plan, running))


def simulate(
    world: World, inputs: Chunks, seconds: float, seed: int = 0, progress: Callable[[float], None] = lambda at_s: None
) -> Report:
    """Run until every input has ended; `progress` is called with the simulated time now and then."""
    simulation = Simulation(world, inputs, seconds, seed)
    for step in range(1, 201):
        simulation.run_until(seconds * step / 200)
        progress(simulation.now_s)
    return simulation.finish()


class Simulation:
    """One run up to its present time. It holds only the inputs inside the dispatcher, so that memory stays small.

    A controller, or a test, calls `run_until`, `observe` and `follow` in turn.
    """

    def __init__(
        self,
        world: World,
        inputs: Chunks,
        seconds: float,
        seed: int = 0,
        devices: Callable[..., TableDevices] = TableDevices,
        dispatcher: Callable[..., Dispatcher] = Dispatcher,
    ) -> None:
        self.world, self.plan = world, world.plan
        self.tally = Tally(seconds, world.slo_s, world.facts.num_blocks)
        random = np.random.default_rng([seed, JITTER_SEED])
        self._devices = devices(world.plan, world.facts, world.jitter, random, world.host)
        chance = np.random.default_rng([seed, AUDITS_SEED]).random
        dispatching = dispatcher(world.route, self._devices.groups(), world.limits, chance)
        self._loop = EventLoop(dispatching, self._devices, self.tally, world.slo_s, world.host, world.fronts)
        self._chunks, self._lengths = _chunks(inputs), np.random.default_rng([seed, LENGTHS_SEED])
        self._full = np.random.default_rng([seed, FULL_SEED])
        self._times_s, self._needs, self._weights = NO_INPUTS

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    def run_until(self, time_s: float) -> None:
        """Let inputs arrive and events happen up to this time."""
        while len(self._times_s) or self._next_chunk():
            first_later = int(np.searchsorted(self._times_s, time_s))
            self._arrive(first_later)
            self._times_s, self._needs = self._times_s[first_later:], self._needs[first_later:]
            self._weights = self._weights[first_later:]
            if len(self._times_s):
                break
        self._loop.run_until(time_s)
        if time_s < inf:
            self._loop.now_s = time_s

    def finish(self) -> Report:
        self.run_until(inf)
        self.tally.flush()
        return Report(self.tally, self.plan, self.world.facts)

    def follow(self, plan: Plan) -> None:
        if _launching(plan) != _launching(self.plan):
            self.tally.start_launches(self.now_s)
        self.plan = plan
        self._devices.follow(plan, self._loop.dispatcher.benched(self.now_s))
        self._loop.dispatcher.reroute(self.world.route_of(plan), self._devices.groups())
        self._loop.tick(self.now_s)

    @property
    def parked(self) -> bool:
        return self._loop.dispatcher.parked

    def park(self, wakes_in_s: float) -> None:
        """End all replicas until `follow`. `wakes_in_s`: the expected time from the next input until they run."""
        self._loop.dispatcher.reroute(
            self.world.route_of(self.plan), dict.fromkeys(self._devices.groups(), ()), wakes_in_s
        )

    def observe(self) -> Observed:
        """The observations since the last call, or since the start."""
        kinds = {device.kind: device.count for device in self.world.facts.devices}
        for replica in self._loop.dispatcher.benched(self.now_s):
            kinds[replica.rpartition("/")[0]] -= 1
        return replace(self.tally.observed(self.now_s, kinds), holds_inputs=self._loop.dispatcher.inside > 0)

    def _next_chunk(self) -> bool:
        """Take the next chunk of inputs; returns whether there was one."""
        self._times_s, sure_after, *tokens = next(self._chunks, NO_INPUTS)
        self._needs, count = sure_after + 1, len(sure_after)
        length, lengths = self.world.facts.length, self.world.facts.lengths
        if length and tokens:
            self._weights = tokens[0]
        elif length and lengths:
            self._weights = lengths.drawn(count, self._lengths)
        else:
            self._weights = np.full(count, length or 1)
        return count > 0

    def _arrive(self, count: int) -> None:
        """Let inputs arrive. An input's place holds its arrival time, and as `row` the number of blocks it needs."""
        times_s, weights = self._times_s[:count], self._weights[:count]
        full = self._full.random(count) < self.world.full_share
        self.tally.arrive(times_s, int(weights.sum()), int(full.sum()), int(weights[full].sum()))
        arrivals, needs = times_s.tolist(), self._needs[:count].tolist()
        self._loop.arrive(zip(arrivals, map(Place, arrivals, needs), weights.tolist(), full.tolist(), strict=True))


def _launching(plan: Plan) -> list[tuple[object, ...]]:
    """The placements of a plan without ramps. If those of two plans are equal, their launches are counted together."""
    return [
        (each.kind, each.replicas, [replace(split, ramps=()) for split in each.splits]) for each in plan.all_placements
    ]


def _chunks(inputs: Chunks) -> Iterator[tuple[Any, ...]]:
    for arrays in inputs:
        for start in range(0, len(arrays[0]), CHUNK):
            yield tuple(array[start : start + CHUNK] for array in arrays)
