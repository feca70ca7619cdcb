"""What the deployer and the fronts of an application say to each other."""

from dataclasses import dataclass, field
from typing import Any

from deployments.dispatch.route import Route
from deployments.front.counts import Counts


@dataclass(frozen=True)
class FrontMessage:
    """What the deployer sends to a front. The front sends its reply, if there is one, under the same number."""

    number: int
    content: Any  # a Graph to follow, or one of the following


@dataclass(frozen=True)
class ReplicaShare:
    """What a front may count on of every replica, from now on: all of it is 1."""

    share: float


@dataclass(frozen=True)
class AskState:
    """Every front is asked for its `FrontState` when one of them is asked for /stats."""


@dataclass(frozen=True)
class AskCounts:
    """Every front is asked for what it has `Observed`."""


@dataclass(frozen=True)
class Usage:
    """What a process takes of its machine: processor time since it began, memory now (0 if the system does not say)."""

    cpu_s: float
    memory_mb: float


@dataclass(frozen=True)
class FrontState:
    """What one front tells the others when one of them is asked for /stats."""

    counts: Counts
    route: Route
    inside: int  # inputs that were admitted and have no answer yet
    waiting: dict[tuple[str, int], int]  # of them, by group and next block
    replicas: dict[str, int]  # of each group
    usage: Usage
    busy_s: dict[str, tuple[str, float]] = field(default_factory=dict)  # of each replica: its kind, and of late

    @property
    def missing(self) -> list[str]:
        """Groups without a replica."""
        return [group for group, count in self.replicas.items() if not count]
