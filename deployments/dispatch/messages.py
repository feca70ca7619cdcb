"""What the dispatcher and its driver tell each other."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deployments.dispatch.pools import Place


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
    retries: int = 2  # launches after the first, per stage, when replicas fail
    ahead: int = 1  # full batches that may wait at a busy replica
    straggler_factor: float = 2.0  # how much slower than its peers a replica may be
    probe_every_s: float = 5.0  # how often a benched replica is given another chance


@dataclass(frozen=True)
class Refusal:
    """Why an input was not admitted, and when it is worth to come again."""

    reason: str
    retry_after_s: float


class Ending(NamedTuple):
    """What became of an admitted input."""

    id: int
    outcome: Outcome
    reason: str = ""


class Launch(NamedTuple):
    """One batch for one replica: merge these places, then run the blocks `cursor..stop` with these ramps.

    `keep`: whoever survives it will be needed on this very replica, so they should stay there.
    """

    id: int
    replica: str
    cursor: int
    stop: int
    ramps: frozenset[int]
    tickets: tuple[int, ...]
    places: tuple[Place, ...]
    keep: bool = False
