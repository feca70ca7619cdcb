"""Launches that have not come back: their inputs, and what was planned for them."""

from dataclasses import dataclass
from itertools import count
from math import inf

from isobatch.deployments.dispatch.batching import Queue, Ticket
from isobatch.deployments.dispatch.groups import Group, Replica
from isobatch.deployments.dispatch.lanes import ExpectedTimes, Lane
from isobatch.deployments.dispatch.messages import Launch, Limits


@dataclass(slots=True, eq=False)
class PendingLaunch:
    """A launch that has not come back."""

    launch: Launch
    lane: Lane
    queue: Queue  # its inputs were taken from here
    replica: Replica
    started_s: float
    planned_s: float
    owed: int  # the weight of its inputs, without shadows
    stop: int = 0  # the block up to which it is known to have run
    compared: bool = False  # the delay of its sample row was learned

    def judge(self, now_s: float) -> None:
        """Learn its replica's speed: it came back now, after it had run as far as its last input needed."""
        self.queue.owner.group.judge(self.replica, self.started_s, self._planned_to_stop_s(), now_s)

    def _planned_to_stop_s(self) -> float:
        stage, launch = self.queue.stage, self.launch
        if launch.cursor != stage.start:  # inputs of an earlier plan, which stood inside the stage
            return self.planned_s
        return stage.until_s(launch.weight)[stage.exit_at((self.stop or launch.stop) - 1)]

    def ran_to(self, stop: int) -> None:
        """Note that it has run at least up to this block."""
        self.stop = max(self.stop, stop)

    @property
    def sample_row(self) -> int:
        """The row whose delay is learned: launches take turns, so that all rows are sampled equally often."""
        return self.launch.id % (len(self.launch.tickets) - self.launch.shadows)

    def compare(self, block: int, now_s: float) -> None:
        """Learn the delay of the sample row, which left or stays behind this block. Only the first call counts."""
        expected: ExpectedTimes | None = self.launch.tickets[self.sample_row].expected
        if not self.compared and expected and expected.estimates is self.lane.estimates:
            self.compared = True
            number = expected.estimates.exit_at(block)
            if number is not None:
                expected.learn(number, now_s)


class PendingLaunches:
    """Begins and ends launches, and keeps the work that queues owe and the load of replicas up to date."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingLaunch] = {}
        self._ids = count()

    def __getitem__(self, launch_id: int) -> PendingLaunch:
        return self._pending[launch_id]

    def begin(
        self, lane: Lane, queue: Queue, replica: Replica, tickets: list[Ticket], owed: int, kinds: bytes, now_s: float,
        limits: Limits,
    ) -> Launch:  # fmt: skip
        """Launch these inputs. `owed`: the weight of those that have no answer yet."""
        stage, number = queue.stage, next(self._ids)
        weights = () if stage.length is None else tuple([ticket.weight for ticket in tickets])
        weight = len(tickets) if stage.length is None else sum(weights)
        planned_s, group = stage.seconds(weight), queue.owner.group
        ends_s = group.begin(replica, planned_s, now_s)
        launch = Launch(
            number, replica.name, queue.cursor, stage.stop, lane.route.ramps, tuple(tickets),
            tuple([ticket.place for ticket in tickets]), queue.owner.keep, stage.room, stage.group, weight,
            stage.length, weights, kinds, _timeout_s(ends_s - now_s, replica, group, limits) if planned_s else inf,
        )  # fmt: skip
        queue.launched(owed)
        queue.owner.launches(weight)
        self._pending[number] = PendingLaunch(launch, lane, queue, replica, now_s, planned_s, owed)
        return launch

    def reached(self, ticket: Ticket) -> int:
        """The block up to which the launch that holds this input is known to have run."""
        return next((pending.stop for pending in self._pending.values() if ticket in pending.launch.tickets), 0)

    def end(self, launch_id: int, now_s: float) -> PendingLaunch:
        """The launch is over, whether it failed or not."""
        pending = self._pending.pop(launch_id)
        pending.queue.launched(-pending.owed)
        pending.queue.owner.group.end(pending.replica, now_s)
        return pending


def _timeout_s(expected_s: float, replica: Replica, group: Group, limits: Limits) -> float:
    """The time after which a launch counts as failed."""
    usual_s = limits.stuck_factor * max(1.0, group.slowdown) * expected_s
    return max(limits.stuck_after_s, usual_s) + (0.0 if replica.launches else limits.first_launch_s)
