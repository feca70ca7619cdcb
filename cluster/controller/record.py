"""The decisions of a controller as events, and what past events say about plans. A restart reads them again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Field, TypeAdapter

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections, busy_shares
from isobatch.cluster.controller.decide import Trial, served_alike
from isobatch.cluster.controller.sentences import NEARLY_ALL
from isobatch.deployments.front.observed import Observed, merged
from isobatch.optimizer.plan import Plan
from isobatch.profiles.journal import Journal

KEEP_EVENTS = 1500  # lines of 33 hours, at 45 in an hour, with windows of two minutes: a plan may be barred that long
NEWEST_WEIGHT = 0.5  # the weight of the newest value in a running average
HISTORY_WEIGHT_S = 20.0  # seconds of overload that weigh as much as all time before, since one look may be a burst
MOST_DOUBLINGS = 6  # of the time for which a plan is barred: from half an hour to 32 hours
LEAST_INPUTS = 50  # expected inputs of a window from which the kept share is measured
MOST_KEPT = 1.2  # the largest kept share of a promise: more is chance
LEAST_KEPT_SHARE = 0.01  # the smallest one: with a share of nearly 0, no plan would be better than another
LOADED_SHARE = 0.3  # from this share of a plan's goodput on, inputs in time disprove a shortfall
FORGET_S = 21600.0  # seconds of such load, after which about a third of a shortfall is still remembered
LONGEST_START_S = 600.0  # the deployer's longest wait for replicas: if more seconds passed, the clock has jumped
BUSY_SHARE = 0.8  # the share of the time that devices work: with less, inputs are refused for another reason than load
THRESHOLDS = ("tightened", "loosened", "tuned", "gave way", "recovered")  # events that change thresholds only
CHANGES = ("rolled out", "rolled back", "failed")
EXPLORATION = ("looking", "looked")  # all ramps are opened, or closed again
COMMANDS = ("granted", "paused", "resumed")  # of persons and arbiters, also while a plan is rolled out

Action = Literal[
    "began", "stayed", "granted", "rolling out", "rolled out", "rolling back", "rolled back", "waking", "woken",
    "failed", "looking", "looked", "paused", "resumed", "tightened", "loosened", "tuned", "gave way", "recovered",
]  # fmt: skip
# What becomes of events whose plan is still being rolled out.
COMPLETED: Mapping[Action, Action] = {"rolling out": "rolled out", "rolling back": "rolled back", "waking": "woken"}


@dataclass(frozen=True)
class Event:
    """One decision. `after` is the plan that was chosen, None where the plan stayed."""

    number: int
    at_s: float  # seconds since 1970
    what: Action
    why: str
    before: Plan
    after: Plan | None = None
    forced: bool = False  # the running plan could not continue
    gain_promised: float | None = None
    gain_seen: float | None = None  # measured against the estimate for the previous plan in the same time
    judged: bool = False  # the trial of this change has ended
    took_s: float | None = None
    starts: int = 0  # replicas that had to start
    arrivals_per_s: float | None = None  # of the window that led to it
    achieved_per_s: float | None = None  # goodput in that window
    expected_per_s: float | None = None  # the goodput that the running plan promised for these arrivals
    p99_ms: float | None = None
    corrections: Corrections = field(default_factory=Corrections)
    worse: float = 1.0  # how many times more answers disagree with the full network's than `isobatch prepare` saw
    # Devices that are requested from Ray's autoscaler; older files call them `asked`.
    requested: Annotated[Mapping[str, int], Field(validation_alias=AliasChoices("requested", "asked"))] = field(
        default_factory=dict
    )
    paused: bool = False  # whether the controller was paused then: the event that paused it may be forgotten by now
    kept_share: float = 1.0  # of the estimated goodput, by all windows before
    relaxed: bool = False  # whether thresholds had given way to an overload then; older files have the events only

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def with_figures(self, observed: Observed, sustained_per_s: float) -> "Event":
        """The event with the figures of the window that led to it; `sustained_per_s` is by the cost model."""
        if not observed.seconds:
            return self
        p99_s = observed.quantile_s(0.99)
        return replace(
            self,
            arrivals_per_s=observed.arrivals_per_s,
            achieved_per_s=observed.goodput_per_s,
            expected_per_s=min(observed.arrivals_per_s, sustained_per_s),
            p99_ms=p99_s and 1e3 * p99_s,
        )


_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


@dataclass(frozen=True)
class NextStep:
    """`plan` is the plan that should run from now on, None where the plan stays; the event says why.

    `most` is the plan of most goodput, if the decision has searched for it.
    """

    plan: Plan | None
    event: Event
    most: Plan | None = None


class Events:
    """All decisions, oldest first, kept in a file.

    When an event is completed later, another line with the same number replaces the first.
    """

    def __init__(self, path: Path | None) -> None:
        self._journal = Journal(path, _EVENTS.validate_python, KEEP_EVENTS)
        by_number = sorted(self._journal.entries, key=lambda event: event.number)  # stable: the latest line counts
        self._events = {event.number: event for event in by_number}

    @property
    def all(self) -> tuple[Event, ...]:
        return tuple(self._events.values())

    @property
    def last(self) -> Event | None:
        return next(reversed(self._events.values()), None)

    def numbered(self, number: int) -> Event | None:
        return self._events.get(number)

    def add(self, event: Event) -> None:
        self._events[event.number] = event
        self._events.pop(event.number - KEEP_EVENTS, None)
        self._journal.append(event)


class TrackRecord:
    """What past events say: the kept share of promises, barred plans, and how long a start takes.

    `wakes_in_s` is the time from a parked application's next input until its replicas run: a running average.

    `kept_share` is the share of the cost model's goodput that plans reach under load. All plans have one, because it
    differs more between bursts than between plans; a faulty plan fails its trial.
    """

    def __init__(self, events: Events, patience: Patience) -> None:
        self.events, self._patience = events, patience
        self.kept_share = events.last.kept_share if events.last else 1.0
        self.start_s = patience.start_s  # the duration of a roll-out in which replicas start
        self.wakes_in_s, self._has_woken = patience.start_s + patience.look_every_s, False
        self.barred = Barred()
        for event in events.all:
            self._learn(event)

    @property
    def number(self) -> int:
        """That of the next event."""
        return self.events.last.number + 1 if self.events.last else 1

    @property
    def paused(self) -> bool:
        """Whether a person has paused the controller."""
        return self.events.last is not None and self.events.last.paused

    @property
    def is_relaxed(self) -> bool:
        """Whether thresholds have given way to an overload, and have not recovered."""
        changes = [event.what for event in self.events.all if event.what in ("gave way", "recovered")]
        return changes[-1:] == ["gave way"] or (self.events.last is not None and self.events.last.relaxed)

    @property
    def last_step(self) -> Event | None:
        """The last event that is no command; None: there is none."""
        steps = [event for event in self.events.all if event.what not in COMMANDS]
        return steps[-1] if steps else None

    def changes(self, now_s: float) -> int:
        """Recent changes that were not forced by lost devices."""
        return sum(each.what in CHANGES and not each.forced for each in self._recent(self._patience.hold_s, now_s))

    def unchanged_s(self, now_s: float) -> float:
        """How long thresholds have been as they are."""
        changes_s = (event.at_s for event in self._recent(inf, now_s) if event.what in THRESHOLDS)
        return now_s - max(changes_s, default=-inf)

    def tightened(self, now_s: float) -> int:
        """How often thresholds were tightened recently."""
        return sum(each.what == "tightened" for each in self._recent(4 * self._patience.hold_s, now_s))

    def _recent(self, seconds: float, now_s: float) -> Iterator[Event]:
        """The events of this time. Events of later times are from before the clock was set back."""
        return (event for event in self.events.all if now_s - seconds <= event.at_s <= now_s)

    def objection(self, plan: Plan, recent_inputs: int, now_s: float) -> str | None:
        """Why not to change to a plan yet, however good it is. `recent_inputs` are those of the latest windows."""
        if recent_inputs < self._patience.enough_inputs:
            return f"{recent_inputs} recent inputs are known, a change needs {self._patience.enough_inputs}"
        if until_s := self.barred.until_s(plan, now_s):
            minutes = (until_s - now_s) / 60
            return f"the better plan failed before and is not tried again for {minutes:.0f} minutes"
        return None

    @property
    def proven(self) -> list[Plan]:
        """The latest plans that ran since the controller last began, without those that ever failed."""
        plans = list[Plan]()
        for event in reversed(self.events.all):
            if event.what == "began":
                break
            done = [event.after] if event.after and event.what in COMPLETED.values() else []
            plans += done if event.what in COMMANDS else [*done, event.before]  # a command may find all ramps open
        alike: dict[Plan, Plan] = {}
        for plan in plans:
            alike.setdefault(plan.unpromised, plan)
        return [plan for plan in alike.values() if not self.barred.has_failed(plan)]

    def add(self, event: Event) -> None:
        paused = event.what == "paused" or (self.paused and event.what != "resumed")
        self.events.add(replace(event, paused=paused, kept_share=self.kept_share))

    def complete(self, event: Event, what: Action, took_s: float | None, now_s: float, why: str | None = None) -> None:
        """Note how a roll-out went."""
        took_s = took_s and min(max(0.0, took_s), LONGEST_START_S)  # the clock may have been set meanwhile
        event = replace(event, what=what, took_s=took_s, at_s=now_s, why=why or event.why)
        self.add(event)
        self._learn(event)

    def resume(self, last: Event, running: Plan, now_s: float) -> None:
        """Note how the last roll-out ended, after a restart."""
        if last.what in ("looking", *COMPLETED):
            arrived = last.after is not None and served_alike(last.after, running)
            if not (arrived or last.what == "rolling out"):  # only these events may end late
                if last.what == "rolling back":
                    self.try_again()
                last = replace(last, after=None)
            why = f"{last.why}; the controller was restarted meanwhile"
            self.complete(last, COMPLETED.get(last.what, "rolled out") if arrived else "stayed", None, now_s, why)

    def try_again(self) -> None:
        """Begin the latest trial again: the plan that failed in it still runs."""
        if change := self._latest_change:
            self.events.add(replace(change, gain_seen=None, judged=False))

    def arrived_after_all(self, plan: Plan, now_s: float) -> bool:
        """Whether the last roll-out has led to this plan after all, which is then noted: a restart or a lost deployer
        seemed to have ended it."""
        last = self.last_step
        ended = last and last.what in ("stayed", "rolling back") and last.after and served_alike(last.after, plan)
        if not last or not ended:
            return False
        what = COMPLETED.get(last.what, "rolled out")
        self.complete(last, what, None, now_s, why=f"{last.why}; it has arrived since")
        return True

    def trial(self, running: Plan) -> Trial | None:
        """The trial of the running plan, from its beginning; None: it has ended, or the plan had to run."""
        change = self._latest_change
        if not change or not change.after or change.what != "rolled out" or change.forced or change.judged:
            return None
        return Trial(change.number, change.before, change.kept_share) if served_alike(change.after, running) else None

    @property
    def _latest_change(self) -> Event | None:
        changes = "began", *COMPLETED.values()
        return next((event for event in reversed(self.events.all) if event.what in changes), None)

    def end_trial(self, number: int, gain: float | None) -> None:
        if event := self.events.numbered(number):
            self.events.add(replace(event, gain_seen=gain, judged=True))

    def add_window(self, looks: Sequence[Observed], plan: Plan, sustained_per_s: float) -> None:
        """Compare a window, look by look, with the goodput of its plan by the cost model.

        While inputs are refused, the answers are all that the plan sustains. The longer that lasts, the more it counts.
        With fewer inputs, the window shows only that the plan sustains these. A shortfall would outlast its cause, such
        as other work of the machine, as it keeps plans so large that no window shows more. So it is forgotten.
        """
        total, kept_before = merged(looks), self.kept_share
        expected_per_s = min(total.arrivals_per_s, sustained_per_s)
        if expected_per_s * total.seconds < LEAST_INPUTS:
            return
        if full := overloaded(looks, plan):
            seconds = sum(look.seconds for look in full)
            share = sum(look.in_time for look in full) / seconds / sustained_per_s
            share = kept_before + seconds / (seconds + HISTORY_WEIGHT_S) * (share - kept_before)
        elif total.in_time >= NEARLY_ALL * total.answerable:
            loaded_s = total.seconds * (total.goodput_per_s >= LOADED_SHARE * kept_before * sustained_per_s)
            believed = kept_before + loaded_s / (loaded_s + FORGET_S) * (1 - kept_before)
            share = max(kept_before, believed, total.goodput_per_s / sustained_per_s)
        elif total.launches:  # inputs are late for another reason, such as a client that does not wait
            return
        else:  # decoders report no launches
            share = kept_before + NEWEST_WEIGHT * (total.goodput_per_s / expected_per_s - kept_before)
        self.kept_share = min(MOST_KEPT, max(LEAST_KEPT_SHARE, share))

    def _learn(self, event: Event) -> None:
        if event.what == "rolled out" and event.starts and event.took_s is not None:
            self.start_s += NEWEST_WEIGHT * (event.took_s - self.start_s)
        if event.what == "woken" and event.took_s is not None:
            weight = NEWEST_WEIGHT if self._has_woken else 1.0
            self.wakes_in_s += weight * (event.took_s - self.wakes_in_s)
            self._has_woken = True
        if event.after and event.what in ("rolled back", "failed"):
            plans = event.before, event.after
            worse, other = plans if event.what == "rolled back" else plans[::-1]
            self.barred.bar(worse, other, event.at_s, self._patience.hold_s)


def overloaded(looks: Sequence[Observed], plan: Plan) -> list[Observed]:
    """The looks in which inputs were refused from beginning to end while the devices of the plan worked.

    Inputs are also refused for other reasons: a client may send more at once than any plan can answer in time.
    """

    def refuses(at: int) -> bool:
        look = looks[at]
        return look.refused > (1 - NEARLY_ALL) * look.arrivals and max(busy_shares(look, plan).values()) >= BUSY_SHARE

    refusing = [refuses(at) for at in range(len(looks))]
    return [look for at, look in enumerate(looks) if at and all(refusing[at - 1 : at + 2])]


class Barred:
    """Plans that were rolled back, and similar ones, are not tried again for a while.

    A plan is similar if it has a pipeline of the plan that failed, unless the plan that ran instead has it, too.
    """

    def __init__(self) -> None:
        self._failed = set[Plan]()
        # By shapes of pipelines: from when until when they are barred, and how often they were.
        self._bars: dict[frozenset[object], tuple[float, float, int]] = {}

    def bar(self, plan: Plan, other: Plan, now_s: float, seconds: float) -> None:
        """Bar a plan and those like it: each time, and for each other plan that is barred now, for twice as long.

        `other` is the plan that ran before or after it.
        """
        shapes = _shapes(plan) - _shapes(other) or _shapes(plan)
        self._failed.add(plan.unpromised)
        others = sum(until_s > now_s for each, (_, until_s, _) in self._bars.items() if each != shapes)
        _, _, times = self._bars.get(shapes, (0.0, 0.0, 0))
        self._bars[shapes] = now_s, now_s + seconds * 2 ** min(times + others, MOST_DOUBLINGS), times + 1

    def has_failed(self, plan: Plan) -> bool:
        return plan.unpromised in self._failed

    def until_s(self, plan: Plan, now_s: float) -> float | None:
        shapes = _shapes(plan)
        bars = (bar for each, bar in self._bars.items() if each & shapes)
        until_s = max((until_s for from_s, until_s, _ in bars if from_s <= now_s), default=now_s)
        return until_s if until_s > now_s else None


def _shapes(plan: Plan) -> frozenset[object]:
    """The common shape of each pipeline and similar ones: the cuts, and the rough numbers of devices and batch sizes.

    Where a plan on two devices failed, a plan on one of them is not similar: the other may have been lost meanwhile.
    """
    return frozenset(
        frozenset(
            (
                placement.kind,
                placement.replicas.bit_length(),
                split.start,
                split.stop,
                split.ramps,
                split.batch_size.bit_length(),
            )
            for placement in pipeline.placements
            for split in placement.splits
        )
        for pipeline in plan.pipelines
    )
