"""What the dispatcher and its driver tell each other."""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from profiles.model import OpenRamps

# Where orders cross sockets, it takes about this long until we hear that a replica is free and it has its next order.
EARLY_S = 0.0015


class Place(NamedTuple):
    """Where an input's state is: a row of something that the driver understands (a batch, a reference to one)."""

    payload: Any
    row: int


NOWHERE = Place(None, 0)


class RowKind(IntEnum):
    """What an input of a launch is. All but the plain ones stay inside at ramps that let them go.

    An audited input is answered there all the same, and is a shadow of itself from then on, whose end tells whether
    that answer was the full network's. Who asked for the full network is answered at its end. Where answers are early,
    every input is like an audited one, but for that its launch is as much its own after the answer as before.
    """

    PLAIN = 0
    AUDITED = 1
    SHADOW = 2
    FULL = 3
    EARLY = 4


class Outcome(Enum):
    """How an admitted input ended."""

    ANSWERED = "answered"
    DEGRADED = "degraded"  # its time was over, but a level of a cascade had an answer that may be given
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
    """What the dispatcher may do."""

    backlog: int = 4096  # inputs inside at any time
    slack: float = 0.2  # how much longer than expected inputs may take before any has shown it
    # Further attempts after the network failed: of a launch at one stage, and of an input from block 0. And how many
    # replicas may hang or end while they run an input, before it is taken for the cause.
    retries: int = 2
    early_s: float = 0.0  # a replica may be sent a batch that is not full this long before it is expected to be free
    ahead: int = 1  # full batches that may wait at a busy replica; more may wait only to hide a transfer
    straggler_factor: float = 2.0  # a replica that is this many times slower than its peers is benched
    probe_every_s: float = 5.0  # how often a benched replica is given another chance
    stuck_factor: float = 10.0  # a launch that takes this many times as long as expected is tried elsewhere
    stuck_after_s: float = 1.0  # but every launch may take this long
    first_launch_s: float = 30.0  # and a replica's first this much longer: it compiles kernels and claims memory
    share: float = 1.0  # of every replica: other fronts, each with a dispatcher of its own, use the rest
    audit_share: float = 0.0  # of the inputs that are audited
    audit_cost: float = 0.01  # what their shadows may cost, as a share of the seconds that replicas compute
    degrades: bool = False  # what the first level of a cascade says is an answer, where time allows no better one
    answers_early: bool = False  # inputs run on to the end after their answers, all of them

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must be above 0 and at most 1")


@dataclass(frozen=True)
class Refusal:
    """Why an input was not admitted, and after what time it is worth asking again."""

    reason: str
    retry_after_s: float


class Unfinished(NamedTuple):
    """An input that ended before it left the network: the block before which it stood, as far as is known."""

    block: int
    weight: int


class Ending(NamedTuple):
    """What became of admitted inputs that ended together.

    `unfinished` has one for each that was not answered and had not asked for the whole network.
    """

    tickets: tuple[int, ...]
    outcome: Outcome
    reason: str = ""
    fault: Fault | None = None  # why they failed
    unfinished: tuple[Unfinished, ...] = ()


class Audit(NamedTuple):
    """An input that was answered at this block has run on to the end: whether its answer was the full network's.

    Where each word of a text is answered, one of them is drawn, which is right as often as all are on average.
    """

    block: int
    agrees: bool


class Launch(NamedTuple):
    """One batch for one replica: merge these places, then run the blocks `cursor..stop` with these ramps.

    `keep`: survivors go on on this very replica, so they should stay there. Its inputs weigh `weight` together, and
    there was `room` for so much. `length`: what an input weighs of which plans are made, and `weights` are those of
    these inputs. None: each weighs 1. `kinds` has a `RowKind` for each, shadows last; empty: all are plain.
    """

    id: int
    replica: str
    cursor: int
    stop: int
    ramps: OpenRamps
    tickets: tuple[int, ...]
    places: tuple[Place, ...]
    keep: bool = False
    room: int = 0
    group: str = ""
    weight: int = 0
    length: int | None = None
    weights: tuple[int, ...] = ()
    kinds: bytes = b""

    @property
    def shadows(self) -> int:
        """How many of its inputs have their answer already."""
        return self.kinds.count(RowKind.SHADOW)

    @property
    def shadow_weight(self) -> int:
        """What they weigh."""
        return sum(self.weights[len(self.tickets) - self.shadows :]) if self.weights else self.shadows

    @property
    def size(self) -> int:
        """Its inputs; where texts are told apart, so many as plans are made of."""
        return len(self.tickets) if self.length is None else max(1, round(self.weight / self.length))
