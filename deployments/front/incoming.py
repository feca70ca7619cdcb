"""A request on its way through the service: as it has arrived, and as it was read."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from isobatch.deployments.front.answers import Answer
from isobatch.deployments.transport.packed import Packed

Format = TypeVar("Format")


class IncomingRequest(NamedTuple):
    """A request that has arrived, before its body is read."""

    kind: str  # the protocol, since the cost per byte depends on it
    size: int  # bytes of the body
    arrived_s: float  # when its first byte arrived
    within_s: float | None  # how long its client waits from its arrival, if a header says so
    until_s: float  # when its client gives up, regardless of headers
    work_s: float  # its expected processor time in this process
    weight: int  # the expected weight of its inputs
    latest_s: float  # when it must be read to be answered in time
    long_wait_s: float  # a longer wait before it is read, without the time of its body, counts as overload
    registered_s: float  # when its headers were read, less the time in which its body had come by then
    full: bool  # its client wants the full network's answer
    priority: int  # of its inputs, where queues go by priority
    part: float  # 1, or the share of its client's time that another front gives to this network, its canary

    def deadline_s(self, usual_s: float) -> float:
        """When its client gives up. `usual_s`: how long a client waits if its headers set no time."""
        return min(self.until_s, self.arrived_s + (self.within_s or usual_s))

    @property
    def gives_up_s(self) -> float:
        """When its client gives up, according to its headers."""
        return self.deadline_s(inf)


class Pictures(list[Any]):
    """Inputs that are pictures: threads read them, since each takes milliseconds."""


@dataclass(frozen=True)
class Content(Generic[Format]):
    """A request that was read: its inputs, and a function that writes their answers."""

    inputs: Packed | Pictures
    write: Callable[[list[Answer]], Format]
    within_s: float | None = None  # how long its client waits, if the body says so
    best: int = 0  # how many of its scores the client wants, the highest ones; 0: all


@dataclass(frozen=True)
class ReadRequest(Generic[Format]):
    """A request whose inputs are encoded."""

    content: Content[Format]
    inputs: Packed
    deadline_s: float
    read_s: float  # processor time to read it, by the clock
    work_clock: Callable[[], float]  # `no_clock`: its processor time is not measured


def no_clock() -> float:
    return 0.0
