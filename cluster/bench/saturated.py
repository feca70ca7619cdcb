"""Measures several launches at once on one device: how fast inputs get through when all wait from the start.

This runs in real time on threads: launches that overlap slow each other down, by how much only a clock can tell.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median
from threading import Condition, Thread

import numpy as np

from cluster.bench.compare import CONSTANT, Bench, alone, plans
from cluster.bench.real_device import GROUP, Source, parts
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.messages import Launch, Limits, Place
from deployments.dispatch.route import Route, route_of
from deployments.models.backends import for_threads
from optimizer import evaluate
from profiles.model import Launched, SplitModel

ROUNDS = 5  # whose median counts

Within = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class StreamGain:
    """Inputs per second that one plan gets through with `streams` launches at once, and with one at a time."""

    slo_ms: float  # for which the plan was made
    streams: int
    together_per_s: float
    one_per_s: float

    @property
    def gain(self) -> float:
        return self.together_per_s / self.one_per_s

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "gain": self.gain}


def compared(
    bench: Bench, slo_ms: float, streams: int, seconds: float, progress: Callable[[str], None] = lambda what: None
) -> StreamGain | None:
    """Medians of the planner's plan with one launch at a time and with several, in turns; None if there is no plan."""
    facts = alone(bench.profile, bench.kind)
    candidates = plans(bench.profile, bench.kind, slo_ms / 1e3, bench.max_batch)[CONSTANT]
    if not candidates:
        return None
    plan = candidates[0]
    bench.make_ready(plan)
    route = route_of(plan, facts, [GROUP])
    inputs = max(bench.least, round(seconds * evaluate(plan, facts).goodput_per_s))
    rates: dict[int, list[float]] = {1: [], streams: []}
    threads = {count: for_threads(bench.model, count) for count in rates}
    for number in range(1 + ROUNDS):  # the first one warms up
        for at_once, (models, within) in threads.items():
            progress(f"SLO {slo_ms:g} ms, {at_once} at once, round {number} of {ROUNDS}")
            rates[at_once].append(Saturated(route, models, within, bench.source).rate_per_s(inputs))
    return StreamGain(slo_ms, streams, median(rates[streams][1:]), median(rates[1][1:]))


class Saturated:
    """Runs one thread per model; the same dispatcher as in service decides what each of them launches next."""

    def __init__(self, route: Route, models: Sequence[SplitModel], within: Within, source: Source) -> None:
        # All threads compute on one device, so any of them can continue with the survivors of any other.
        shared = replace(route, stages=tuple(replace(stage, local=False) for stage in route.stages))
        self._models = {f"{GROUP} {number}": model for number, model in enumerate(models)}
        limits = Limits(backlog=1 << 40, ahead=0, retries=0, straggler_factor=inf)
        self._dispatcher = Dispatcher(shared, {GROUP: list(self._models)}, limits)
        self._within, self._source = within, source
        self._next: dict[str, Launch] = {}
        self._changed = Condition()
        self._inside = 0
        self._failed: Exception | None = None

    def rate_per_s(self, count: int) -> float:
        for number in range(count):
            row = number % len(self._source.inputs)
            self._dispatcher.admit(0.0, inf, Place(self._source.inputs[row], 0))
        self._inside = count
        threads = [Thread(target=self._compute, args=each, daemon=True) for each in self._models.items()]
        begun_s = time.perf_counter()
        with self._changed:
            self._tick()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed
        return count / (time.perf_counter() - begun_s)

    def _compute(self, name: str, model: SplitModel) -> None:
        try:
            with self._within():
                while launch := self._take(name):
                    self._launch(model, launch)
        except Exception as error:
            with self._changed:
                self._failed, self._inside = error, 0
                self._changed.notify_all()

    def _take(self, name: str) -> Launch | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._next or not self._inside)
            return self._next.pop(name, None)

    def _launch(self, model: SplitModel, launch: Launch) -> None:
        rows, launched = np.arange(len(launch.places)), None
        for _, launched, _ in parts(model, launch, launch.places, _untimed):
            left, rows = rows[launched.exits.rows], np.delete(rows, launched.exits.rows)
            with self._changed:
                blocks = launched.exits.blocks.tolist()
                self._dispatcher.released(launch.id, time.perf_counter(), left.tolist(), blocks)
                self._inside -= len(left)
        assert launched, "This is a bug: a launch runs at least one block."
        places = {row: Place(launched.survivors, index) for index, row in enumerate(rows.tolist())}
        with self._changed:
            self._dispatcher.completed(launch.id, time.perf_counter(), places)
            self._tick()

    def _tick(self) -> None:
        self._next |= {launch.replica: launch for launch in self._dispatcher.tick(time.perf_counter())}
        self._dispatcher.endings()
        self._changed.notify_all()


def _untimed(call: Callable[[], Launched]) -> tuple[Launched, float]:
    return call(), 0.0
