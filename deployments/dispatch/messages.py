"""What the dispatcher and its driver tell each other."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deployments.dispatch.pools import Place

EARLY_S = 0.0015  # where orders cross sockets: the news that a replica is free comes so late, and its next order


class Outcome(Enum):
    ANSWERED = "answered"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    FAILED = "failed"


@dataclass(frozen=True)
class Limits:
    """What the dispatcher may do."""

    backlog: int = 4096  # inputs inside at any time
    slack: float = 0.2  # of what is expected, kept free for what is not
    retries: int = 2  # launches after the first, per stage, when replicas fail; and times that an input begins again
    early_s: float = 0.0  # so long before a replica is expected to be free it is given what there is
    ahead: int = 1  # full batches that may wait at a busy replica; more only to hide a transfer
    straggler_factor: float = 2.0  # how much slower than its peers a replica may be
    probe_every_s: float = 5.0  # how often a benched replica is given another chance
    stuck_factor: float = 10.0  # so many times as long as expected a launch may take, before it is tried elsewhere
    stuck_after_s: float = 1.0  # but never less than this
    first_launch_s: float = 30.0  # and this on top for a replica's first: kernels are compiled, memory is claimed
    share: float = 1.0  # of every replica: other fronts, each with a dispatcher of its own, use the rest

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must be above 0 and at most 1")


@dataclass(frozen=True)
class Refusal:
    """Why an input was not admitted, and when it is worth to come again."""

    reason: str
    retry_after_s: float


class Ending(NamedTuple):
    """What became of admitted inputs that ended together."""

    tickets: tuple[int, ...]
    outcome: Outcome
    reason: str = ""


class Launch(NamedTuple):
    """One batch for one replica: merge these places, then run the blocks `cursor..stop` with these ramps.

    `keep`: whoever survives it will be needed on this very replica, so they should stay there. `room`: how many it
    could have held.
    """

    id: int
    replica: str
    cursor: int
    stop: int
    ramps: frozenset[int]
    tickets: tuple[int, ...]
    places: tuple[Place, ...]
    keep: bool = False
    room: int = 0
    group: str = ""
