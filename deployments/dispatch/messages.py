"""The types that the dispatcher and its drivers exchange: limits, launches, refusals, and how inputs end."""

from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from isobatch.deployments.dispatch.batching import Queue, QueueOrder, Ticket
    from isobatch.deployments.dispatch.groups import Replica
    from isobatch.deployments.dispatch.lanes import ExpectedTimes, Lane

# The default of `Limits.early_s` where orders cross sockets: about the time from the end of a launch until the replica
# has its next order.
EARLY_S = 0.0015


class Place(NamedTuple):
    """Where the state of an input is: a row of a payload that only the driver reads (a batch or a reference)."""

    payload: Any
    row: int


NOWHERE = Place(None, 0)


class RowKind(IntEnum):
    """How the ramps of a launch treat one of its inputs. Every kind but PLAIN runs on where it could leave.

    An AUDITED input is answered at that ramp and continues as a SHADOW of itself. The shadow's answer at the end shows
    whether the first answer was the full network's. A FULL input requested the full network and is answered at the end.
    EARLY inputs exist where every input runs on after its answer: they become shadows too, but cost no audit allowance.
    """

    PLAIN = 0
    AUDITED = 1
    SHADOW = 2
    FULL = 3
    EARLY = 4


_RUN_PAST_RAMPS = {RowKind.SHADOW, RowKind.FULL}  # kinds for which no ramp matters


class Outcome(Enum):
    """How an admitted input ended."""

    ANSWERED = "answered"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    FAILED = "failed"


class Fault(Enum):
    """Why a launch did not come back."""

    NETWORK = "the network raised an error"
    REPLICA = "the replica hung, or ended"
    STATE = "survivors that it was to use are lost"


@dataclass(frozen=True)
class Limits:
    """The dispatcher's settings."""

    max_inside: int = 4096  # admitted inputs that have not ended, at most
    slack: float = 0.2  # the share by which an input may exceed its planned time; used until launches were measured
    # Attempts of an input after the first: when the network raised an error, and from block 0 when its state was lost.
    # Also the number of replicas that may hang or end while they run it, before that input counts as the cause.
    retries: int = 2
    early_s: float = 0.0  # a batch that is not full may be sent this long before its replica is expected to be free
    ahead: int = 1  # full batches that may wait at a busy replica; more may wait only to hide a transfer
    straggler_factor: float = 2.0  # a replica this many times slower than its peers is benched
    probe_every_s: float = 5.0  # how often a benched replica gets another launch
    stuck_factor: float = 10.0  # a launch that takes this many times its expected time is tried elsewhere
    stuck_after_s: float = 1.0  # every launch may take this long, whatever was expected
    first_launch_s: float = 30.0  # extra time for a replica's first launch, which compiles kernels and claims memory
    share: float = 1.0  # this front's share of every replica; other fronts use the rest
    audit_share: float = 0.0  # the share of inputs that are audited
    audit_cost: float = 0.01  # the cost that shadows may cause, as a share of the seconds that replicas compute
    tolerance: float = 0.0  # scores that differ, or points that are apart, by no more count as the same answer
    answers_early: bool = False  # every input runs on to the end after its answer
    queue_order: "QueueOrder | None" = None  # which waiting inputs a launch takes; None: by deadline


@dataclass(frozen=True)
class Refusal:
    """Why an input was not admitted, and after what time a retry is worthwhile. `parked`: there are no replicas."""

    reason: str
    retry_after_s: float
    parked: bool = False


class Ending(NamedTuple):
    """Admitted inputs that ended together.

    `unfinished` has an entry for each input that was not answered and had not asked for the full network: the last
    block that it is known to have stood before, and its weight.
    """

    tickets: "tuple[Ticket, ...]"
    outcome: Outcome
    reason: str = ""
    fault: Fault | None = None  # of inputs that failed
    unfinished: tuple[tuple[int, int], ...] = ()


class Audit(NamedTuple):
    """The result of one audit: the input was answered at `block`; `agrees`: the full network gives the same answer.

    Where every word of a text is answered, one random word is compared, so the mean is the share of equal words. Scores
    and points agree within a tolerance.
    """

    block: int
    agrees: bool


