"""Who runs next: admission, batches, merging, deadlines, retries. No I/O, no clock, no Ray.

A driver (asyncio and Serve, virtual time, or one process) tells what happened and when; `tick` says what to launch.
How batches are chosen says `deployments.dispatch.choice`; what a newcomer is promised, `deployments.dispatch.lane`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count, groupby
from math import inf
from typing import NamedTuple

from deployments.dispatch.choice import choose
from deployments.dispatch.lane import Lane
from deployments.dispatch.messages import Ending, Launch, Limits, Outcome, Refusal
from deployments.dispatch.pools import NOWHERE, Place, Pool, Ticket
from deployments.dispatch.replicas import Group, Replica
from deployments.dispatch.route import Route


class _Flight(NamedTuple):
    """A launch that has not come back."""

    launch: Launch
    pool: Pool  # where it was taken from
    replica: Replica
    tickets: list[Ticket]
    started_s: float
    seconds: float  # as expected when it began
    ends_s: float


class Dispatcher:
    """Owns every admitted input until its ending is reported by `endings`."""

    def __init__(self, route: Route, groups: Mapping[str, Collection[str]], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._deadline_s = inf  # nobody who waits has one before this
        self._ripe_s = inf  # somebody waits for a replica that will be nearly idle then
        self._tickets: dict[int, Ticket] = {}
        self._flights: dict[int, _Flight] = {}
        self._groups: dict[str, Group] = {}
        self._lanes = self._open = list[Lane]()
        self._endings: list[Ending] = []
        self._ticket_ids, self._launch_ids = count(), count()
        self._now_s = 0.0
        self._calm = False  # nothing can be launched before something happens
        self.route = route
        self.reroute(route, groups)

    # What a driver asks

    @property
    def inside(self) -> int:
        """Admitted inputs that have not ended."""
        return len(self._tickets)

    def waiting(self) -> dict[tuple[str, int], int]:
        """How many inputs wait, by the group that will run them and their next block."""
        sizes: dict[tuple[str, int], int] = {}
        for pool in self._pools():
            where = pool.stage.group, pool.cursor
            sizes[where] = sizes.get(where, 0) + pool.size
        return sizes

    def replicas(self) -> dict[str, int]:
        """How many each group has. What needs a group without any waits."""
        return {name: len(group.members) for name, group in self._groups.items()}

    def endings(self) -> list[Ending]:
        """What has ended since the last call."""
        endings, self._endings = self._endings, []
        return endings

    def wake_s(self) -> float | None:
        """When `tick` should be called if nothing else happens; None: never."""
        return None if self.alarm_s == inf else self.alarm_s

    @property
    def alarm_s(self) -> float:
        """Before this nobody's deadline passes, and no replica becomes nearly idle that somebody waits for."""
        return self._deadline_s if self._deadline_s < self._ripe_s else self._ripe_s

    def expected_s(self, now_s: float) -> float:
        """What an input admitted now takes to the very end, in the lane where it is over first."""
        return min(lane.expected_s(now_s) for lane in self._open)

    def patience_s(self, launch_id: int) -> float:
        """How long a launch may take before it has failed; for ever, where nothing is expected of it."""
        flight, limits = self._flights[launch_id], self.limits
        if not flight.seconds:
            return inf
        usual_s = limits.stuck_factor * max(1.0, flight.pool.station.group.pace) * (flight.ends_s - flight.started_s)
        return max(limits.stuck_after_s, usual_s) + (0.0 if flight.replica.launches else limits.first_launch_s)

    # What a driver tells

    def reroute(self, route: Route, groups: Mapping[str, Collection[str]]) -> None:
        """Follow another plan, or other replicas, from now on. Inputs go on from where they stand.

        Launches come back as they are. What only a replica had that has gone begins again.
        """
        if missing := set(route.groups) - set(groups):
            raise ValueError(f"no replicas were named for group {min(missing)!r}")
        waiting = [(pool.station.lane, pool.take(pool.size)) for pool in list(self._pools())]
        self._groups = {name: self._groups.get(name) or Group(name, self.limits) for name in groups}
        for name, group in self._groups.items():
            group.follow(groups[name])
        if not self._lanes or route != self.route:
            self.route, self._lanes = route, [Lane(lane, self._groups) for lane in route.lanes]
        self._calm = False
        # Inputs are not let into a lane that cannot be left.
        self._open = [lane for lane in self._lanes if lane.open] or self._lanes
        for lane, tickets in waiting:
            self._wait(tickets, lane)

    def limit(self, limits: Limits) -> None:
        """What it may do from now on: other fronts have gone, or come."""
        self.limits = limits
        for group in self._groups.values():
            group.limit(limits)
        self._calm = False

    def admit(self, now_s: float, deadline_s: float, place: Place) -> int | Refusal:
        """A ticket's number, or why there is none."""
        lane = self._open[0] if len(self._open) == 1 else self._fastest(now_s)
        expected_s = lane.expected_s(now_s)
        late_s = now_s + expected_s * (1 + self.limits.slack) - deadline_s
        # While nobody is inside, the plan's own times decide: replicas that were slow for a while, so slow that all are
        # refused, would else get nothing to do by which they could show that they no longer are.
        if late_s > 0 and (self._tickets or now_s + lane.alone_s * (1 + self.limits.slack) > deadline_s):
            return Refusal("the deadline cannot be met with what is ahead", late_s)
        if len(self._tickets) >= self.limits.backlog:
            return Refusal(f"the backlog of {self.limits.backlog} inputs is full", expected_s)
        number = next(self._ticket_ids)
        ticket = self._tickets[number] = Ticket(number, deadline_s, place)
        lane.entry.add(ticket)
        self._calm = self._calm and not lane.is_stirred
        if deadline_s < self._deadline_s:
            self._deadline_s = deadline_s
        return number

    def abandon(self, ticket_id: int) -> None:
        """Nobody waits for this input's answer any more. A launch that holds it runs on; nothing follows."""
        if ticket := self._tickets.get(ticket_id):
            self._end([ticket], Outcome.ABANDONED)

    def tick(self, now_s: float) -> list[Launch]:
        """Drop what has expired, and launch what can be launched."""
        if now_s >= self._deadline_s:
            self._expire(now_s)
        launches: list[Launch] = []
        if self._calm and now_s < self._ripe_s:
            return launches
        self._calm, self._now_s, self._ripe_s = True, now_s, inf
        for lane in self._lanes:
            for group, stations in lane.posts:
                while choice := choose(group, stations, now_s):
                    if tickets := self._take(choice[0], now_s):
                        launches.append(self._launch(*choice, tickets, now_s))
                if group.early_s and any(pool.size for each in stations for pool in each.pools.values()):
                    self._ripe_s = min(self._ripe_s, group.ripe_s(now_s))
        return launches

    def released(self, launch_id: int, rows: Collection[int]) -> None:
        """These inputs of a launch have their answer already; the launch goes on."""
        tickets = self._flights[launch_id].tickets
        self._end([tickets[row] for row in rows], Outcome.ANSWERED)

    def completed(self, launch_id: int, now_s: float, survivors: Mapping[int, Place]) -> None:
        """A launch came back: rows that survived are somewhere else now, all others have their answer."""
        flight = self._land(launch_id, now_s)
        launch, station = flight.launch, flight.pool.station
        station.group.note(flight.replica, flight.started_s, flight.seconds, now_s)
        if not survivors:
            return self._end(flight.tickets, Outcome.ANSWERED)
        if launch.stop >= self.route.num_blocks:
            raise ValueError(f"launch {launch_id} ran to the last block, yet {len(survivors)} inputs stayed inside")
        self._end([t for row, t in enumerate(flight.tickets) if row not in survivors], Outcome.ANSWERED)
        holder = launch.replica if launch.keep else None
        for row, place in survivors.items():
            ticket = flight.tickets[row]
            ticket.place, ticket.cursor, ticket.retries, ticket.holder = place, launch.stop, 0, holder
        self._wait([flight.tickets[row] for row in survivors], station.lane)
        return None

    def failed(self, launch_id: int, now_s: float, reason: str, *, lost: bool = False, blame: bool = True) -> None:
        """A launch did not come back. Its inputs are still where they were: they try again, on another replica.

        `lost`: they are not, because their state went with a replica. They begin again, as the inputs that came in;
        so do those that the replica has kept for itself, since no other can have them. `blame`: it was the replica's
        own fault; whoever only finds out that another has gone goes on working.
        """
        flight = self._land(launch_id, now_s)
        if blame:
            flight.pool.station.group.distrust(flight.replica, now_s)
        again = lost or flight.pool.keeper is not None
        for ticket in flight.tickets:
            ticket.retries += 1
            if again:
                ticket.restarts += 1
                ticket.begin_again()
        most = self.limits.retries
        given_up = [ticket for ticket in flight.tickets if max(ticket.retries, ticket.restarts) > most]
        self._end(given_up, Outcome.FAILED, reason)
        self._wait(flight.tickets, flight.pool.station.lane)

    # How it decides

    def _fastest(self, now_s: float) -> Lane:
        """The lane where a newcomer is expected to be done first."""
        return min(self._open, key=lambda lane: lane.expected_s(now_s))

    def _take(self, pool: Pool, now_s: float) -> list[Ticket]:
        """A batch, the earliest deadlines first, without those that this launch could not answer in time."""
        stage, late = pool.stage, []
        soonest_s = now_s + stage.launch_s[0]
        while (first := pool.first()) and soonest_s > first.deadline_s:
            late += pool.take(1)
        if late:
            self._end(late, Outcome.EXPIRED)
        return pool.take(stage.batch)

    def _launch(self, pool: Pool, replica: Replica, tickets: list[Ticket], now_s: float) -> Launch:
        station, stage, cursor = pool.station, pool.stage, pool.cursor
        ids, places = tuple([ticket.id for ticket in tickets]), tuple([ticket.place for ticket in tickets])
        number, ramps, size = next(self._launch_ids), station.lane.route.ramps, len(tickets)
        launch = Launch(
            number, replica.name, cursor, stage.stop, ramps, ids, places, station.keep, stage.batch, stage.group
        )
        seconds = stage.launch_s[size - 1]
        ends_s = station.group.begin(replica, seconds, now_s)
        pool.fly(size)
        self._flights[number] = _Flight(launch, pool, replica, tickets, now_s, seconds, ends_s)
        return launch

    def _land(self, launch_id: int, now_s: float) -> _Flight:
        self._calm = False
        flight = self._flights.pop(launch_id)
        flight.pool.fly(-len(flight.tickets))
        flight.pool.station.group.end(flight.replica, now_s)
        return flight

    def _wait(self, tickets: Iterable[Ticket], lane: Lane) -> None:
        """Let inputs wait in a lane, or in a better one if it is closed or no longer there."""
        staying = [ticket for ticket in tickets if not ticket.ended]
        for ticket in staying:
            if ticket.holder is not None and not self._is_here(ticket.holder):
                ticket.begin_again()
            if ticket.deadline_s < self._deadline_s:
                self._deadline_s = ticket.deadline_s
        for (cursor, holder), together in groupby(staying, key=lambda ticket: (ticket.cursor, ticket.holder)):
            self._lane_for(lane, holder).wait(list(together), cursor, holder)

    def _is_here(self, replica: str) -> bool:
        return any(replica in group.members for group in self._groups.values())

    def _lane_for(self, lane: Lane, holder: str | None) -> Lane:
        if lane in self._open:
            return lane
        near = [each for each in self._open if any(holder in group.members for group in each.groups)]
        return near[0] if near else self._fastest(self._now_s)

    def _expire(self, now_s: float) -> None:
        for pool in list(self._pools()):
            late = []
            while (first := pool.first()) and first.deadline_s <= now_s:
                late += pool.take(1)
            self._end(late, Outcome.EXPIRED)
        self._deadline_s = min((first.deadline_s for pool in self._pools() if (first := pool.first())), default=inf)

    def _end(self, tickets: Iterable[Ticket], outcome: Outcome, reason: str = "") -> None:
        ended = []
        for ticket in tickets:
            if not ticket.ended:
                ticket.ended = True
                ended.append(ticket.id)
                del self._tickets[ticket.id]
                if ticket.pool is not None:
                    ticket.pool.forget(ticket)
                    ticket.place = ticket.origin = NOWHERE  # the queue still has it, but nothing is held on its account
        if ended:
            self._endings.append(Ending(tuple(ended), outcome, reason))

    def _pools(self) -> Iterator[Pool]:
        for lane in self._lanes:
            yield from lane.pools()
