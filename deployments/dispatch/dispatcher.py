"""The life of an admitted input: admit, tick, launch, completed. No I/O, no clock, no Ray.

A driver (asyncio and Serve, virtual time, or one process) reports events with their times, and `tick` returns the
launches to begin. `isobatch.deployments.dispatch.admission` decides whether an input is admitted, and
`isobatch.deployments.dispatch.batching` what is launched next.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from math import inf

from isobatch.deployments.dispatch.admission import Admission, deciding, soonest
from isobatch.deployments.dispatch.audits import Audits
from isobatch.deployments.dispatch.batching import Queue, Ticket, choose
from isobatch.deployments.dispatch.groups import Group, Replica
from isobatch.deployments.dispatch.lanes import ExpectedTimes, Lane
from isobatch.deployments.dispatch.messages import (
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
)
from isobatch.deployments.dispatch.route import Route


class Dispatcher:
    """Owns every admitted input until `endings` has reported how it ended.

    `chance` returns random numbers from 0 to 1, which decide what inputs are audited.
    """

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
        self.inside = 0  # admitted inputs that have not ended
        self._launches: dict[int, Launch] = {}  # by number, until they come back
        self._admission = Admission()
        self._late_s = -inf  # the deadline of the latest late request: its inputs have the same, and count as one
        self._endings: list[Ending] = []
        self._ticket_ids, self._launch_ids = count(), count()
        self._ticked_s = 0.0  # when `tick` last looked for launches
        self._next_deadline_s = inf  # no waiting input has an earlier deadline
        self._launches_at_s = inf  # when a nearly idle replica may take inputs, or an idle one shadows alone
        self._nothing_to_launch = False  # `tick` has nothing to launch until another event
        self.reroute(route, groups)

    # From admission to the answer

    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        """The input's ticket, or why it is refused. `full`: the input leaves at no ramp."""
        admitted = self._admission.place(self._open, now_s, deadline_s, self.inside, self.limits, weight, full=full)
        if isinstance(admitted, Refusal):
            return admitted
        ticket = self._add(admitted.lane, admitted.expected, deadline_s, place, weight, full)
        ticket.risk = admitted.risk
        return ticket

    def admit_all(
        self, now_s: float, deadline_s: float, places: Sequence[Place], weights: Sequence[int] = (), full: bool = False
    ) -> list[Ticket] | Refusal:
        """The tickets of the inputs of one request, or why it is refused. The input that should end last decides.

        The inputs are taken to spread over the lanes. Without `weights` each weighs 1.
        """
        if len(places) == 1:  # a fast path: most requests have one input
            ticket = self.admit(now_s, deadline_s, places[0], weights[0] if weights else 1, full)
            return ticket if isinstance(ticket, Refusal) else [ticket]
        weights = weights or (1,) * len(places)
        weight, more = deciding(self._open, now_s, weights)
        admitted = self._admission.place(
            self._open, now_s, deadline_s, self.inside + len(places) - 1, self.limits, weight, more, full
        )
        if isinstance(admitted, Refusal):
            return admitted
        tickets = [
            self._add(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)
            for place, weight in zip(places, weights, strict=True)
        ]
        tickets[-1].risk = admitted.risk
        return tickets

    def _add(
        self, lane: Lane, expected: ExpectedTimes, deadline_s: float, place: Place, weight: int, full: bool
    ) -> Ticket:
        ticket = Ticket(next(self._ticket_ids), deadline_s, place, weight)
        self.inside += 1
        ticket.expected = expected
        if full:
            ticket.kind = RowKind.FULL
        elif self.limits.audit_share or self.limits.answers_early:
            self._audits.draw(ticket)
        lane.entry.add(ticket)
        self._nothing_to_launch = self._nothing_to_launch and not lane.may_launch_newcomer
        if deadline_s < self._next_deadline_s:
            self._next_deadline_s = deadline_s
        return ticket

    def tick(self, now_s: float) -> list[Launch]:
        """Drop expired inputs, and return the launches that can begin."""
        if now_s >= self._next_deadline_s:
            self._expire(now_s)
        launches: list[Launch] = []
        if self._nothing_to_launch and now_s < self._launches_at_s:
            return launches
        self._nothing_to_launch, self._ticked_s, self._launches_at_s = True, now_s, inf
        for lane in self._lanes:
            for group, stages in lane.by_group:
                while choice := choose(group, stages, lane.kept_queues, now_s):
                    queue, replica = choice
                    if late := queue.take_late(now_s):  # the rest may be no full batch, which a busy replica would need
                        self._end(late, Outcome.EXPIRED, inf)
                    elif tickets := queue.take(queue.room):
                        launches.append(self._launch(lane, queue, replica, tickets, now_s))
                if group.early_s and any(queue.size for stage in stages for queue in stage.shared.values()):
                    self._launches_at_s = min(self._launches_at_s, group.nearly_idle_at_s(now_s))
        if self._audits.waiting:
            launches += [self._launch(*shadows, now_s) for shadows in self._audits.take_alone(now_s)]
            self._launches_at_s = min(self._launches_at_s, self._audits.due_s(now_s))
        return launches

    def _launch(self, lane: Lane, queue: Queue, replica: Replica, tickets: list[Ticket], now_s: float) -> Launch:
        owed = 0 if tickets[0].early_answer else queue.weigh(tickets)
        if owed and self._audits.waiting:
            tickets = tickets + self._audits.take_joining(queue, owed)
        kinds = self._audits.kinds(tickets, crowded=queue.size > 0 or bool(replica.pending_s))
        number = next(self._launch_ids)
        launch = Launch(number, lane, queue, replica, tickets, owed, kinds, now_s, self.limits)
        self._launches[number] = launch
        return launch

    def released(
        self, launch_id: int, now_s: float, rows: Sequence[int], blocks: Sequence[int], labels: Sequence[object] = ()
    ) -> Sequence[int]:
        """These inputs of a launch have left, each after its block; the launch continues.

        Returns the rows that had no answer before. `labels` are needed only for launches with `kinds`. Without `rows`,
        `blocks` only tell how far the launch has run.
        """
        launch = self._launches[launch_id]
        if blocks:
            launch.runs_to(max(blocks) + 1)
        if not rows:
            return rows
        if launch.owed and (sample := launch.sample_row) in rows:
            launch.compare(blocks[rows.index(sample)], now_s)
        tickets = launch.tickets
        fresh = [row for row in rows if not tickets[row].ended]
        if launch.kinds:
            for row, block, label in zip(rows, blocks, labels, strict=True):
                self._audits.record(tickets[row], block, label, launch)
        self._end([tickets[row] for row in fresh], Outcome.ANSWERED, now_s)
        return fresh if launch.kinds else rows

    def completed(
        self, launch_id: int, now_s: float, survivors: Mapping[int, Place], stop: int | None = None
    ) -> float | None:
        """A launch came back. Rows in `survivors` continue from their new places; all others have their answer.

        Survivors run block `stop` next, by default the end of the launch. Returns the seconds since the launch before
        it came back, if this one waited for it. None where fronts share replicas, as others launch there too.
        """
        stop = self._launches[launch_id].stop if stop is None else stop
        if survivors and stop >= self.route.num_blocks:  # before it comes back, so that it can still fail
            raise ValueError(f"launch {launch_id} ran to the last block, yet {len(survivors)} inputs stayed inside")
        launch = self._come_back(launch_id, now_s)
        followed_s = launch.runner.followed_s(launch.started_s, now_s) if self.limits.share == 1.0 else None
        self._complete(launch, now_s, survivors, stop)
        return followed_s

    def _come_back(self, launch_id: int, now_s: float) -> Launch:
        launch, self._nothing_to_launch = self._launches.pop(launch_id), False
        launch.end(now_s)
        return launch

    def _complete(self, launch: Launch, now_s: float, survivors: Mapping[int, Place], stop: int) -> None:
        tickets = launch.tickets
        if survivors:
            launch.runs_to(stop)
        launch.judge(now_s)
        if launch.owed:
            self._audits.earn(launch.planned_s)
            launch.compare(stop - 1, now_s)
        self._end([ticket for row, ticket in enumerate(tickets) if row not in survivors], Outcome.ANSWERED, now_s)
        if not survivors:
            return
        kept_by = launch.replica if launch.keep else None
        for row, place in survivors.items():
            ticket = tickets[row]
            ticket.place, ticket.cursor, ticket.kept_by = place, stop, kept_by
        staying = [tickets[row] for row in survivors]
        self._wait(staying, launch.lane)
        if launch.kinds and launch.lane in self._lanes:
            self._audits.wait(launch.lane, [ticket for ticket in staying if ticket.early_answer], now_s)

    def failed(
        self, launch_id: int, now_s: float, reason: str, fault: Fault = Fault.NETWORK, *, lost: bool = False
    ) -> None:
        """A launch did not come back. Its inputs try again from their old places, on another replica.

        `lost`: their state went with a replica, so they begin again at block 0. A replica that reports the loss of
        another one (Fault.STATE) continues to work. After an error of the network, inputs that only this replica keeps
        try again there, in smaller launches; after a second one they begin again, too.

        Shadows in the launch may be the cause, so its inputs first try again without any audit.
        """
        launch = self._come_back(launch_id, now_s)
        tickets, kept = launch.tickets, launch.queue.only_replica is not None
        blames_shadows = bool(launch.kinds) and self._audits.stop_auditing(tickets) and fault is not Fault.REPLICA
        if fault is not Fault.STATE:
            launch.runner.home.distrust(launch.runner, now_s, blames_shadows)
        again = lost or (fault is Fault.STATE and not blames_shadows) or (fault is Fault.REPLICA and kept)
        for ticket in tickets:
            ticket.reach(launch.ran_to)
            if not blames_shadows:
                ticket.count_failure(fault, launch.runner, kept)
            if again or (kept and len(ticket.broke_on) > 1):
                ticket.begin_again()
        given_up = [ticket for ticket in tickets if ticket.attempts() > self.limits.retries]
        self._end(given_up, Outcome.FAILED, -inf, reason, fault)
        for ticket in tickets:
            if ticket.ended:
                ticket.clear_replicas()
        self._wait(tickets, launch.lane)

    def abandon(self, ticket: Ticket) -> None:
        """No client waits for this input any more. It ends after its present launch."""
        if ticket.ended:
            return
        if ticket.queue is None:
            ticket.reach(next((each.ran_to for each in self._launches.values() if ticket in each.tickets), 0))
        self._end([ticket], Outcome.ABANDONED, -inf)

    def audits(self) -> list[Audit]:
        """The audits that have finished since the last call."""
        return self._audits.finished()

    def endings(self) -> list[Ending]:
        """The inputs that have ended since the last call."""
        endings, self._endings = self._endings, []
        return endings

    # What changes while inputs are inside

    def reroute(self, route: Route, groups: Mapping[str, Collection[str]], wakes_in_s: float | None = None) -> None:
        """Follow another plan, or other replicas, from now on. Inputs continue from their blocks.

        Running launches are not disturbed. Inputs whose state was on a lost replica begin again. `wakes_in_s`: the
        application is parked, and its replicas run this time after its next input.
        """
        waiting = [(lane, queue.take_first(queue.size)) for lane in self._lanes for queue in list(lane.queues())]
        members = [each for group in self._groups.values() for each in group.members.values()]
        moving = {each.name: each for each in members if each.name not in groups.get(each.home.name, ())}
        self._groups = {name: self._groups.get(name) or Group(name, self.limits) for name in groups}
        for name, group in self._groups.items():
            group.follow(groups[name], moving)
        if not self._lanes or route != self.route:
            lanes = [Lane(pipeline, self._groups, self.limits) for pipeline in route.pipelines]
            self.route, self._lanes = route, lanes
            self._audits.forget()  # shadows were answered under another plan
        for lane in self._lanes:
            lane.forget_gone()
        self._audits.forget(lambda queue: queue.is_gone)
        self._nothing_to_launch = False
        # Inputs are admitted only to lanes that can run them to the end, unless there is none.
        self._open = [lane for lane in self._lanes if lane.open] or self._lanes
        for lane, tickets in waiting:
            if self._admission.wakes_in_s is not None:  # their delay is due to missing replicas, not to launches
                for ticket in tickets:
                    ticket.expected = None
            self._wait(tickets, lane)
        self.parked = wakes_in_s is not None
        self._admission.park(wakes_in_s)

    def limit(self, limits: Limits) -> None:
        """Keep to these limits from now on, since the number of fronts has changed."""
        self.limits = self._audits.limits = limits
        for group in self._groups.values():
            group.limit(limits)
        self._nothing_to_launch = False

    # The state that a driver reads

    @property
    def wake_s(self) -> float:
        """When `tick` should be called without another event: a deadline passes, or launches may begin. Inf: never."""
        deadline_s, launches_at_s = self._next_deadline_s, self._launches_at_s
        return deadline_s if deadline_s < launches_at_s else launches_at_s

    def waiting(self) -> dict[tuple[str, int], int]:
        """The number of waiting inputs, by the group that will run them and their next block."""
        sizes: dict[tuple[str, int], int] = {}
        for queue in self._queues():
            key = queue.stage.group, queue.cursor
            sizes[key] = sizes.get(key, 0) + queue.size
        return sizes

    def benched(self, now_s: float) -> list[str]:
        """Replicas that have been too slow for some time."""
        return sorted({name for group in self._groups.values() for name in group.benched(now_s)})

    def replicas(self) -> dict[str, list[str]]:
        """The replicas in each group. Inputs wait for a group that has none."""
        return {name: [*group.members] for name, group in self._groups.items()}

    def needed_s(self, now_s: float, left_s: float, weight: int = 1) -> float:
        """The time that inputs of this weight need to be admitted now, if they have about `left_s`.

        The inputs are taken to spread over the lanes.
        """
        last = min(weight, self.route.length or 1)
        more = (weight - last) // len(self._open)
        return min([self._needed_in_s(lane, now_s, left_s, last, more) for lane in self._open])

    def _needed_in_s(self, lane: Lane, now_s: float, left_s: float, last: int, more: int) -> float:
        needed_s = self._admission.needed_s(lane, lane.expected(now_s, last, more), left_s, last)
        # In an empty lane its plan decides, as in `Admission.risk`.
        return needed_s if lane.busy else min(needed_s, lane.alone_s(last, more))

    # How inputs wait, and how they end

    def _wait(self, tickets: Iterable[Ticket], lane: Lane) -> None:
        """Let inputs wait in a lane, or in another one if it is closed or was removed."""
        staying = [ticket for ticket in tickets if not ticket.ended]
        for ticket in staying:
            if ticket.kept_by and not any(ticket.kept_by in group.members for group in self._groups.values()):
                ticket.begin_again()
            if ticket.deadline_s < self._next_deadline_s:
                self._next_deadline_s = ticket.deadline_s
        for (cursor, kept_by, broken), run in groupby(staying, key=_waits_with):
            self._lane_for(lane, kept_by).wait(list(run), cursor, kept_by, broken)

    def _lane_for(self, lane: Lane, kept_by: str | None) -> Lane:
        if lane in self._open:
            return lane
        keeping = [other for other in self._open if any(kept_by in group.members for group in other.groups)]
        return keeping[0] if keeping else soonest(self._open, self._ticked_s)[0]

    def _expire(self, now_s: float) -> None:
        for queue in list(self._queues()):
            late = []
            while (first := queue.first()) and first.deadline_s <= now_s:
                late += queue.take_first(1)
            self._end(late, Outcome.EXPIRED, inf)
        waiting = (first.deadline_s for queue in self._queues() if (first := queue.first()))
        self._next_deadline_s = min(waiting, default=inf)

    def _end(
        self, tickets: Iterable[Ticket], outcome: Outcome, at_s: float, reason: str = "", fault: Fault | None = None
    ) -> None:
        """End inputs. Those whose deadline lies before `at_s` count as late (inf: all; -inf: none)."""
        ended, unfinished, is_answer = list[Ticket](), list[tuple[int, int]](), outcome is Outcome.ANSWERED
        for ticket in tickets:
            if not ticket.ended:
                ticket.ended = True
                ended.append(ticket)
                if late := ticket.is_late(at_s) and ticket.deadline_s != self._late_s:
                    self._late_s = ticket.deadline_s
                if late or ticket.risk:
                    self._admission.ended(ticket.risk, late)
                if not is_answer:
                    ticket.clear_replicas(is_cause=outcome is Outcome.FAILED)
                    if ticket.kind is not RowKind.FULL:
                        unfinished.append((max(ticket.cursor, ticket.reached), ticket.weight))
                if ticket.queue is not None:
                    ticket.queue.forget(ticket)
                if ticket.early_answer is None:  # a shadow still needs its state
                    ticket.place = ticket.origin = NOWHERE
        if ended:
            self.inside -= len(ended)
            self._endings.append(Ending(tuple(ended), outcome, reason, fault, tuple(unfinished)))

    def _queues(self) -> Iterator[Queue]:
        for lane in self._lanes:
            yield from lane.queues()


def _waits_with(ticket: Ticket) -> tuple[int, str | None, int]:
    """Inputs of one launch that are alike in this wait together."""
    return ticket.cursor, ticket.kept_by, ticket.broken
