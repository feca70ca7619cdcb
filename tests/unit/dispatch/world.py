"""A world in virtual time around a dispatcher: inputs that exit where they are told to, replicas that break."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from deployments.dispatch.messages import Launch, Outcome, Refusal
from deployments.dispatch.pools import Place
from deployments.dispatch.route import Route, Stage
from deployments.dispatcher import Dispatcher, Limits


@dataclass(frozen=True)
class Input:
    """An input needs `depth` blocks, and wants its answer within `slack_s`."""

    at_s: float
    depth: int
    slack_s: float


@dataclass
class World:
    route: Route
    groups: dict[str, list[str]]
    limits: Limits = field(default_factory=Limits)
    slow: dict[str, float] = field(default_factory=dict)  # replica -> how many times slower it is
    fails: Callable[[Launch], bool] = lambda launch: False

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.route, self.groups, self.limits)
        self.now_s = 0.0
        self.depths: dict[int, int] = {}
        self.deadlines: dict[int, float] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.ended_s: dict[int, float] = {}
        self.admitted_s: dict[int, float] = {}
        self.refusals: list[Refusal] = []
        self.launches: list[Launch] = []
        self.running: Counter[str] = Counter()
        self.free_s: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def arrive(self, *inputs: Input) -> None:
        for each in inputs:
            self.at(each.at_s, lambda each=each: self._admit(each))

    def run(self) -> None:
        """Until nothing happens any more. Waking up for deadlines keeps it going while anybody waits."""
        while self._events or self.dispatcher.wake_s() is not None:
            wake_s = self.dispatcher.wake_s()
            if not self._events or (wake_s is not None and wake_s < self._events[0][0]):
                self.at(max(self.now_s, wake_s or 0.0), lambda: None)
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self._tick()

    def _tick(self) -> None:
        for launch in self.dispatcher.tick(self.now_s):
            self._check(launch)
            self._begin(launch)
        for ending in self.dispatcher.endings():
            assert ending.id not in self.outcomes, "an input ended twice"
            self.outcomes[ending.id], self.ended_s[ending.id] = ending.outcome, self.now_s

    def _admit(self, each: Input) -> None:
        number = len(self.depths)
        ticket = self.dispatcher.admit(self.now_s, self.now_s + each.slack_s, Place(("input", number), 0))
        if isinstance(ticket, Refusal):
            self.refusals.append(ticket)
            return
        assert ticket == number
        self.depths[ticket], self.deadlines[ticket] = each.depth, self.now_s + each.slack_s
        self.admitted_s[ticket] = self.now_s

    def _check(self, launch: Launch) -> None:
        """What must hold of every launch, whatever happened before."""
        stage = self.dispatcher.route.at(launch.cursor)
        assert 1 <= len(launch.tickets) <= stage.batch
        assert launch.stop == stage.stop
        assert len(set(launch.tickets)) == len(launch.tickets)
        deadlines = [self.deadlines[ticket] for ticket in launch.tickets]
        assert deadlines == sorted(deadlines)
        assert all(deadline >= self.now_s for deadline in deadlines)
        assert not set(launch.tickets) & set(self.outcomes), "an input that has ended was launched"
        for ticket, place in zip(launch.tickets, launch.places, strict=True):
            expected: Any = ("input", ticket) if launch.cursor == 0 else ("survivor", ticket, launch.cursor)
            assert place.payload == expected, "an input was taken from where it is not"
        self.running[launch.replica] += 1
        assert self.running[launch.replica] <= 1 + self.limits.ahead

    def _begin(self, launch: Launch) -> None:
        self.launches.append(launch)
        stage = self.dispatcher.route.at(launch.cursor)
        starts_s = max(self.now_s, self.free_s.get(launch.replica, 0.0))
        ends_s = starts_s + stage.seconds(len(launch.tickets)) * self.slow.get(launch.replica, 1.0)
        self.free_s[launch.replica] = ends_s
        self.at(ends_s, lambda: self._return(launch))

    def _return(self, launch: Launch) -> None:
        self.running[launch.replica] -= 1
        if self.fails(launch):
            self.dispatcher.failed(launch.id, self.now_s, "the replica broke")
            return
        survivors = {
            row: Place(("survivor", ticket, launch.stop), row)
            for row, ticket in enumerate(launch.tickets)
            if self.depths[ticket] > launch.stop
        }
        self.dispatcher.completed(launch.id, self.now_s, survivors)


def linear(start: int, stop: int, batch: int, group: str, launch_s: float = 0.01, survival: float = 1.0) -> Stage:
    """A stage whose launches cost half of their full time at size 1, and grow from there."""
    times = tuple(launch_s * (0.5 + 0.5 * size / batch) for size in range(1, batch + 1))
    return Stage(start, stop, batch, group, times, survival)
