"""A real device in the simulator's event loop: every batch is computed on it, and time advances by what it took.

It measures a device under load, not a front: inputs reach the dispatcher, and answers their clients, at no cost. On the
CPU, a launch counts by its own processor time, so that other work on the machine does not matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isobatch.cluster.load.workloads import Floats
from isobatch.cluster.simulator.event_loop import Arriving, Departure, EventLoop, LaunchSchedule
from isobatch.cluster.simulator.sustained import IN_TIME_SHARE
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Ending, Launch, Limits, Place
from isobatch.deployments.dispatch.route import Route, stops
from isobatch.profiles.measure import Stopwatch
from isobatch.profiles.model import Batch, Launched, SplitModel

GROUP = DEVICE = "device"  # the only group, with the only replica
SCORED_AT_ONCE = 32  # inputs of a launch that scores answers
LOOKS = 10  # checks in a trial whether too many inputs are late already


class Offered(NamedTuple):
    """An input, encoded, and when it was due."""

    batch: Batch
    due_s: float


@dataclass(frozen=True)
class Source:
    """Inputs, encoded one by one before anything is timed, and their labels where they are known."""

    inputs: Sequence[Batch]
    labels: NDArray[np.int64] | None = None


@dataclass
class DeviceTrial:
    """Counts the ends of the inputs that a device was offered, as a listener of the event loop."""

    seconds: float
    slo_s: float
    offered: int = 0
    latencies_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0  # when the last answer was given
    gone: int = 0  # inputs that got no answer

    @property
    def hopeless(self) -> bool:
        """Whether too many inputs are already late or lost for any later answers to help."""
        late = len(self.latencies_s) - self.in_time
        return late + self.gone > (1 - IN_TIME_SHARE) * self.offered

    @property
    def in_time(self) -> int:
        return sum(latency <= self.slo_s for latency in self.latencies_s)

    @property
    def keeps_slo(self) -> bool:
        """Whether nearly all inputs were answered in time."""
        return self.in_time >= IN_TIME_SHARE * self.offered

    @property
    def goodput_per_s(self) -> float:
        """Answers in time per second, up to the last answer instead of the last arrival.

        When inputs arrive for a shorter time than the SLO, even a device too slow for the rate answers all in time.
        """
        return self.in_time / max(self.seconds, self.ended_s)

    def latency_ms(self, share: float) -> float | None:
        return 1e3 * float(np.quantile(self.latencies_s, share)) if self.latencies_s else None

    def answer(self, now_s: float, launch: Launch, departure: Departure, ends_s: Sequence[float] | None) -> None:
        for due_s in departure.answers:
            self.latencies_s.append(now_s - due_s)
            self.ended_s = now_s

    def refuse(self, at_s: float, weight: int) -> None:
        self.gone += 1

    def lose(self, ending: Ending, at_s: float) -> None:
        self.gone += len(ending.tickets)

    def audit(self, block: int, agrees: bool) -> None: ...

    def launch(self, launch: Launch, kind: str, took_s: float) -> None:
        """Launches are not counted."""


class RealDevice:
    """One device that computes one launch at a time, with a model whose calls a stopwatch times."""

    def __init__(self, model: SplitModel, stopwatch: Stopwatch) -> None:
        self._model, self._stopwatch = model, stopwatch
        self._due_s: dict[Ticket, float] = {}  # of the inputs inside
        self._free_s = 0.0

    def begin(self, launch: Launch, now_s: float) -> LaunchSchedule:
        """Compute the launch now; in virtual time it starts when the device has finished the launch before it."""
        starts_s = ends_s = max(now_s, self._free_s)
        rows, survivors, departures = np.arange(len(launch.places)), None, []
        for stop, launched, took_s in parts(self._model, launch, self._places(launch), self._stopwatch):
            ends_s += took_s
            leaving, rows = rows[launched.exits.rows].tolist(), np.delete(rows, launched.exits.rows)
            if leaving:
                due_s = [self._due_s.pop(launch.tickets[row]) for row in leaving]
                departures.append(Departure(ends_s, stop, leaving, due_s))
            survivors = launched.survivors
        self._free_s = ends_s
        last = departures.pop() if departures and departures[-1].at_s == ends_s else None
        staying = {row: Place(survivors, index) for index, row in enumerate(rows.tolist())}
        return LaunchSchedule(starts_s, ends_s, departures, last, staying)

    def kind(self, group: str) -> str:
        return group

    def _places(self, launch: Launch) -> Sequence[Place]:
        """The batches of a launch's inputs. The due times of new ones are kept until they leave."""
        if launch.cursor:
            return launch.places
        offered: list[Offered] = [place.payload for place in launch.places]
        self._due_s |= {ticket: each.due_s for ticket, each in zip(launch.tickets, offered, strict=True)}
        return [Place(each.batch, 0) for each in offered]


