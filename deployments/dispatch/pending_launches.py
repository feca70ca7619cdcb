"""Launches under way: what each was made of, when it should end, and how long it may take at most."""

from dataclasses import dataclass
from itertools import count
from math import inf

from deployments.dispatch.groups import Replica
from deployments.dispatch.lanes import Lane
from deployments.dispatch.messages import Launch, Limits
from deployments.dispatch.queues import Queue, Ticket


@dataclass(slots=True, eq=False)
class PendingLaunch:
    """A launch that has not come back."""

    launch: Launch
    lane: Lane
    queue: Queue  # that its inputs were taken from
    replica: Replica
    tickets: list[Ticket]
    started_s: float
    planned_s: float  # what the route says that it takes
    ends_s: float  # as expected when it began
    owed: int  # what its inputs weigh, without the shadows among them
    stop: int = 0  # the block up to which it is known to have run
    heard: bool = False  # where the watched row left

    def judge(self, now_s: float) -> None:
        """It came back: how fast its replica is follows from when, and from how far it ran until all had left."""
        self.queue.owner.group.judge(self.replica, self.started_s, self._planned_to_stop_s(), now_s)

    def _planned_to_stop_s(self) -> float:
        """What the route says that it takes as far as it ran."""
        stage, launch = self.queue.stage, self.launch
        if launch.cursor != stage.start:  # inputs of an earlier plan, which stood within the stage
            return self.planned_s
        return stage.until_s(launch.weight)[stage.exit_at((self.stop or launch.stop) - 1)]

    def ran_to(self, stop: int) -> None:
        """It has run up to this block, and maybe further."""
        self.stop = max(self.stop, stop)

    @property
    def watched(self) -> int:
        """The row by which it is told how far off it was when inputs were expected: in turns the first or another."""
        return self.launch.id % (len(self.tickets) - self.launch.shadows)

    def compare(self, block: int, now_s: float) -> None:
        """The watched row left behind this block, or stays there; only the first of both counts."""
        expected = self.tickets[self.watched].expected
        if not self.heard and expected and expected.estimates is self.lane.estimates:
            self.heard = True
            number = expected.estimates.exit_at(block)
            if number is not None:
                expected.learn(number, now_s)

    def timeout_s(self, limits: Limits) -> float:
        """How long it may take before it counts as failed; for ever, where nothing is known of its time."""
        if not self.planned_s:
            return inf
        slowdown = max(1.0, self.queue.owner.group.slowdown)
        usual_s = limits.stuck_factor * slowdown * (self.ends_s - self.started_s)
        return max(limits.stuck_after_s, usual_s) + (0.0 if self.replica.launches else limits.first_launch_s)


class PendingLaunches:
    """Begins launches and lands them: queues and groups know what they owe and what replicas do meanwhile."""

    def __init__(self) -> None:
        self._flights: dict[int, PendingLaunch] = {}
        self._ids = count()

    def __getitem__(self, launch_id: int) -> PendingLaunch:
        return self._flights[launch_id]

    def begin(
        self, lane: Lane, queue: Queue, replica: Replica, tickets: list[Ticket], owed: int, kinds: bytes, now_s: float
    ) -> Launch:
        """Launch these inputs, of which those that are owed an answer weigh `owed`."""
        stage, number = queue.stage, next(self._ids)
        weights = () if stage.length is None else tuple([ticket.weight for ticket in tickets])
        weight = len(tickets) if stage.length is None else sum(weights)
        ids, places = tuple([ticket.id for ticket in tickets]), tuple([ticket.place for ticket in tickets])
        keep, ramps = queue.owner.keep, lane.route.ramps
        launch = Launch(
            number, replica.name, queue.cursor, stage.stop, ramps, ids, places, keep, stage.room, stage.group,
            weight, stage.length, weights, kinds,
        )  # fmt: skip
        planned_s = stage.seconds(weight)
        ends_s = queue.owner.group.begin(replica, planned_s, now_s)
        queue.launched(owed)
        self._flights[number] = PendingLaunch(launch, lane, queue, replica, tickets, now_s, planned_s, ends_s, owed)
        return launch

    def reached(self, ticket: Ticket) -> int:
        """The block up to which the launch is known to have run that has this input."""
        return next((flight.stop for flight in self._flights.values() if ticket in flight.tickets), 0)

    def land(self, launch_id: int, now_s: float) -> PendingLaunch:
        """It is over, however it went."""
        flight = self._flights.pop(launch_id)
        flight.queue.launched(-flight.owed)
        flight.queue.owner.group.end(flight.replica, now_s)
        return flight
