"""The life of an admitted input: admit, tick, launch, completed. No I/O, no clock, no Ray.

A driver (asyncio and Serve, virtual time, or one process) tells what happened and when; `tick` says what to launch.
Whether an input is admitted is decided in `deployments.dispatch.admission`, what is launched next in
`deployments.dispatch.batching`.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from math import inf

from deployments.dispatch.admission import Admission, soonest
from deployments.dispatch.audits import Audits
from deployments.dispatch.batching import choose, form_batch
from deployments.dispatch.estimates import ExpectedTimes
from deployments.dispatch.groups import Group, Replica
from deployments.dispatch.lanes import Lane
from deployments.dispatch.messages import (
    NOWHERE,
    Audit,
    Ending,
    Fault,
    Launch,
    Limits,
    Outcome,
    Place,
    Refusal,
    RowKind,
    Unfinished,
)
from deployments.dispatch.pending_launches import PendingLaunch, PendingLaunches
from deployments.dispatch.queues import Queue, Ticket
from deployments.dispatch.route import Route


class Dispatcher:
    """Owns every admitted input until `endings` has reported how it ended. `chance` draws which are audited."""

    def __init__(
        self,
        route: Route,
        groups: Mapping[str, Collection[str]],
        limits: Limits | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits or Limits()
        self._audits = Audits(self.limits, chance, route.num_blocks)
        self.route = route
        self._groups: dict[str, Group] = {}
        self._lanes = self._open = list[Lane]()
        self._tickets: dict[int, Ticket] = {}
        self._flights = PendingLaunches()
        self._admission = Admission()
        self._endings: list[Ending] = []
        self._ticket_ids = count()
        self._ticked_s = 0.0  # when `tick` last looked for launches
        self._next_deadline_s = inf  # no input that waits has an earlier deadline
        self._nearly_idle_at_s = inf  # somebody waits for a replica that will be nearly idle then
        self._nothing_to_launch = False  # before something happens
        self.reroute(route, groups)

    # From the door to the answer

    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> int | Refusal:
        """A ticket's number, or why there is none. `full`: no ramp lets the input go."""
        lane, expected = soonest(self._open, now_s, weight)
        risk = self._admission.risk(lane, expected, deadline_s, len(self._tickets), self.limits, weight, full=full)
        if isinstance(risk, Refusal):
            return risk
        number = self._let_in(lane, expected, deadline_s, place, weight, full)
        self._tickets[number].risk = risk
        return number

    def admit_all(
        self,
        now_s: float,
        deadline_s: float,
        places: Sequence[Place],
        weights: Sequence[int] = (),
        full: bool = False,
    ) -> list[int] | Refusal:
        """The tickets of inputs that come together, or why there are none: it is decided once, by the last of them.

        Where there are several lanes, they are taken to spread over them. Without `weights` each weighs 1.
        """
        if len(places) == 1:  # as below; most requests have one input
            alone = self.admit(now_s, deadline_s, places[0], weights[0] if weights else 1, full)
            return alone if isinstance(alone, Refusal) else [alone]
        weights, lanes, others = weights or (1,) * len(places), len(self._open), len(places) - 1
        last, more = weights[-1], sum(weights[:-1]) // lanes
        (lane, expected), inside = soonest(self._open, now_s, last, more), len(self._tickets)
        risk = self._admission.risk(lane, expected, deadline_s, inside, self.limits, last, others // lanes, full)
        if isinstance(risk, Refusal):
            return risk
        numbers = [
            self._let_in(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)
            for place, weight in zip(places, weights, strict=True)
        ]
        self._tickets[numbers[-1]].risk = risk
        return numbers

    def _let_in(
        self, lane: Lane, expected: ExpectedTimes, deadline_s: float, place: Place, weight: int, full: bool
    ) -> int:
        number = next(self._ticket_ids)
        ticket = self._tickets[number] = Ticket(number, deadline_s, place, weight)
        ticket.expected = expected
        if full:
            ticket.kind = RowKind.FULL
        elif self.limits.audit_share or self.limits.answers_early:
            self._audits.draw(ticket)
        lane.entry.add(ticket)
        self._nothing_to_launch = self._nothing_to_launch and not lane.may_launch_newcomer
        if deadline_s < self._next_deadline_s:
            self._next_deadline_s = deadline_s
        return number

    def tick(self, now_s: float) -> list[Launch]:
        """Drop what has expired, and launch what can be launched."""
        if now_s >= self._next_deadline_s:
            self._expire(now_s)
        launches: list[Launch] = []
        if self._nothing_to_launch and now_s < self._nearly_idle_at_s:
            return launches
        self._nothing_to_launch, self._ticked_s, self._nearly_idle_at_s = True, now_s, inf
        for lane in self._lanes:
            for group, stages in lane.by_group:
                while choice := choose(lane, group, stages, now_s):
                    queue, replica = choice
                    tickets, late = form_batch(queue, now_s)
                    if late:
                        self._end_late(late)
                    if tickets:
                        launches.append(self._launch(lane, queue, replica, tickets, now_s))
                if group.early_s and any(queue.size for stage in stages for queue in stage.shared.values()):
                    self._nearly_idle_at_s = min(self._nearly_idle_at_s, group.nearly_idle_at_s(now_s))
        if self._audits.waiting:
            launches += [self._launch(*alone, now_s) for alone in self._audits.alone(now_s)]
        return launches

    def _launch(self, lane: Lane, queue: Queue, replica: Replica, tickets: list[Ticket], now_s: float) -> Launch:
        owed = 0 if tickets[0].told else queue.weigh(tickets)
        if owed and self._audits.waiting:
            tickets = tickets + self._audits.joining(queue, owed)
        kinds = self._audits.kinds(tickets, crowded=queue.size > 0 or bool(replica.pending_s))
        return self._flights.begin(lane, queue, replica, tickets, owed, kinds, now_s)

    def released(
        self, launch_id: int, now_s: float, rows: Sequence[int], blocks: Sequence[int], labels: Sequence[object] = ()
    ) -> Sequence[int]:
        """These inputs of a launch have left, each behind its block; the launch goes on.

        Returns those that had no answer before. `labels` are needed only of launches with `kinds`.
        """
        flight = self._flights[launch_id]
        if rows:
            flight.ran_to(max(blocks) + 1)
        if flight.owed and (watched := flight.watched) in rows:
            flight.compare(blocks[rows.index(watched)], now_s)
        tickets = flight.tickets
        fresh = [row for row in rows if not tickets[row].ended]
        self._settle([tickets[row] for row in fresh], now_s if flight.queue.owner.is_promised else -inf)
        if flight.launch.kinds:
            for row, block, label in zip(rows, blocks, labels, strict=True):
                self._audits.hear(tickets[row], block, label, flight.launch, flight.queue.stage)
        self._end([tickets[row] for row in fresh], Outcome.ANSWERED)
        return fresh if flight.launch.kinds else rows

    def passed(self, launch_id: int, block: int) -> None:
        """The inputs of a launch that have not left stand before this block, or further."""
        self._flights[launch_id].ran_to(block)

    def completed(
        self, launch_id: int, now_s: float, survivors: Mapping[int, Place], stop: int | None = None
    ) -> float | None:
        """A launch came back: rows that survived are somewhere else now, all others have their answer.

        They stand before block `stop`, if not where the launch was to end. Returns the seconds since the launch before
        it came back, if this one was waiting then. None where fronts share replicas: launches of others are not seen.
        """
        flight = self._land(launch_id, now_s)
        followed_s = flight.replica.followed_s(flight.started_s, now_s) if self.limits.share == 1.0 else None
        self._come_back(flight, now_s, survivors, stop)
        return followed_s

    def _come_back(self, flight: PendingLaunch, now_s: float, survivors: Mapping[int, Place], stop: int | None) -> None:
        launch, tickets = flight.launch, flight.tickets
        stop = launch.stop if stop is None else stop
        if survivors:
            flight.ran_to(stop)
        flight.judge(now_s)
        if flight.owed:
            self._audits.earn(flight.planned_s)
            flight.compare(stop - 1, now_s)
            gone = [ticket for row, ticket in enumerate(tickets) if row not in survivors and not ticket.ended]
            self._settle(gone, now_s if flight.queue.owner.is_promised else -inf)
        if survivors and stop >= self.route.num_blocks:
            raise ValueError(f"launch {launch.id} ran to the last block, yet {len(survivors)} inputs stayed inside")
        self._end([ticket for row, ticket in enumerate(tickets) if row not in survivors], Outcome.ANSWERED)
        if not survivors:
            return
        kept_by = launch.replica if launch.keep else None
        for row, place in survivors.items():
            ticket = tickets[row]
            ticket.place, ticket.cursor, ticket.retries, ticket.kept_by = place, stop, 0, kept_by
        staying = [tickets[row] for row in survivors]
        self._wait(staying, flight.lane)
        if launch.kinds and flight.lane in self._lanes:
            self._audits.wait(flight.lane, [ticket for ticket in staying if ticket.told], now_s)

    def failed(
        self, launch_id: int, now_s: float, reason: str, fault: Fault = Fault.NETWORK, *, lost: bool = False
    ) -> None:
        """A launch did not come back. Its inputs are still where they were: they try again, on another replica.

        `lost`: their state went with a replica, so they begin again, as the inputs that came in. So do inputs that the
        replica has kept for itself, since no other can have them. A replica that only finds out that another has gone
        (Fault.STATE) goes on working.

        Where shadows were aboard, they may be the cause. So the inputs first try again without them, as they were.
        """
        flight = self._land(launch_id, now_s)
        if fault is not Fault.STATE:
            flight.queue.owner.group.distrust(flight.replica, now_s)
        in_doubt = bool(flight.launch.kinds) and self._audits.give_up(flight.tickets) and fault is not Fault.REPLICA
        again = lost or (not in_doubt and (fault is Fault.STATE or flight.queue.keeper is not None))
        for ticket in flight.tickets:
            ticket.reach(flight.stop)
            if fault is Fault.REPLICA:
                ticket.ended_with |= {flight.replica.name}
            elif not in_doubt:
                ticket.retries += 1
                ticket.restarts += again
            if again:
                ticket.begin_again()
        given_up = [ticket for ticket in flight.tickets if ticket.attempts() > self.limits.retries]
        self._end(given_up, Outcome.FAILED, reason, fault)
        self._wait(flight.tickets, flight.lane)

    def abandon(self, ticket_id: int) -> None:
        """Nobody waits for this input's answer any more. A launch that holds it runs on; nothing follows."""
        if ticket := self._tickets.get(ticket_id):
            if ticket.queue is None:
                ticket.reach(self._flights.reached(ticket))
            self._settle([ticket], -inf)
            self._end([ticket], Outcome.ABANDONED)

    def audits(self) -> list[Audit]:
        """The audits that have come to their end since the last call."""
        return self._audits.done()

    def endings(self) -> list[Ending]:
        """What has ended since the last call."""
        endings, self._endings = self._endings, []
        return endings

    # What changes while inputs are inside

    def reroute(self, route: Route, groups: Mapping[str, Collection[str]]) -> None:
        """Follow another plan, or other replicas, from now on. Inputs go on from where they stand.

        Launches come back as they are. Inputs whose state was on a replica that has gone begin again.
        """
        if missing := set(route.groups) - set(groups):
            raise ValueError(f"no replicas were named for group {min(missing)!r}")
        waiting = [(lane, queue.take_first(queue.size)) for lane in self._lanes for queue in list(lane.queues())]
        benched = {name: each for group in self._groups.values() for name, each in group.on_the_bench.items()}
        self._groups = {name: self._groups.get(name) or Group(name, self.limits) for name in groups}
        for name, group in self._groups.items():
            group.follow(groups[name], benched)
        if not self._lanes or route != self.route:
            self.route, self._lanes = route, [Lane(each, self._groups, self.limits) for each in route.pipelines]
            self._audits.forget()  # they were answered under another plan
        for lane in self._lanes:
            lane.forget_gone()
        self._audits.forget(lambda queue: queue.is_gone)
        self._nothing_to_launch = False
        # Nobody is let into a lane without a way out, unless there is no other.
        self._open = [lane for lane in self._lanes if lane.open] or self._lanes
        for lane, tickets in waiting:
            self._wait(tickets, lane)

    def limit(self, limits: Limits) -> None:
        """Keep to these limits from now on, since other fronts have gone or come."""
        self.limits = limits
        self._audits.limit(limits)
        for group in self._groups.values():
            group.limit(limits)
        self._nothing_to_launch = False

    # What a driver asks

    @property
    def inside(self) -> int:
        """Admitted inputs that have not ended."""
        return len(self._tickets)

    @property
    def wake_s(self) -> float:
        """When `tick` should be called if nothing else happens; inf: never.

        A deadline passes then, or a replica becomes nearly idle that somebody waits for.
        """
        deadline_s, idle_at_s = self._next_deadline_s, self._nearly_idle_at_s
        return deadline_s if deadline_s < idle_at_s else idle_at_s

    def waiting(self) -> dict[tuple[str, int], int]:
        """How many inputs wait, by the group that will run them and their next block."""
        sizes: dict[tuple[str, int], int] = {}
        for queue in self._queues():
            where = queue.stage.group, queue.cursor
            sizes[where] = sizes.get(where, 0) + queue.size
        return sizes

    def benched(self, now_s: float) -> list[str]:
        """Replicas that are too slow, and have been for a while."""
        return sorted({name for group in self._groups.values() for name in group.benched(now_s)})

    def replicas(self) -> dict[str, int]:
        """How many replicas each group has. Inputs that need a group without any wait."""
        return {name: len(group.members) for name, group in self._groups.items()}

    def needed_s(self, now_s: float, left_s: float, weight: int = 1) -> float:
        """How much time inputs of this weight must have to be admitted now, if they have about so much.

        Where there are several lanes, they are taken to spread over them.
        """
        last = min(weight, self.route.length or 1)
        more = (weight - last) // len(self._open)
        lane, expected = soonest(self._open, now_s, last, more)
        needed_s = self._admission.needed_s(lane, expected, left_s, last)
        if (
            self._tickets and not lane.busy and not more
        ):  # others are busy: its own table decides, as in `Admission.risk`
            return min(needed_s, lane.alone_s(last))
        return needed_s

    def timeout_s(self, launch_id: int) -> float:
        """How long a launch may take before it counts as failed."""
        return self._flights[launch_id].timeout_s(self.limits)

    # How inputs wait, and end

    def _land(self, launch_id: int, now_s: float) -> PendingLaunch:
        self._nothing_to_launch = False
        return self._flights.land(launch_id, now_s)

    def _wait(self, tickets: Iterable[Ticket], lane: Lane) -> None:
        """Let inputs wait in a lane, or in a better one if it is closed or no longer there."""
        staying = [ticket for ticket in tickets if not ticket.ended]
        for ticket in staying:
            if ticket.kept_by is not None and not self._is_here(ticket.kept_by):
                ticket.begin_again()
            if ticket.deadline_s < self._next_deadline_s:
                self._next_deadline_s = ticket.deadline_s
        for (cursor, kept_by), together in groupby(staying, key=lambda ticket: (ticket.cursor, ticket.kept_by)):
            self._lane_for(lane, kept_by).wait(list(together), cursor, kept_by)

    def _is_here(self, replica: str) -> bool:
        return any(replica in group.members for group in self._groups.values())

    def _lane_for(self, lane: Lane, kept_by: str | None) -> Lane:
        if lane in self._open:
            return lane
        near = [each for each in self._open if any(kept_by in group.members for group in each.groups)]
        return near[0] if near else soonest(self._open, self._ticked_s)[0]

    def _expire(self, now_s: float) -> None:
        for queue in list(self._queues()):
            late = []
            while (first := queue.first()) and first.deadline_s <= now_s:
                late += queue.take_first(1)
            self._end_late(late)
        waiting = (first.deadline_s for queue in self._queues() if (first := queue.first()))
        self._next_deadline_s = min(waiting, default=inf)

    def _end_late(self, tickets: list[Ticket]) -> None:
        """End inputs for which there is no time left."""
        first = self.route.edges[0] if self.limits.degrades and self.route.edges else self.route.num_blocks
        kept = [ticket for ticket in tickets if ticket.cursor >= first]  # the first level's answer was promised
        self._settle([ticket for ticket in kept if not ticket.ended], -inf)
        self._end(kept, Outcome.DEGRADED)
        self._settle([ticket for ticket in tickets if not ticket.ended], inf)
        self._end(tickets, Outcome.EXPIRED)

    def _settle(self, tickets: Iterable[Ticket], now_s: float) -> None:
        """These are through, in time or late: what was expected of them no longer counts."""
        for ticket in tickets:
            if (late := ticket.deadline_s < now_s) or ticket.risk:
                self._admission.ended(ticket.risk, late)
                ticket.risk = 0.0

    def _end(self, tickets: Iterable[Ticket], outcome: Outcome, reason: str = "", fault: Fault | None = None) -> None:
        ended, unfinished, is_answer = list[int](), list[Unfinished](), outcome is Outcome.ANSWERED
        for ticket in tickets:
            if not ticket.ended:
                ticket.ended = True
                ended.append(ticket.id)
                if not is_answer and ticket.kind is not RowKind.FULL:
                    unfinished.append(ticket.unfinished)
                del self._tickets[ticket.id]
                if ticket.queue is not None:
                    ticket.queue.forget(ticket)
                    ticket.place = ticket.origin = NOWHERE  # the queue still has it, but its state can be let go
        if ended:
            self._endings.append(Ending(tuple(ended), outcome, reason, fault, tuple(unfinished)))

    def _queues(self) -> Iterator[Queue]:
        for lane in self._lanes:
            yield from lane.queues()