class Launch:
    """One batch for one replica: merge these places, then run the blocks `cursor..stop` with these ramps.

    `keep`: the survivors continue on the same replica, so they stay there. `weight` is the sum of `weights`, and `room`
    is the weight of a full launch. `length` is the weight of the inputs that the plan was made for; None: every input
    weighs 1. `kinds` has a `RowKind` for each row, shadows last; empty: all rows are plain. After `timeout_s` the
    launch counts as failed. Only the dispatcher reads `lane`, `queue`, `runner` and `owed`, the weight of its inputs
    without shadows.
    """

    def __init__(
        self, id: int, lane: "Lane", queue: "Queue", runner: "Replica", tickets: "list[Ticket]", owed: int,
        kinds: bytes, now_s: float, limits: Limits,
    ) -> None:  # fmt: skip
        """Begin it: count the load of the replica, and the work that the queue still owes."""
        stage, group = queue.stage, queue.owner.group
        self.id, self.lane, self.queue, self.runner = id, lane, queue, runner
        self.replica, self.group, self.keep = runner.name, stage.group, queue.owner.keep
        # At open ramps, a launch whose inputs all run to the end would stop for nothing.
        self.ramps = lane.route.ramps if not kinds or {*kinds} - _RUN_PAST_RAMPS else frozenset[int]()
        self.cursor, self.stop, self.room, self.length = queue.cursor, stage.stop, stage.room, stage.length
        self.tickets, self.kinds, self.owed, self.started_s = tuple(tickets), kinds, owed, now_s
        self.places = tuple([ticket.place for ticket in tickets])
        self.weights = () if stage.length is None else tuple([ticket.weight for ticket in tickets])
        self.weight = len(tickets) if stage.length is None else sum(self.weights)
        self.ran_to = 0  # the block up to which it is known to have run
        self.compared = False  # the delay of its sample row was learned
        self.planned_s, self.timeout_s = stage.seconds(self.weight), inf
        ends_s = group.begin(runner, self.planned_s, now_s)
        if self.planned_s:
            usual_s = limits.stuck_factor * max(1.0, group.slowdown) * (ends_s - now_s)
            first_s = 0.0 if runner.launches else limits.first_launch_s
            self.timeout_s = max(limits.stuck_after_s, usual_s) + first_s
        queue.launched(owed)
        if owed:  # shadows take only places that nobody else needs
            queue.owner.learn_fill(owed)

    @property
    def shadows(self) -> int:
        """The number of inputs that already have their answer."""
        return self.kinds.count(RowKind.SHADOW) if self.kinds else 0

    @property
    def shadow_weight(self) -> int:
        return sum(self.weights[len(self.tickets) - self.shadows :]) if self.weights else self.shadows

    @property
    def size(self) -> int:
        """The number of inputs; where inputs have lengths, the number of planned inputs that weigh the same."""
        return len(self.tickets) if self.length is None else max(1, round(self.weight / self.length))

    @property
    def sample_row(self) -> int:
        """The row whose delay is learned. Launches choose it in turn, so that all rows are sampled equally often."""
        return self.id % (len(self.tickets) - self.shadows)

    def runs_to(self, stop: int) -> None:
        """Note that it has run at least up to this block."""
        if stop > self.ran_to:
            self.ran_to = stop

    def compare(self, block: int, now_s: float) -> None:
        """Learn the delay of the sample row, which left or stays after this block. Only the first call counts."""
        if self.compared:
            return
        expected: ExpectedTimes | None = self.tickets[self.sample_row].expected
        if expected and expected.estimates is self.lane.estimates:
            self.compared = True
            expected.learn(expected.estimates.exit_at[block], now_s)

    def end(self, now_s: float) -> None:
        """It is over, whether it failed or not."""
        self.queue.launched(-self.owed)
        self.runner.home.end(self.runner, now_s)

    def judge(self, now_s: float) -> None:
        """Learn the replica's speed from this launch, which returned now and ran as far as its last input needed."""
        stage, planned_s = self.queue.stage, self.planned_s
        if self.cursor == stage.start:  # not so for inputs of an earlier plan, which stood inside the stage
            planned_s = stage.until_s(self.weight)[stage.exit_at((self.ran_to or self.stop) - 1)]
        self.runner.home.judge(self.runner, self.started_s, planned_s, now_s)
