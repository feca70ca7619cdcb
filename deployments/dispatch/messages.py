"""The types that the dispatcher and its drivers exchange: limits, launches, refusals, and how inputs end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.profiles.model import OpenRamps

if TYPE_CHECKING:
    from isobatch.deployments.dispatch.batching import Ticket

# The default of `Limits.early_s` where orders cross sockets: about the time from the end of a launch until the replica
# has its next order.
EARLY_S = 0.0015


class Place(NamedTuple):
    """Where the state of an input is: a row of a payload that only the driver reads (a batch or a reference)."""

    payload: Any
    row: int


NOWHERE = Place(None, 0)


class RowKind(IntEnum):
    """How the ramps of a launch treat one of its inputs. Every kind but PLAIN stays inside where a ramp lets it go.

    An AUDITED input is answered at that ramp and goes on as a SHADOW of itself. The shadow's answer at the end shows
    whether the first answer was the full network's. A FULL input asked for the full network and is answered at the end.
    EARLY inputs exist where every input runs on after its answer: they become shadows too, but cost no audit allowance.
    """

    PLAIN = 0
    AUDITED = 1
    SHADOW = 2
    FULL = 3
    EARLY = 4


class Outcome(Enum):
    """How an admitted input ended."""

    ANSWERED = "answered"
    DEGRADED = "degraded"  # the deadline passed, but an earlier level of the cascade has an answer
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

    backlog: int = 4096  # inputs inside at any time
    slack: float = 0.2  # how much longer than planned an input may take, as a share; used until launches were measured
    # Attempts after the first: of a launch at one stage after the network failed, and of an input from block 0. Also
    # the number of replicas that may hang or end while they run an input, before that input is taken for the cause.
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
    degrades: bool = False  # an earlier level of a cascade may answer where there is no time for the next
    answers_early: bool = False  # every input runs on to the end after its answer
    order: "Callable[[Sequence[Ticket], int], list[Ticket]] | None" = None  # of a queue (orders.py); None: by deadline

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must be above 0 and at most 1")


@dataclass(frozen=True)
class Refusal:
    """Why an input was not admitted, and after what time a retry is worthwhile."""

    reason: str
    retry_after_s: float


class Unfinished(NamedTuple):
    """An input that ended before it left the network, with the last block that it is known to have stood before."""

    block: int
    weight: int


class Ending(NamedTuple):
    """Admitted inputs that ended together.

    `unfinished` has an entry for each input that was not answered and had not asked for the full network.
    """

    tickets: "tuple[Ticket, ...]"
    outcome: Outcome
    reason: str = ""
    fault: Fault | None = None  # of inputs that failed
    unfinished: tuple[Unfinished, ...] = ()


class Audit(NamedTuple):
    """The result of one audit: the input was answered at `block`; `agrees`: the full network gives the same answer.

    Where every word of a text is answered, one random word is compared, so the mean is the share of equal words.
    """

    block: int
    agrees: bool


class Launch(NamedTuple):
    """One batch for one replica: merge these places, then run the blocks `cursor..stop` with these ramps.

    `keep`: the survivors go on on the same replica, so they should stay there. `weight` is the sum of `weights`, and
    `room` is the weight of a full launch. `length` is the weight of the inputs that the plan was made for; None: every
    input weighs 1. `kinds` has a `RowKind` for each row, shadows last; empty: all rows are plain. After `timeout_s` the
    launch counts as failed.
    """

    id: int
    replica: str
    cursor: int
    stop: int
    ramps: OpenRamps
    tickets: "tuple[Ticket, ...]"
    places: tuple[Place, ...]
    keep: bool = False
    room: int = 0
    group: str = ""
    weight: int = 0
    length: int | None = None
    weights: tuple[int, ...] = ()
    kinds: bytes = b""
    timeout_s: float = inf

    @property
    def shadows(self) -> int:
        """The number of inputs that already have their answer."""
        return self.kinds.count(RowKind.SHADOW)

    @property
    def shadow_weight(self) -> int:
        return sum(self.weights[len(self.tickets) - self.shadows :]) if self.weights else self.shadows

    @property
    def size(self) -> int:
        """The number of inputs; where inputs have lengths, the number of planned inputs that weigh the same."""
        return len(self.tickets) if self.length is None else max(1, round(self.weight / self.length))
