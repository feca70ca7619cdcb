"""Decisions, as they are kept and shown: before, after, why, the gain that was promised and the gain that was seen."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from cluster.controller.corrections import Corrections
from deployments.front.observed import Observed
from optimizer.plan import Plan
from profiles.journal import Journal

KEEP = 1000

What = Literal[
    "began",
    "stayed",
    "rolling out",
    "rolled out",
    "rolling back",
    "rolled back",
    "failed",
    "looking",
    "looked",
    "paused",
    "resumed",
]


@dataclass(frozen=True)
class Event:
    """One decision. `after` is the plan that was chosen, None where everything stayed as it was."""

    number: int
    at_s: float  # seconds since 1970
    what: What
    why: str
    before: Plan
    after: Plan | None = None
    forced: bool = False  # the running plan could not go on
    gain_promised: float | None = None
    gain_seen: float | None = None  # against what the plan before would have done meanwhile
    took_s: float | None = None
    starts: int = 0  # replicas that had to start
    arrivals_per_s: float | None = None  # of the window that led to it
    achieved_per_s: float | None = None  # goodput in that window
    expected_per_s: float | None = None  # what the running plan should have made of these arrivals
    p99_ms: float | None = None
    corrections: Corrections = field(default_factory=Corrections)

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Event":
        event: Event = _EVENTS.validate_python(fields)
        return event

    def after_seeing(self, seen: Observed, sustained_per_s: float) -> "Event":
        """The same, with what the window that led to it held; the running plan sustains so much by the cost model."""
        if not seen.seconds:
            return self
        p99_s = seen.quantile_s(0.99)
        return replace(
            self,
            arrivals_per_s=seen.arrivals_per_s,
            achieved_per_s=seen.goodput_per_s,
            expected_per_s=min(seen.arrivals_per_s, sustained_per_s),
            p99_ms=None if p99_s is None else 1e3 * p99_s,
        )

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = _EVENTS.dump_python(self, mode="json")
        return fields


_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


class Events:
    """All decisions, oldest first. What becomes known of one later takes its place.

    A line that is written again, under the number it has, replaces the earlier one.
    """

    def __init__(self, path: Path | None) -> None:
        self._journal = Journal(path, Event.read, KEEP)
        self._events = {event.number: event for event in self._journal.entries}

    @property
    def all(self) -> tuple[Event, ...]:
        return tuple(self._events[number] for number in sorted(self._events))

    @property
    def last(self) -> Event | None:
        return self._events[max(self._events)] if self._events else None

    @property
    def next_number(self) -> int:
        return max(self._events, default=0) + 1

    def add(self, event: Event) -> Event:
        self._events[event.number] = event
        self._events.pop(event.number - KEEP, None)
        self._journal.append(event)
        return event
