"""The messages between the deployer and the fronts of an application."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from isobatch.deployments.dispatch.route import Route
from isobatch.deployments.front.counts import Counts


@dataclass(frozen=True)
class FrontMessage:
    """A message from the deployer to a front. The front's reply, if there is one, has the same number."""

    number: int
    content: Any  # a Graph to follow, a ReplicaShare, or a Question


@dataclass(frozen=True)
class ReplicaShare:
    """The share of every replica that a front may use from now on; 1 is all of it."""

    share: float


class Question(Enum):
    STATE = "its `FrontState`, since a client has asked another front for /stats"
    COUNTS = "its counts (`Observed`), for the controller"


@dataclass(frozen=True)
class Usage:
    """A process's use of its machine: processor time since its start, memory now (0 where the system does not tell)."""

    cpu_s: float
    memory_mb: float


@dataclass(frozen=True)
class FrontState:
    """The state of one front, for the front that answers /stats."""

    counts: Counts
    route: Route
    inside: int  # admitted inputs that have no answer yet
    waiting: dict[tuple[str, int], int]  # inputs that wait, by group and next block
    replicas: dict[str, list[str]]  # by group
    usage: Usage
    busy_s: dict[str, tuple[str, float]] = field(default_factory=dict)  # see `Counts.busy_s`
    parked: bool = False  # the application has no replicas until its next input

    @property
    def missing(self) -> list[str]:
        """Groups without a replica. A parked application is ready: its next input starts replicas."""
        return [group for group, replicas in self.replicas.items() if not replicas and not self.parked]
