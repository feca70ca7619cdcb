"""Several launches at once on one device: how fast inputs get through when all of them are there from the start.

In real time and on threads, since launches that overlap take longer than each alone: only the clock knows by how much.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median
from threading import Condition, Thread

import numpy as np

from deployments.dispatch.messages import Launch, Limits
from deployments.dispatch.planned import route_of
from deployments.dispatch.pools import Place
from deployments.dispatch.route import Route
from deployments.dispatcher import Dispatcher
from deployments.models.backends import at_once
from experiments.onedevice.compare import CONSTANT, Bench, alone, plans
from experiments.onedevice.rehearsal import GROUP, Source, legs
from optimizer import evaluate
from profiles.model import Launched, SplitModel

ROUNDS = 5

Within = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Several:
    """What one plan gets through with so many launches at once, and with one."""

    slo_ms: float  # that it was made for
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
) -> Several | None:
    """The constant batches of the planner's plan, in turns with one launch at a time and with several; medians."""
    facts, found = alone(bench.profile, bench.kind), plans(bench.profile, bench.kind, slo_ms / 1e3, bench.max_batch)
    if not found[CONSTANT]:
        return None
    plan = found[CONSTANT][0]
    bench.make_ready(plan)
    route = route_of(plan, facts, [GROUP])
    count = max(bench.least, round(seconds * evaluate(plan, facts).goodput_per_s))
    rates: dict[int, list[float]] = {1: [], streams: []}
    ways = {many: at_once(bench.model, many) for many in rates}
    for number in range(1 + ROUNDS):  # the first one warms up
        for many, (models, within) in ways.items():
            progress(f"SLO {slo_ms:g} ms, {many} at once, round {number} of {ROUNDS}")
            rates[many].append(Saturated(route, models, within, bench.source).rate_per_s(count))
    return Several(slo_ms, streams, median(rates[streams][1:]), median(rates[1][1:]))


class Saturated:
    """One thread a model. The dispatcher that serves decides what each of them runs next."""

    def __init__(self, route: Route, models: Sequence[SplitModel], within: Within, source: Source) -> None:
        # Survivors are on the device that all threads compute on: any of them goes on with them.
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
        for launched, _ in legs(model, launch, _untimed):
            left, rows = rows[launched.exits.rows], np.delete(rows, launched.exits.rows)
            with self._changed:
                self._dispatcher.released(launch.id, left.tolist())
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
