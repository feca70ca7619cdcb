"""Keeps a promise of agreement with the full network: thresholds tighten when it breaks, and loosen on trial only.

Audits are tested as profiles/agreement.py describes. Thresholds that were tuned for the plan lose nearly all that the
promise allows, so they end as soon as inputs leave elsewhere than before.

Tighter thresholds come from the exit table of `isobatch prepare`, which holds the loss of each choice. Audits measure
how many times larger the loss is now. Only this factor, `worse`, is remembered. It grows with tighter thresholds,
because drifted inputs are wrong where the table is sure. So when a promise breaks again within minutes, the factor is
set larger than the audits of the previous thresholds show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from isobatch.cluster.controller.record import Action
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.early_answers import answered_s
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.plan import Plan, Thresholds, opened
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.tuning import costs_of
from isobatch.profiles.agreement import (
    DOUBT_ALLOWANCE,
    MIN_AUDITS,
    WATCHED_S,
    Agreement,
    PromiseWatch,
    RecentAgreement,
    recent_agreement,
)
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exits import carried, survival_after
from isobatch.profiles.losses import Indices

AIMED_LOSS = 0.5  # the share of the allowed loss that new thresholds aim at, so that chance does not break the promise
LEAST_CHANGE = 1.25  # a smaller change of `worse` is not worth new thresholds
REPEATED = 4.0  # times the measured `worse`, for each time that the promise broke again within minutes
LOOSENED = 2.0  # thresholds loosen by at most this factor of `worse` at a time
MOST_DOUBLINGS = 6  # the wait for the next trial doubles at most this often: 64 windows
OVERLOADED = 0.95  # the share of inputs answered in time below which thresholds give way
RECOVERED = 0.99  # the share of inputs answered in time above which the overload is over


@dataclass(frozen=True)
class ThresholdChange:
    """Thresholds that should be used from now on, and why."""

    what: Action
    why: str
    thresholds: Thresholds


@dataclass
class PromiseKeeper:
    """Watches audits, look by look, and says when thresholds should change.

    `evidence`: the exit table by which they change; None: they stay. `prepared`: the checkpoint's own thresholds.
    `under_load`: the agreement that is enough while inputs are refused. `strict`: without audits, the checkpoint's own
    thresholds are restored. `answers_early`: thresholds gain no goodput, but time until the answer.
    """

    agreement: float  # that is promised
    evidence: Evidence | None = None
    prepared: Mapping[int, float] = field(default_factory=dict)
    under_load: float | None = None
    strict: bool = False
    answers_early: bool = False
    least_gain: float = 0.03  # of thresholds that are tuned for the plan

    def __post_init__(self) -> None:
        self.worse = 1.0
        self.relaxed = False  # thresholds are those of `under_load`
        self._watch = PromiseWatch()
        self._broke_s = -inf  # when the promise broke last
        self._repeats = 0  # how often it broke again within minutes
        self._overloaded_looks = 0  # consecutive looks in which inputs were refused
        self.tuned = False  # thresholds are those for the plan's own ramps
        self._unserved: Action | None = None  # a change that the next look must repeat
        self._audited_s: float | None = None  # when audits were last seen
        self._reported_s = -inf  # when a broken promise without an exit table was last reported
        self._before = self._state

    def recent(self, now_s: float) -> RecentAgreement:
        """The agreement of the last minutes, since thresholds changed, and the state of the promise."""
        return recent_agreement([self._watch], now_s, self.promised)

    @property
    def promised(self) -> float:
        """The agreement that should be kept now."""
        return self._promised(self.relaxed)

    def _promised(self, relaxed: bool) -> float:
        return (self.under_load or self.agreement) if relaxed else self.agreement

    def thresholds(self, plan: Plan, facts: Problem) -> Thresholds:
        """The thresholds that a plan should be rolled out with; empty: the checkpoint's own."""
        return self._thresholds(plan, facts, self.relaxed)

    def _thresholds(self, plan: Plan, facts: Problem, relaxed: bool) -> Thresholds:
        evidence, ramps = self.evidence, opened(plan)
        if evidence is None or (self.worse <= 1.0 and not relaxed and not self.tuned):
            return ()
        if self.worse <= 1.0 and not relaxed:
            return evidence.thresholds(evidence.proven_candidates(ramps, costs_of(plan, facts)), ramps)
        allowed = AIMED_LOSS * (1 - self._promised(relaxed)) / self.worse
        return evidence.thresholds(evidence.agreeing_candidates(ramps, costs_of(plan, facts), allowed), ramps)

    def resume(self, worse: float, running: Plan, relaxed: bool = False, unserved: Action | None = None) -> None:
        """Continue after a restart of the controller. `unserved`: the last change, if it was not rolled out before."""
        self.worse, self.relaxed, self._unserved = worse, relaxed, unserved
        self.tuned = worse <= 1.0 and bool(running.thresholds) and not relaxed
        if unserved:
            self.tuned = unserved == "tuned"

    def restart(self) -> None:
        """Forget the audits of the thresholds before."""
        self._watch.restart()

    def watch(self, seen: Observed) -> None:
        """Count a look, and change nothing."""
        now_s = seen.ended_s
        self._watch.count(seen.audits, now_s, self.promised)
        self._audited_s = now_s if any(seen.audited) or self._audited_s is None else min(self._audited_s, now_s)
        # They may be from before the clock was set back.
        self._broke_s, self._reported_s = min(self._broke_s, now_s), min(self._reported_s, now_s)

    def undo(self) -> None:
        """Undo the latest change, which could not be rolled out."""
        self.worse, self.relaxed, self.tuned, self._broke_s, self._repeats = self._before
        self._overloaded_looks = 0

    @property
    def _state(self) -> tuple[float, bool, bool, float, int]:
        return self.worse, self.relaxed, self.tuned, self._broke_s, self._repeats

    def look(self, seen: Observed, plan: Plan, facts: Problem) -> ThresholdChange | None:
        """Thresholds that must change at once: because the promise is broken, or because inputs are refused."""
        self._before = self._state
        self.watch(seen)
        if what := self._unserved:
            self._unserved = None
            return self._change(what, "the controller was restarted before it had changed thresholds", plan, facts)
        if self._watch.is_alarmed:
            return self._tightened(plan, facts, seen.ended_s)
        if moved := self._watch.depth_change():
            self._watch.doubt(seen.ended_s)
            if self._may_lose_most(plan) and not self.relaxed:
                self.tuned = False
                return self._change("tightened", f"{moved}; thresholds tuned for the plan are given up", plan, facts)
        unwatched = self._audited_s is not None and seen.ended_s - self._audited_s >= WATCHED_S
        if self.strict and unwatched:
            if not (self.relaxed or self._may_lose_most(plan)):
                return None
            self.relaxed = self.tuned = False
            why = "no audit has ended for ten minutes, so the agreement is unknown"
            return self._change("recovered", why, plan, facts)
        return self._relaxed_under_load(seen, plan, facts) if self.under_load else None

    def window(
        self, seen: Observed, plan: Plan, facts: Problem, windows: float, tightened: int, full_share: float = 0.0,
        kept_share: float = 1.0,
    ) -> ThresholdChange | None:  # fmt: skip
        """Thresholds that loosen on trial at the end of a window.

        `windows` have passed since thresholds changed. They were tightened `tightened` times recently, each of which
        doubles the wait. The share `full_share` of inputs asks for the whole network and is not affected. Plans sustain
        the share `kept_share` of their estimated goodput.
        """
        self._before, agreement = self._state, self.recent(seen.ended_s).agreement
        if self.relaxed and self._may_recover(seen, plan, facts, full_share, kept_share):
            self.relaxed = False
            return self._change("recovered", "all inputs can be answered in time again", plan, facts)
        if windows < 2 ** min(tightened, MOST_DOUBLINGS):
            return None
        if self.worse <= 1.0:
            doubted = self._watch.in_doubt(seen.ended_s)
            return None if doubted else self._tuned_to(agreement, plan, facts, full_share)
        least = 1.0
        if agreement and agreement.audits >= MIN_AUDITS:
            least = self._measured_factor(1 - agreement.share, plan)
        elif not seen.answered or sum(seen.exits[:-1]) > 0.01 * seen.answered:
            return None  # inputs leave early or may do so, and too few audits show how well
        if 1.0 < least > self.worse / LEAST_CHANGE:
            return None
        self.worse = max(least, self.worse / LOOSENED)
        why = f"on trial: {agreement or 'no input left early'}, promised {100 * self.promised:.4g} %"
        return self._change("loosened", why, plan, facts)

    def _may_lose_most(self, plan: Plan) -> bool:
        """Whether thresholds may lose nearly all that the promise allows: they were tuned, now or before the start."""
        return self.evidence is not None and self.worse <= 1.0 and (self.tuned or bool(plan.thresholds))

    def _tightened(self, plan: Plan, facts: Problem, now_s: float) -> ThresholdChange | None:
        agreement = self._watch.scored.agreement()
        assert agreement, "This is a bug: nothing was bet."
        self._watch.reset_score()
        broken = f"{agreement}, promised {100 * self.promised:.4g} %: broken"
        evidence = self.evidence
        if evidence is None:
            if now_s - self._reported_s < WATCHED_S:
                return None
            self._reported_s = now_s
            why = f"{broken}; thresholds stay, because there is no exit table beside the checkpoint"
            return ThresholdChange("stayed", why, plan.thresholds)
        self._repeats = self._repeats + 1 if now_s - self._broke_s < WATCHED_S else 0
        self._broke_s = now_s
        self._watch.doubt(now_s)
        measured = (1 - agreement.share) / self._expected(plan)
        # With a larger factor than this one, no input leaves early; up to 1, the checkpoint's own thresholds stay.
        largest = max(LEAST_CHANGE, LOOSENED * AIMED_LOSS * (1 - self.promised) / evidence.smallest_share)
        self.worse = min(max(LEAST_CHANGE * self.worse, REPEATED**self._repeats * measured), largest)
        self.tuned = False
        why = f"{broken}; answers disagree {self.worse:.1f} times as often as 'isobatch prepare' measured"
        return self._change("tightened", why, plan, facts)

    def _relaxed_under_load(self, seen: Observed, plan: Plan, facts: Problem) -> ThresholdChange | None:
        ended = max(0, sum(seen.unfinished) - seen.excused)
        missed = seen.refused + ended + max(0, seen.answered - seen.in_time)  # not those under way
        is_overloaded = min(missed, seen.answerable - seen.in_time) > (1 - OVERLOADED) * seen.arrivals
        self._overloaded_looks = self._overloaded_looks + 1 if is_overloaded else 0
        if self.relaxed or self._overloaded_looks < 2 or self.evidence is None:
            return None
        looser = replace(plan, thresholds=self._thresholds(plan, facts, relaxed=True))
        if self._expected(looser) <= self._expected(plan):  # no more inputs would leave
            return None
        self.relaxed = True
        why = f"{seen.in_time / seen.arrivals:.0%} of the inputs are answered in time"
        return self._change("gave way", f"{why}: agreement of {100 * self.promised:.4g} % is enough", plan, facts)

    def _may_recover(self, seen: Observed, plan: Plan, facts: Problem, full_share: float, kept_share: float) -> bool:
        """Whether the plan would also sustain the arrivals with the thresholds from before the overload."""
        evidence = self.evidence
        if evidence is None or seen.in_time < RECOVERED * seen.answerable:
            return False
        former = replace(plan, thresholds=self._thresholds(plan, facts, relaxed=False))
        now, then = (evidence.survival(self._chosen(each)) for each in (plan, former))
        survival = survival_after(facts.for_plan(plan).survival, now, then, full_share)
        return kept_share * evaluate(plan, facts.surviving(survival)).goodput_per_s >= seen.arrivals_per_s

    def _measured_factor(self, disagreement: float, plan: Plan) -> float:
        """The measured `worse`; 1 where the checkpoint's own thresholds would keep the promise."""
        assert self.evidence
        times = disagreement / self._expected(plan)
        own = times * self.evidence.disagreement(self._chosen(replace(plan, thresholds=())))
        return 1.0 if own <= DOUBT_ALLOWANCE * (1 - self.promised) else max(1.0, times)

    def _tuned_to(
        self, agreement: Agreement | None, plan: Plan, facts: Problem, full_share: float
    ) -> ThresholdChange | None:
        """Thresholds that spend the allowed loss at the plan's own ramps, where this gains and audits watch."""
        evidence = self.evidence
        is_watched = agreement is not None and agreement.verdict(self.promised) == "kept"
        if evidence is None or self.tuned or self.relaxed or not is_watched:
            return None
        now, then = self._chosen(plan), evidence.proven_candidates(opened(plan), costs_of(plan, facts))
        gain = self._gain(plan, facts, evidence.survival(now), evidence.survival(then), full_share)
        if gain < self.least_gain:
            return None
        self.tuned = True
        return self._change("tuned", f"thresholds for the plan's own ramps gain {gain:.1%}", plan, facts)

    def _gain(
        self, plan: Plan, facts: Problem, now: tuple[float, ...], then: tuple[float, ...], full_share: float
    ) -> float:
        """The gain of a plan when survival changes from `now` to `then`, two survivals by the exit table."""
        if self.answers_early:
            before_s, after_s = (answered_s(plan, facts.surviving(carried(each, full_share))) for each in (now, then))
            return before_s / after_s - 1
        survival = survival_after(facts.for_plan(plan).survival, now, then, full_share)
        before, after = evaluate(plan, facts), evaluate(plan, facts.surviving(survival))
        return after.goodput_per_s / before.goodput_per_s - 1

    def _change(self, what: Action, why: str, plan: Plan, facts: Problem) -> ThresholdChange:
        return ThresholdChange(what, why, self.thresholds(plan, facts))

    def _chosen(self, plan: Plan) -> Indices:
        """The candidates of the exit table at the ramps of a plan, by its thresholds."""
        assert self.evidence
        thresholds = dict(self.prepared) | dict(plan.thresholds)
        return self.evidence.nearest({ramp: thresholds[ramp] for ramp in opened(plan) if ramp in thresholds})

    def _expected(self, plan: Plan) -> float:
        """The disagreement of a plan by the exit table."""
        assert self.evidence
        return self.evidence.disagreement(self._chosen(plan))
