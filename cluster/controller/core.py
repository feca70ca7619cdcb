"""The controller: observations go in, decisions come out. Pure: no Ray, no clock, no threads.

Its driver (`loop.py`, for a live application and for a simulated one) tells what was observed and when, does what a
decision says, and tells how that went. Inside a window the controller looks for lost devices and surprises; at the
window's end, or at one of those, it decides whether another plan is worth it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.controller.autoscaling import DeviceRequests, beyond
from cluster.controller.beliefs import Peek, PeekSchedule
from cluster.controller.config import Patience
from cluster.controller.decide import (
    Trial,
    Verdict,
    is_idle,
    is_refusing,
    is_swamped,
    lacking,
    moving,
    same,
)
from cluster.controller.inventory import Present
from cluster.controller.knowledge import Knowledge
from cluster.controller.planning import AnyQuestion
from cluster.controller.promise import PromiseKeeper, ThresholdChange
from cluster.controller.record import THRESHOLDS, Event, Events, What
from cluster.controller.sentences import is_content, seen_in_words, shortfall
from cluster.controller.snapshot import Relief, Snapshot
from deployments.front.observed import Observed, merged
from optimizer.plan import Plan
from profiles.errors import UserError
from profiles.windows import History

EARLY = 4  # windows may be closed early so many times faster than on time


@dataclass(frozen=True)
class NextStep:
    """`plan` is what should run from now on, None where the plan stays; the event says why."""

    plan: Plan | None
    event: Event


class Controller:
    """Decides which plan runs. `running` is the plan at the start; `history` and `events` are what it knew before.

    `pinned` is the user's own plan: another one runs only while its devices are not there, or when one is forced.
    """

    def __init__(
        self,
        question: AnyQuestion,
        patience: Patience,
        history: History,
        events: Events,
        running: Plan,
        now_s: float,
        pinned: Plan | None = None,
        keeper: PromiseKeeper | None = None,
        grow_to: Mapping[str, int] | None = None,
    ) -> None:
        self.pinned, self.keeper = pinned, keeper
        self.growth = DeviceRequests(
            grow_to or {}, patience.come_within_s, patience.hold_windows * patience.replan_every_s
        )
        self.patience, self.running = patience, running
        self.present = Present(question.fleet)
        self.known = Knowledge(question, patience, history, events, running)
        self.record = self.known.record
        self.began_s = now_s  # the window
        self._looks: list[Observed] = []
        self._latest: Observed | None = None
        self._trial: Trial | None = None
        self.peek: Peek | None = None  # all ramps are open until the next look
        self._peeks = PeekSchedule(patience, now_s)
        self._devices_changed = False  # since the last decision
        self._relief = Relief()
        if events.last:
            self._go_on(events.last, now_s)

    def _go_on(self, last: Event, now_s: float) -> None:
        """After a restart, find out what became of the roll-out that was under way."""
        self.growth.ask(last.asked, self.present.counts, now_s)
        if self.keeper:
            self.keeper.go_on(last.worse, self.running)
        if last.what == "looking" and same(self.known.question.opened(last.before, self.known.facts()), self.running):
            self.peek = Peek(last.before, last.number)
        elif last.what in ("looking", "rolling out", "rolling back"):
            arrived = last.after is not None and same(last.after, self.running)
            back: What = "rolled back" if last.what == "rolling back" else "rolled out"
            why = f"{last.why}; the controller was restarted meanwhile"
            self.record.ended(last, back if arrived else "stayed", None, now_s, why)

    # What the driver asks

    def must_look(self, observed: Observed, now_s: float) -> bool:
        """Whether inputs are refused, and something can be done about it before the next look is due."""
        if self.peek:  # it may end once it has told something
            return is_refusing(observed) and observed.answered >= self.patience.enough_inputs
        return is_refusing(observed) and self._may_relieve(now_s)

    def look(self, observed: Observed, now_s: float) -> NextStep | None:
        """Called at every look inside a window; None where there is no reason to decide anything yet."""
        observed = self._note(observed)
        if now_s < self.began_s:
            self._set_back(now_s)
            return None
        return self._looked(observed, now_s)

    def window(self, observed: Observed, now_s: float) -> NextStep:
        """Called at the end of a window, and decides what runs in the next."""
        self._note(observed)
        return self._close(now_s)

    def would(self, now_s: float) -> NextStep:
        """What would be decided now; nothing changes."""
        return self._decide(self.seen(), now_s, "")

    def force(self, now_s: float) -> NextStep:
        """Close the window, and take the best plan there is, however little is gained. From then on none is pinned."""
        self.pinned = None
        return self._close(now_s, "asked by hand: ", forced=True)

    def seen(self) -> Observed:
        """What was seen in the window so far."""
        return merged(self._looks) if self._looks else Observed(self.began_s, 0.0, 0, 0, ())

    # What the driver tells

    def follow(self, plan: Plan, now_s: float) -> None:
        """This plan runs; if it is another one than was thought, somebody else has rolled it out."""
        self.running = replace(self.running, thresholds=plan.thresholds)
        if not same(plan, self.running):
            self.running = plan
            self.known.count_as(plan)
            self._trial = self.peek = None
            self._relief.know(None)
            self._tell("began", "another plan was found running", now_s)

    def deployed_anew(self, before: "Controller", now_s: float) -> None:
        """What the user says of the application is another since the controller before this one began.

        What that one had learned holds no more. A look with all ramps open that it had begun is ended.
        """
        self._tell("began", "the application was deployed with another configuration", now_s)
        if before.peek and not self.peek and same(before.running, self.running):
            self.peek = replace(before.peek, number=self.record.number)

    def rolled_out(self, step: NextStep, took_s: float, now_s: float) -> None:
        assert step.plan, "This is a bug: there was nothing to roll out."
        if step.event.what in ("rolling out", "rolling back"):  # the window may not have been closed
            self._learn(None, now_s)
        event, self.running = step.event, step.plan
        if self.known.question.cheapest:
            self._relief.know(None)  # what was known is for other devices
        if self.keeper and event.what not in ("looking", "looked"):  # the plan from before the look runs again
            self.keeper.restart()
        if event.what == "looking":
            self.peek = Peek(event.before, event.number)
        elif event.what in THRESHOLDS:
            self._start_window(now_s)
        elif event.what != "looked":
            back = event.what == "rolling back"
            self.record.ended(event, "rolled back" if back else "rolled out", took_s, now_s)
            chosen = not (back or self.pinned or event.forced)  # a plan for fewer devices does less, and is no mistake
            self._trial = Trial(event.number, event.before, self.record.kept(event.before)) if chosen else None
            self._start_window(now_s)

    def failed(self, step: NextStep, reason: str, now_s: float, blameless: bool = False) -> None:
        """The plan from before runs on. `blameless`: nothing speaks against this one, which may be tried at once."""
        event, looked = step.event, step.event.what == "looking"
        if looked:
            self._peeks.peeked_s = now_s  # not again before the next look is due
        if event.what == "rolling back":  # which is tried once, and says nothing against the plan from before
            self._trial, event = None, replace(event, after=None)
        if self.keeper and event.what in THRESHOLDS:
            self.keeper.take_back()
            event = replace(event, worse=self._worse)
        if event.what == "rolling out":
            self._learn(None, now_s)  # the window may not have been closed
            self._relief.wait(now_s + self.patience.replan_every_s / EARLY)
            self._relief.know(None if blameless else self.running)  # as far as is known until the next decision
        told: What = "stayed" if looked or blameless or event.what in THRESHOLDS else "failed"
        self.record.ended(event, told, None, now_s, why=f"{event.why}, but {reason}")
        self._start_window(now_s)

    def pause(self, now_s: float, paused: bool = True) -> None:
        """Go on watching, and change nothing until a person resumes."""
        what: What = "paused" if paused else "resumed"
        self._tell(what, "asked by hand", now_s)

    # How it decides

    def _looked(self, observed: Observed, now_s: float) -> NextStep | None:
        """Whether there is a reason to decide something."""
        if self.peek:
            return self._peeked(self.peek, observed, now_s)
        if late := self.growth.look(self.present.counts, now_s):
            return self._close(now_s, f"{late}: ")
        if self.keeper and self.record.paused:
            self.keeper.watch(observed)
        elif self.keeper and (change := self.keeper.look(observed, self.running, self.known.facts())):
            return self._adjusted(change, now_s)
        if step := self._corrected(observed, now_s):
            return step
        if now_s - self.began_s >= self.patience.replan_every_s * (1 - 1e-9):
            return self._close(now_s)
        if self._early(now_s) and (latest := self._surprise()):
            return self._close(now_s, "the inputs are others than were forecast: ", latest)
        if (
            self.known.question.cheapest
            and self._early(now_s)
            and is_swamped(observed, self.known.promises_per_s(self.running))
        ):
            return self._close(now_s, "more arrive than the plan sustains: ")
        missing = lacking(self.running, self.present.counts)
        if self._devices_changed and (missing or self._early(now_s)):
            return self._close(now_s)
        return None

    def _corrected(self, observed: Observed, now_s: float) -> NextStep | None:
        """The running plan was a mistake, or refuses inputs that another would answer."""
        if self._trial and (step := self._judged(self._trial, now_s)):
            return step
        return self._relieved(now_s) if is_refusing(observed) else None

    @property
    def ramps(self) -> Collection[int]:
        """The ramps that are open in every pipeline of the running plan."""
        return set.intersection(*(set(pipeline.ramps) for pipeline in self.running.pipelines))

    @property
    def requested(self) -> dict[str, int]:
        """The devices that Ray's autoscaler must be told of."""
        return self.growth.beyond_those_used(self.running.devices(), self.present.counts)

    def _note(self, observed: Observed) -> Observed:
        """Remember what was observed; returns it as plans count it."""
        observed = observed.counted_in(self.running.length)
        self._looks.append(observed)
        self._latest = observed
        if observed.devices and self.present.look(observed.devices):
            self._devices_changed = True
            self._relief.know(None)
        if self._trial:
            self._trial.add(observed)
        return observed

    def _early(self, now_s: float) -> bool:
        return now_s - self.began_s >= self.patience.replan_every_s / EARLY

    def _surprise(self) -> Observed | None:
        return self.known.beliefs.surprise(self._looks, self.ramps, self.patience.enough_inputs)

    def _close(self, now_s: float, because: str = "", latest: Observed | None = None, forced: bool = False) -> NextStep:
        seen = self.seen()
        if self._learn(latest, now_s):
            stay = forced or self.record.paused
            if self.keeper and not stay and (change := self._at_window(self.keeper, seen, now_s)):
                return self._adjusted(change, now_s)
        self._start_window(now_s)
        self._devices_changed = False
        step = self._decide(seen, now_s, because, forced)
        self.growth.ask(step.event.asked, self.present.counts, now_s)
        self.record.add(step.event)
        return step

    def _at_window(self, keeper: PromiseKeeper, seen: Observed, now_s: float) -> ThresholdChange | None:
        windows = self.record.unchanged_s(now_s) / self.patience.replan_every_s
        often, full_share = self.record.tightened(now_s), self.known.beliefs.full_share
        return keeper.window(seen, self.running, self.known.facts(), windows, often, full_share)

    def _adjusted(self, change: ThresholdChange, now_s: float) -> NextStep:
        """Other thresholds for the plan that runs."""
        event = self._event(now_s, self.seen())
        self._start_window(now_s)
        plan = replace(self.running, thresholds=change.thresholds)
        self.record.add(event := replace(event, what=change.what, why=change.why))
        return NextStep(None if plan == self.running else plan, event)

    def _with_thresholds(self, plan: Plan) -> Plan:
        """A plan with the thresholds that keep the promise at its ramps."""
        return replace(plan, thresholds=self.keeper.thresholds(plan, self.known.facts())) if self.keeper else plan

    def _learn(self, latest: Observed | None, now_s: float) -> bool:
        """Learn from the window so far; returns whether it had anything to tell."""
        learned = self.known.learn(self._looks, self.running, self.ramps, latest)
        if learned and self.known.beliefs.surprised:
            self._peeks.surprised_s = now_s
        return learned

    def _start_window(self, now_s: float) -> None:
        self._looks, self.began_s = [], now_s

    def _set_back(self, now_s: float) -> None:
        """The clock was set back: nobody knows how long the window took, and it would not end for as long as that."""
        self._start_window(now_s)
        self._trial = None
        self._peeks.peeked_s = self._peeks.surprised_s = now_s

    def _decide(self, seen: Observed, now_s: float, because: str, forced: bool = False) -> NextStep:
        """By what is there. Where devices that may come would be worth it, they are asked for, and nobody waits."""
        here = self.present.counts
        if seen.seconds and not lacking(self.running, here):  # what was lost says why, whatever came
            because = f"{because}{seen_in_words(seen)}; "
        if self.record.paused:
            return self._decide_with(here, seen, now_s, because, forced)
        hoped = here if is_idle(seen) else self.growth.hoped(here, now_s)
        wish = step = self._decide_with(hoped, seen, now_s, because, forced)
        wanted = self.growth.of_those((wish.plan or self.running).devices())
        if missing := beyond(wanted, here):
            step = self._decide_with(here, seen, now_s, because, forced)
            why = f"{step.event.why}; {missing} are asked for: {wish.event.why.removeprefix(because)}"
            step = replace(step, event=replace(step.event, why=why))
        if step.event.what == "looking":  # what is wished for is decided afterwards
            return step
        runs = self.growth.of_those((step.plan or self.running).devices())
        asked = {kind: max(count, runs[kind]) for kind, count in wanted.items()}
        return replace(step, event=replace(step.event, asked=asked))

    def _decide_with(
        self, counts: Mapping[str, int], seen: Observed, now_s: float, because: str, forced: bool
    ) -> NextStep:
        moment = self._moment(counts, seen, now_s)
        event = self._event(now_s, seen)
        try:
            better, verdict = moment.decided(forced)
            if moment.weighs_goodput:
                self._relief.know(moment.most.plan)
        except UserError as error:
            return NextStep(None, replace(event, why=f"{because}there is no plan: {error}"))
        short = shortfall(self.running, moment.running.goodput_per_s, self.known.corrections, moment.running.kept)
        why = "; ".join(filter(None, (because + verdict.why, short)))
        event = replace(event, why=why, gain_promised=verdict.gain)
        if not is_idle(seen) and self._should_peek(verdict, moment.facts, now_s):
            why = "closed ramps are opened for a moment, to see who leaves there"
            opened = self.known.question.opened(self.running, moment.facts)
            return NextStep(opened, replace(event, what="looking", why=because + why))
        return self._step(event, better, verdict)

    def _step(self, event: Event, better: Plan, verdict: Verdict) -> NextStep:
        if not verdict.moves:
            return NextStep(None, event)
        plan = self._with_thresholds(better)
        starts = moving(self.running, plan).starts
        return NextStep(plan, replace(event, what="rolling out", after=plan, starts=starts, forced=verdict.must))

    def _moment(self, counts: Mapping[str, int], seen: Observed, now_s: float) -> Snapshot:
        rush_per_s = 0.0 if self._latest is None or is_content(self._latest) else self._latest.arrivals_per_s
        return Snapshot(self.running, self.pinned, self.known, self.patience, counts, seen, now_s, rush_per_s)

    def _may_relieve(self, now_s: float) -> bool:
        """Whether there may be a plan of more goodput on the same devices: one is known, or none was sought yet."""
        fixed = self.record.paused or self.pinned or self.known.question.answers_early
        return not fixed and self._relief.may_help(self.running, now_s)

    def _relieved(self, now_s: float) -> NextStep | None:
        """Inputs are refused: the plan of most goodput on these devices runs at once, if it sustains more.

        What was seen is learned when it runs: that may take longer than inputs should be refused.
        """
        here, uses = self.present.counts, self.running.devices()
        if not self._may_relieve(now_s) or lacking(self.running, here):
            return None
        same_devices = {kind: uses.get(kind, 0) for kind in here} if self.known.question.cheapest else here
        if not (found := self._relief.sought(self._moment(same_devices, self.seen(), now_s))):
            return None
        plan, verdict = found
        event = replace(self._event(now_s, self.seen()), why=verdict.why, gain_promised=verdict.gain)
        step = self._step(event, plan, verdict)
        self.record.add(step.event)
        return step

    def _judged(self, trial: Trial, now_s: float) -> NextStep | None:
        """Return to the plan before, where the new one turned out worse."""
        if trial.seen is None or trial.seen.seconds < self.patience.replan_every_s / 2:
            return None
        result = trial.judge(self.known.promises_per_s, self.patience.least_loss)
        if result and result.failed and not self.record.paused and not lacking(trial.before, self.present.counts):
            self.record.saw(trial.number, result.gain)
            event = self._event(now_s, trial.seen)
            why = f"worse than the plan before: {result.why}"
            before = self._with_thresholds(trial.before)
            self.record.add(event := replace(event, what="rolling back", why=why, after=before))
            return NextStep(before, event)
        if trial.seen.seconds >= self.patience.replan_every_s:
            if result:
                self.record.saw(trial.number, result.gain)
            self._trial = None
        return None

    def _should_peek(self, verdict: Verdict, facts: Any, now_s: float) -> bool:
        if self._trial or self.pinned or self.record.paused or lacking(self.running, self.present.counts):
            return False
        if self.keeper and self.keeper.worse > 1.0:  # the thresholds of closed ramps are those that broke the promise
            return False
        return self._peeks.is_due(self.running, facts.ramp_blocks, now_s, idle=not verdict.moves)

    def _peeked(self, peek: Peek, observed: Observed, now_s: float) -> NextStep:
        """Learn from the look with all ramps open, and close them again."""
        before = self.known.beliefs.survival
        self.known.beliefs.peeked(observed, self.ramps)
        self._looks.pop()  # which the beliefs count
        self.peek, self._peeks.peeked_s, self._devices_changed = None, now_s, True
        off = max(abs(was - now) for was, now in zip(before, self.known.beliefs.survival, strict=True))
        why = f"{observed.answered} inputs were seen with all ramps open: survival is off by up to {off:.0%}"
        event = replace(self._event(now_s), number=peek.number, what="looked", why=why, before=peek.before)
        self.record.add(event)
        return NextStep(peek.before, event)

    @property
    def _worse(self) -> float:
        return self.keeper.worse if self.keeper else 1.0

    def _tell(self, what: What, why: str, now_s: float) -> None:
        self.record.add(replace(self._event(now_s), what=what, why=why))

    def _event(self, now_s: float, seen: Observed | None = None) -> Event:
        """With what is known now, and the figures of what was seen."""
        corrections, asked = self.known.corrections, self.growth.asked
        number, plan = self.record.number, self.running
        event = Event(number, now_s, "stayed", "", plan, corrections=corrections, worse=self._worse, asked=asked)
        return event.after_seeing(seen, self.known.promises_per_s(plan)) if seen else event
