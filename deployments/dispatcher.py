"""Who runs next: admission, batches, merging, deadlines, retries. No I/O, no clock, no Ray.

A driver (asyncio and Serve, virtual time, or one process) tells what happened and when; `tick` says what to launch.

While a replica is idle, waiting buys nothing: it is given what there is, so a lone input is as fast as a batch of one.
Under load replicas are busy, and batches fill up while they are. A full batch may also wait at a busy replica, so that
it starts the moment the one before it ends. When several pools want the same replicas,
1. full and urgent ones come first (urgent: waiting longer would cost somebody the deadline), the deepest before the
   others, so that what was begun gets finished and the memory it holds is let go;
2. then the one with the least time left.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import count
from math import inf
from typing import NamedTuple

from deployments.dispatch.backlog import Backlog
from deployments.dispatch.messages import Ending, Launch, Limits, Outcome, Refusal
from deployments.dispatch.pools import Place, Pool, Ticket
from deployments.dispatch.replicas import Group, Replica
from deployments.dispatch.route import Route, Stage


class _Flight(NamedTuple):
    """A launch that has not come back."""

    launch: Launch
    stage: Stage
    replica: Replica
    tickets: tuple[Ticket, ...]
    started_s: float
    ends_s: float  # as expected when it began

    @property
    def expected_s(self) -> float:
        return self.stage.seconds(len(self.tickets))


class Dispatcher:
    """Owns every admitted input until its ending is reported by `endings`."""

    def __init__(self, route: Route, groups: Mapping[str, Collection[str]], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._pools: dict[int, Pool] = defaultdict(Pool)
        self._tickets: dict[int, Ticket] = {}
        self._flights: dict[int, _Flight] = {}
        self._groups: dict[str, Group] = {}
        self._endings: list[Ending] = []
        self._ticket_ids, self._launch_ids = count(), count()
        self._backlog = Backlog(route)
        self._alarm_s = inf  # nobody who waits has a deadline before this
        self.reroute(route, groups)

    # What a driver asks

    @property
    def inside(self) -> int:
        """Admitted inputs that have not ended."""
        return len(self._tickets)

    def waiting(self) -> dict[int, int]:
        """How many inputs wait before each block."""
        return {cursor: len(pool) for cursor, pool in self._pools.items() if len(pool)}

    def empty_groups(self) -> list[str]:
        """Groups without a single replica: what needs them waits."""
        return [name for name, group in self._groups.items() if not group.members]

    def endings(self) -> list[Ending]:
        """What has ended since the last call."""
        endings, self._endings = self._endings, []
        return endings

    def wake_s(self) -> float | None:
        """When `tick` should be called if nothing else happens: somebody's deadline may pass then, none does before."""
        return None if self._alarm_s == inf else self._alarm_s

    def expected_s(self, now_s: float) -> float:
        """What an input admitted now takes to the very end, by today's backlog, at the pace that replicas really keep.

        Where a table is wrong and all are slow, promising by the table would let in what expires half-way.
        """
        if self._backlog.stale:
            self._backlog.recount(self.waiting())
        ahead_s = [
            self._backlog.seconds(name, now_s) * group.typical_pace / max(1, group.working)
            for name, group in self._groups.items()
        ]
        own_s = [stage.seconds(pool.size + 1) * group.typical_pace for stage, group, pool in self._ways]
        return max(ahead_s) + sum(own_s)

    # What a driver tells

    def reroute(self, route: Route, groups: Mapping[str, Collection[str]]) -> None:
        """Follow another plan from now on. Inputs go on from where they stand; launches come back as they are."""
        if missing := {stage.group for stage in route.stages} - set(groups):
            raise ValueError(f"no replicas were named for group {min(missing)!r}")
        self.route, limits = route, self.limits
        self._backlog.follow(route)
        for name, wanted in groups.items():
            group = self._groups.setdefault(name, Group(limits.ahead, limits.straggler_factor, limits.probe_every_s))
            for replica in set(group.members) - set(wanted):
                group.remove(replica)
            for replica in sorted(set(wanted) - set(group.members)):
                group.add(replica)
        self._groups = {name: self._groups[name] for name in groups}
        self._ways = [(stage, self._groups[stage.group], self._pools[stage.start]) for stage in route.stages]

    def admit(self, now_s: float, deadline_s: float, place: Place) -> int | Refusal:
        """A ticket's number, or why there is none."""
        late_s = now_s + self.expected_s(now_s) * (1 + self.limits.slack) - deadline_s
        if late_s > 0:
            return Refusal("the deadline cannot be met with what is ahead", late_s)
        if len(self._tickets) >= self.limits.backlog:
            return Refusal(f"the backlog of {self.limits.backlog} inputs is full", self.expected_s(now_s))
        ticket = Ticket(next(self._ticket_ids), deadline_s, place, place)
        self._tickets[ticket.id] = ticket
        self._wait(ticket)
        self._backlog.joined()
        return ticket.id

    def abandon(self, ticket_id: int) -> None:
        """Nobody waits for this input's answer any more. A launch that holds it runs on; nothing follows."""
        if ticket := self._tickets.get(ticket_id):
            self._end(ticket, Outcome.ABANDONED)

    def tick(self, now_s: float) -> list[Launch]:
        """Drop what has expired, and launch what can be launched."""
        if now_s >= self._alarm_s:
            self._expire(now_s)
        launches = []
        while launch := self._next_launch(now_s):
            launches.append(launch)
        return launches

    def released(self, launch_id: int, rows: Collection[int]) -> None:
        """These inputs of a launch have their answer already; the launch goes on."""
        for row in rows:
            self._end(self._flights[launch_id].tickets[row], Outcome.ANSWERED)

    def completed(self, launch_id: int, now_s: float, survivors: Mapping[int, Place]) -> None:
        """A launch came back: rows that survived are somewhere else now, all others have their answer."""
        flight = self._land(launch_id)
        if survivors and flight.launch.stop >= self.route.num_blocks:
            raise ValueError(f"launch {launch_id} ran to the last block, yet {len(survivors)} inputs stayed inside")
        if group := self._groups.get(flight.stage.group):
            group.note(flight.replica, flight.started_s, flight.expected_s, now_s)
        for row, ticket in enumerate(flight.tickets):
            if row not in survivors:
                self._end(ticket, Outcome.ANSWERED)
            else:
                ticket.place, ticket.cursor, ticket.retries = survivors[row], flight.launch.stop, 0
                self._wait(ticket)

    def failed(self, launch_id: int, now_s: float, reason: str, *, lost: bool = False) -> None:
        """A launch did not come back. Its inputs are still where they were: they try again, on another replica.

        `lost`: they are not, because their state went with a replica. They begin again, as the inputs that came in.
        """
        flight = self._land(launch_id)
        if group := self._groups.get(flight.stage.group):
            group.distrust(flight.replica, now_s)
        for ticket in flight.tickets:
            ticket.retries += 1
            if lost:
                ticket.place, ticket.cursor, ticket.restarts = ticket.origin, 0, ticket.restarts + 1
            if max(ticket.retries, ticket.restarts) > self.limits.retries:
                self._end(ticket, Outcome.FAILED, reason)
            else:
                self._wait(ticket)

    # How it decides

    def _next_launch(self, now_s: float) -> Launch | None:
        while ready := self._ready(now_s):
            _, cursor, replica = min(ready) if len(ready) > 1 else ready[0]
            stage = self.route.at(cursor)
            if tickets := self._take(cursor, stage, now_s):
                return self._launch(cursor, stage, replica, tickets, now_s)
        return None

    def _ready(self, now_s: float) -> list[tuple[tuple[bool, float], int, Replica]]:
        """Pools that a replica would take inputs from, by rank. Most often there is none: this must cost little."""
        ready = []
        for cursor, pool in self._pools.items():
            if size := pool.size:
                stage = self.route.at(cursor)
                if replica := self._groups[stage.group].pick(now_s, idle=size < stage.batch):
                    ready.append((self._rank(cursor, now_s), cursor, replica))
        return ready

    def _rank(self, cursor: int, now_s: float) -> tuple[bool, float]:
        pool, stage = self._pools[cursor], self.route.at(cursor)
        first = pool.first()
        left_s = first.deadline_s - now_s - self.route.remaining_s(cursor) if first else float("inf")
        presses = len(pool) >= stage.batch or left_s <= 0
        return not presses, -cursor if presses else left_s

    def _take(self, cursor: int, stage: Stage, now_s: float) -> tuple[Ticket, ...]:
        """A batch, the earliest deadlines first, without those that this launch could not answer in time."""
        tickets: list[Ticket] = []
        while len(tickets) < stage.batch and (ticket := self._pools[cursor].take()):
            if now_s + stage.seconds(1) > ticket.deadline_s:
                self._end(ticket, Outcome.EXPIRED)
            else:
                tickets.append(ticket)
        return tuple(tickets)

    def _launch(self, cursor: int, stage: Stage, replica: Replica, tickets: tuple[Ticket, ...], now_s: float) -> Launch:
        ids, places = tuple([ticket.id for ticket in tickets]), tuple([ticket.place for ticket in tickets])
        launch = Launch(
            next(self._launch_ids), replica.name, cursor, stage.stop, self.route.ramps, ids, places, self._keeps(stage)
        )
        # What waits at a busy replica starts when that is done, not now.
        starts_s = max(now_s, replica.ends_s) if replica.running else now_s
        replica.ends_s = starts_s + stage.seconds(len(tickets))
        flight = self._flights[launch.id] = _Flight(launch, stage, replica, tickets, now_s, replica.ends_s)
        self._groups[stage.group].begin(replica)
        self._backlog.begin(stage, cursor, len(tickets), flight.ends_s)
        return launch

    def _keeps(self, stage: Stage) -> bool:
        """Whether whoever survives this stage goes on where it is."""
        after = self.route.at(stage.stop) if stage.stop < self.route.num_blocks else None
        return after is not None and after.local and after.group == stage.group

    def _land(self, launch_id: int) -> _Flight:
        flight = self._flights.pop(launch_id)
        self._backlog.end(flight.stage, flight.launch.cursor, len(flight.tickets), flight.ends_s)
        if group := self._groups.get(flight.stage.group):
            group.end(flight.replica)
        return flight

    def _expire(self, now_s: float) -> None:
        for pool in self._pools.values():
            while (first := pool.first()) and first.deadline_s <= now_s:
                self._end(first, Outcome.EXPIRED)
        firsts = [first.deadline_s for pool in self._pools.values() if (first := pool.first())]
        self._alarm_s = min(firsts, default=inf)

    def _wait(self, ticket: Ticket) -> None:
        if not ticket.ended:
            self._pools[ticket.cursor].add(ticket)
            if ticket.deadline_s < self._alarm_s:
                self._alarm_s = ticket.deadline_s

    def _end(self, ticket: Ticket, outcome: Outcome, reason: str = "") -> None:
        if ticket.ended:
            return
        ticket.ended = self._backlog.stale = True
        del self._tickets[ticket.id]
        self._endings.append(Ending(ticket.id, outcome, reason))
        if ticket.waiting:
            self._pools[ticket.cursor].forget()