def tried(
    route: Route, model: SplitModel, stopwatch: Stopwatch, source: Source, slo_s: float, due_s: Floats
) -> DeviceTrial:
    """Offer an input to one device at each of these times, and run until the last one has ended.

    The trial ends early once too many inputs are late.
    """
    trial = DeviceTrial(float(due_s[-1]), slo_s, len(due_s))
    dispatcher = Dispatcher(route, {GROUP: [DEVICE]}, Limits(retries=0))
    loop = EventLoop(dispatcher, RealDevice(model, stopwatch), trial, slo_s)
    look_each = -(-len(due_s) // LOOKS)

    def offered() -> Iterator[Arriving]:
        for number, due in enumerate(due_s.tolist()):
            if number % look_each == 0 and trial.hopeless:
                return
            yield due, Place(Offered(source.inputs[number % len(source.inputs)], due), 0), 1, False

    loop.arrive(offered())
    if not trial.hopeless:
        loop.run_until(inf)
    return trial


def scored(model: SplitModel, source: Source, ramps: Sequence[int]) -> tuple[float | None, float]:
    """The accuracy with these ramps, and the share of the blocks that an input runs on average.

    Every input of the source is answered once. Trials answer different numbers of inputs.
    """
    blocks, labels = np.zeros((2, len(source.inputs)), np.int64)
    for start in range(0, len(source.inputs), SCORED_AT_ONCE):
        some = source.inputs[start : start + SCORED_AT_ONCE]
        rows, batch = start + np.arange(len(some)), model.merge(some)
        for stop in stops(0, model.num_blocks, ramps):
            launched = model.run(batch, stop, ramps)
            left = rows[launched.exits.rows]
            blocks[left] = launched.exits.blocks
            if source.labels is not None:
                labels[left] = launched.exits.labels
            rows = np.delete(rows, launched.exits.rows)
            if launched.survivors is None:
                break
            batch = launched.survivors
    right = None if source.labels is None else float(np.mean(labels == source.labels))
    return right, float(np.mean(blocks + 1)) / model.num_blocks


def parts(
    model: SplitModel, launch: Launch, places: Sequence[Place], stopwatch: Stopwatch
) -> Iterator[tuple[int, Launched, float]]:
    """Run a launch from ramp to ramp as a replica does (deployments/replica/split.py), and time each part.

    `places` hold the batches of the launch's inputs.
    """
    survivors: Batch | None = None
    for stop in stops(launch.cursor, launch.stop, launch.ramps):

        def part(batch: Batch | None = survivors, stop: int = stop) -> Launched:
            return model.run(batch or _gathered(model, places), stop, launch.ramps)

        launched, took_s = stopwatch(part)
        yield stop, launched, took_s
        if (survivors := launched.survivors) is None:
            return


def _gathered(model: SplitModel, places: Sequence[Place]) -> Batch:
    """One batch of all places; neighbouring rows of the same batch are taken from it together, which is faster."""
    runs = [list(run) for _, run in groupby(places, key=lambda place: id(place.payload))]
    return model.merge([_taken(model, run[0].payload, [place.row for place in run]) for run in runs])


def _taken(model: SplitModel, batch: Batch, rows: list[int]) -> Batch:
    return batch if rows == list(range(len(batch))) else model.select(batch, np.array(rows))
