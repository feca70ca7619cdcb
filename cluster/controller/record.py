"""What the controller remembers of its own doing; all of it can be read back from the events after a restart."""

from dataclasses import replace

from cluster.controller.config import Patience
from cluster.controller.events import Event, Events, What
from cluster.controller.trial import Barred
from deployments.front.observed import Observed
from optimizer.plan import Plan

SLOWLY = 0.5  # the weight of the newest value
PLANS = 4  # that are remembered
ENOUGH = 50  # inputs of a window that may speak of its plan
MOVES = ("rolled out", "rolled back", "failed")


def nameless(plan: Plan) -> Plan:
    """The plan, whatever was promised of it."""
    return replace(plan, promise=None)


class Record:
    """Events, and what follows from them."""

    def __init__(self, events: Events, patience: Patience) -> None:
        self.events, self._patience = events, patience
        self._kept: dict[Plan, float] = {}  # the share of its promise that each of the latest plans kept
        self.start_s = patience.start_s  # what a roll-out takes in which replicas start
        self.barred = Barred()
        for event in events.all:
            self._learn(event)

    @property
    def number(self) -> int:
        """Of the next event."""
        return self.events.next_number

    @property
    def paused(self) -> bool:
        said = [event.what for event in self.events.all if event.what in ("paused", "resumed")]
        return said[-1:] == ["paused"]

    def changes(self, now_s: float) -> int:
        """Moves of late that nobody had to make."""
        since_s = now_s - self._patience.hold_windows * self._patience.replan_every_s
        return sum(event.what in MOVES and not event.forced and event.at_s >= since_s for event in self.events.all)

    def objection(self, plan: Plan, evidence: int, now_s: float) -> str | None:
        """Why not to move to a plan yet, however good it is. `evidence`: inputs that were seen of late."""
        if evidence < self._patience.enough_inputs:
            return f"{evidence} inputs were seen, {self._patience.enough_inputs} are needed"
        if until_s := self.barred.until_s(plan, now_s):
            minutes = (until_s - now_s) / 60
            return f"the better plan was rolled back, and is tried again in {minutes:.0f} minutes at best"
        return None

    def add(self, event: Event) -> None:
        self.events.add(event)

    def ended(self, event: Event, what: What, took_s: float | None, now_s: float, why: str | None = None) -> None:
        """How a roll-out went."""
        event = replace(event, what=what, took_s=took_s, at_s=now_s, why=why or event.why)
        self.events.add(event)
        self._learn(event)

    def saw(self, number: int, gain: float | None) -> None:
        """What a change really brought."""
        event = next((event for event in self.events.all if event.number == number), None)
        if event and gain is not None:
            self.events.add(replace(event, gain_seen=gain))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The latest that ran: what is known to work."""
        return tuple(self._kept)

    def kept(self, plan: Plan) -> float:
        """The share of its promise that a plan keeps; of one that never ran it is the mean of those that did."""
        known = self._kept.values()
        return self._kept.get(nameless(plan), sum(known) / len(known) if known else 1.0)

    def keep(self, seen: Observed, plan: Plan, sustained_per_s: float) -> None:
        """Compare a window with what its plan should have made of it."""
        expected = min(seen.arrivals_per_s, sustained_per_s)
        if expected * seen.seconds >= ENOUGH:
            share = min(1.2, seen.goodput_per_s / expected)
            before = self._kept.pop(nameless(plan), share)
            self._kept[nameless(plan)] = before + SLOWLY * (share - before)
            for oldest in list(self._kept)[:-PLANS]:
                del self._kept[oldest]

    def _learn(self, event: Event) -> None:
        if event.what == "rolled out" and event.starts and event.took_s is not None:
            self.start_s += SLOWLY * (event.took_s - self.start_s)
        worse = {"rolled back": event.before, "failed": event.after}.get(event.what)
        if worse:
            self.barred.bar(worse, event.at_s, self._patience.hold_windows * self._patience.replan_every_s)
