"""A dispatcher in virtual time, with inputs whose exit blocks are given, and replicas that fail."""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random

from isobatch.deployments.dispatch.admission import soonest
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher, Limits
from isobatch.deployments.dispatch.messages import Audit, Fault, Launch, Outcome, Place, Refusal, RowKind
from isobatch.deployments.dispatch.route import Route, Stage


@dataclass(frozen=True)
class Input:
    """An input needs `depth` blocks, and wants its answer within `slack_s`."""

    at_s: float
    depth: int
    slack_s: float
    weight: int = 1


@dataclass
class World:
    route: Route
    groups: dict[str, list[str]]
    limits: Limits = field(default_factory=Limits)
    slow: dict[str, float] = field(default_factory=dict)  # replica -> how many times slower it is
    fails: Callable[[Launch], bool] = lambda launch: False
    loses: Callable[[Launch], bool] = lambda launch: False  # of failed launches: survivors are lost, too

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.route, self.groups, self.limits, Random(0).random)
        self.audits: list[Audit] = []
        self.now_s = 0.0
        self.tickets: list[Ticket] = []  # by number, as all that follows
        self.depths: dict[int, int] = {}
        self.deadlines: dict[int, float] = {}
        self.weights: dict[int, int] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.ended_s: dict[int, float] = {}
        self.admitted_s: dict[int, float] = {}
        self.refusals: list[Refusal] = []
        self.launches: list[Launch] = []
        self.places: dict[int, Place] = {}  # where the latest state of each input is
        self.running: defaultdict[str, set[int]] = defaultdict(set)  # launches, by replica
        self.free_s: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def arrive(self, *inputs: Input) -> None:
        for each in inputs:
            self.at(each.at_s, lambda each=each: self._admit(each))

    def run(self) -> None:
        """Run until no event is left. Deadlines count as events, so it runs while any input waits."""
        while self._events or self.dispatcher.wake_s < inf:
            wake_s = self.dispatcher.wake_s
            if not self._events or wake_s < self._events[0][0]:
                self.at(max(self.now_s, wake_s), lambda: None)
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self._tick()

    def _tick(self) -> None:
        for launch in self.dispatcher.tick(self.now_s):
            self._check(launch)
            self._begin(launch)
        for ending in self.dispatcher.endings():
            for ticket in ending.tickets:
                assert ticket.id not in self.outcomes, "an input ended twice"
                self.outcomes[ticket.id], self.ended_s[ticket.id] = ending.outcome, self.now_s

    def _admit(self, each: Input) -> None:
        number = len(self.depths)
        place = Place(("input", number), 0)
        ticket = self.dispatcher.admit(self.now_s, self.now_s + each.slack_s, place, each.weight)
        if isinstance(ticket, Refusal):
            self.refusals.append(ticket)
            return
        assert ticket.id == number
        self.tickets.append(ticket)
        self.places[number] = place
        self.depths[number], self.deadlines[number] = each.depth, self.now_s + each.slack_s
        self.admitted_s[number], self.weights[number] = self.now_s, each.weight

    def abandon(self, number: int) -> None:
        """The client of this input has gone, if it was admitted at all."""
        if number < len(self.tickets):
            self.dispatcher.abandon(self.tickets[number])

    def reroute(self, route: Route, groups: dict[str, list[str]], wakes_in_s: float | None = None) -> None:
        """Switch to another plan or other replicas. Launches on a replica that has gone are lost."""
        self.groups = groups
        for gone in [replica for replica in self.running if not self.is_here(replica)]:
            del self.running[gone]
        self.dispatcher.reroute(route, groups, wakes_in_s)

    def label(self, launch: Launch, row: int) -> bool:
        """The label of an input at a ramp, and at the end: another one for each third input."""
        return launch.stop < self.route.num_blocks and launch.tickets[row].id % 3 == 0

    def stage_of(self, launch: Launch) -> Stage:
        stages = [stage for lane in self.dispatcher.route.pipelines for stage in lane.stages]
        return next(each for each in stages if each.group == launch.group and each.start <= launch.cursor < each.stop)

    def is_here(self, replica: str) -> bool:
        return any(replica in members for members in self.groups.values())

    def _check(self, launch: Launch) -> None:
        """Check what must hold for every launch in any circumstances."""
        stage = self.stage_of(launch)
        inside = numbers(launch)
        asking, shadows = inside[: len(inside) - launch.shadows], inside[len(inside) - launch.shadows :]
        assert all(self.outcomes.get(number, Outcome.ANSWERED) is Outcome.ANSWERED for number in shadows)
        weights = [self.weights[number] if stage.length else 1 for number in inside]
        assert launch.weight == sum(weights)
        assert launch.room == stage.room
        assert launch.tickets
        assert launch.weight <= launch.room or len(launch.tickets) == 1
        assert launch.stop == stage.stop
        assert launch.replica in self.groups[stage.group]
        assert len(set(launch.tickets)) == len(launch.tickets)
        deadlines = [self.deadlines[number] for number in asking]
        assert deadlines == sorted(deadlines)
        assert all(deadline >= self.now_s for deadline in deadlines)
        assert not set(asking) & set(self.outcomes), "an input that has ended was launched"
        for number, place in zip(inside, launch.places, strict=True):
            self._check_place(launch, stage, number, place)
        self.running[launch.replica].add(launch.id)
        assert len(self.running[launch.replica]) <= 1 + self.limits.ahead

    def _check_place(self, launch: Launch, stage: Stage, number: int, place: Place) -> None:
        """Check that an input is taken from its present place: where it came in, or where its last launch left it."""
        if launch.cursor == 0:
            assert place.payload == ("input", number)
            self.places[number] = place
            return
        kind, *state, holder = place.payload
        assert (kind, state) == ("survivor", [number, launch.cursor])
        assert place == self.places[number], "an input was taken from where it is no longer"
        assert holder is None or self.is_here(holder), "what a replica kept went with it"
        if stage.local and holder in self.groups[stage.group]:
            assert launch.replica == holder, "what a replica has kept is needed there"

    def _begin(self, launch: Launch) -> None:
        self.launches.append(launch)
        stage = self.stage_of(launch)
        starts_s = max(self.now_s, self.free_s.get(launch.replica, 0.0))
        ends_s = starts_s + stage.seconds(launch.weight) * self.slow.get(launch.replica, 1.0)
        self.free_s[launch.replica] = ends_s
        self.at(ends_s, lambda: self._return(launch))

    def _return(self, launch: Launch) -> None:
        gone = launch.id not in self.running[launch.replica]  # even if another of that name is here now
        self.running[launch.replica].discard(launch.id)
        if self.fails(launch) or gone:
            fault = Fault.REPLICA if gone else Fault.NETWORK
            self.dispatcher.failed(launch.id, self.now_s, "the replica broke", fault, lost=gone or self.loses(launch))
            return
        holder = launch.replica if launch.keep else None
        last, kinds = launch.stop == self.route.num_blocks, launch.kinds or bytes(len(launch.tickets))
        leaves = [last or self.depths[number] <= launch.stop for number in numbers(launch)]
        if launch.kinds:
            leaving_rows = [
                row for row, leaving in enumerate(leaves) if last or (leaving and kinds[row] <= RowKind.AUDITED)
            ]
            labels = [self.label(launch, row) for row in leaving_rows]
            blocks = [launch.stop - 1] * len(leaving_rows)
            self.dispatcher.released(launch.id, self.now_s, leaving_rows, blocks, labels)
            self.audits += self.dispatcher.audits()
        survivors = {
            row: Place(("survivor", number, launch.stop, holder), row)
            for row, number in enumerate(numbers(launch))
            if not leaves[row] or (kinds[row] and not last)
        }
        self.places |= {launch.tickets[row].id: place for row, place in survivors.items()}
        self.dispatcher.completed(launch.id, self.now_s, survivors)


def numbers(launch: Launch) -> tuple[int, ...]:
    """The numbers of a launch's inputs, in the order in which they were admitted."""
    return tuple(ticket.id for ticket in launch.tickets)


def linear(
    start: int,
    stop: int,
    batch: int,
    group: str,
    launch_s: float = 0.01,
    survival: float = 1.0,
    *,
    local: bool = False,
    length: int | None = None,
) -> Stage:
    """A stage whose launches cost half of their full time at size 1, and grow from there."""
    times = tuple(launch_s * (0.5 + 0.5 * size / batch) for size in range(1, batch + 1))
    return Stage(start, stop, batch, group, times, survival, local=local, length=length, least_s=0.4 * launch_s)


class EverybodyDispatcher(Dispatcher):
    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        return self._add(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)
