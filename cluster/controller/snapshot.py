"""Which plan should run by what is known at one moment, and whether that is worth a change from the one that runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from cluster.controller.config import Patience
from cluster.controller.corrections import Corrections
from cluster.controller.decide import (
    Demand,
    Expectation,
    QuickTerms,
    Verdict,
    asked_of,
    chance,
    demand,
    expected_best,
    is_idle,
    lacking,
    latency_terms,
    quick_terms,
    same,
    weigh,
    weigh_answers,
    weigh_dollars,
    weigh_quick,
)
from cluster.controller.knowledge import Knowledge
from cluster.controller.planning import AnyQuestion
from cluster.controller.sentences import is_content, rate
from deployments.front.observed import Observed
from optimizer.model.evaluate import Score
from optimizer.plan import Plan
from profiles.errors import UserError


@dataclass(frozen=True)
class Snapshot:
    """All that a decision rests on. `seen` is the window before it; `counts` are the devices that are there."""

    plan: Plan  # that runs
    pinned: Plan | None
    known: Knowledge
    patience: Patience
    counts: Mapping[str, int]
    seen: Observed
    now_s: float
    rush_per_s: float = 0.0  # at which inputs come just now, where some are missed

    @cached_property
    def question(self) -> AnyQuestion:
        return self.known.asked

    @cached_property
    def facts(self) -> Any:
        return self.known.facts()

    @cached_property
    def running(self) -> Expectation:
        return self._expected(self.plan)

    @cached_property
    def most(self) -> Expectation:
        """The plan of most goodput on the devices that are there."""
        best = self.question.best(*self._now)
        return expected_best(best, self.running, self.known.record, self.score, self.question.objective, self.counts)

    def score(self, plan: Plan) -> Score:
        """What a plan does with what is known now."""
        return self.question.score(plan, self.facts)

    def decided(self, forced: bool = False) -> tuple[Plan, Verdict]:
        """The plan to weigh the running one against, and whether it should run."""
        better, verdict = self._by_goal(forced)
        moves = (verdict.moves or forced) and not same(better.plan, self.plan)
        if self.known.record.paused:
            would = "would change" if moves else "would stay"
            verdict = replace(verdict, moves=False, why=f"paused ({would}: {verdict.why})")
        else:
            verdict = self._unless_objected(better.plan, replace(verdict, moves=moves), forced)
        if self.pinned and not lacking(self.pinned, self.counts):
            return self.pinned, self._as_pinned(self.pinned, verdict)
        return better.plan, verdict

    @property
    def weighs_goodput(self) -> bool:
        """Whether the plan of most goodput was sought."""
        return not (self.question.answers_early or self.question.cheapest or is_idle(self.seen))

    def relieved(self, known: Plan) -> Verdict:
        """While inputs are refused: whether a plan that is known to sustain more on these devices should run now."""
        better, changes = self._expected(known), self.known.record.changes(self.now_s)
        gain, needed = better.gain_over(self.running), asked_of(self.patience.least_gain, changes)
        sustains = f"{rate(better.goodput_per_s)} can be sustained in place of {rate(self.running.goodput_per_s)}"
        moves = gain >= needed and not self.known.record.barred.until_s(known, self.now_s)
        return Verdict(moves, f"{self.seen.refused:,} inputs were refused: {sustains}", gain)

    def _by_goal(self, forced: bool) -> tuple[Expectation, Verdict]:
        if lacking(self.plan, self.counts):
            return self.most, self._for_goodput
        if is_idle(self.seen) and not (forced or self.question.cheapest):
            return self.running, Verdict(False, "there is nothing to gain from a change")
        if self.question.answers_early:
            return self._for_answers()
        if self.question.cheapest:
            return self._for_dollars()
        if not is_content(self.seen) or self.question.objective.slo_s is None:
            return self.most, self._for_goodput
        terms = self._terms
        return weigh_quick(self.running, self.most, self._quick(terms), terms, self._for_goodput, self._changes)

    @cached_property
    def _changes(self) -> int:
        return self.known.record.changes(self.now_s)

    @cached_property
    def _for_goodput(self) -> Verdict:
        return weigh(
            self.running, self.most, self.question.objective, self.patience, changes=self._changes,
            start_s=self.known.record.start_s, counts=self.counts, content=is_content(self.seen),
            chance=chance(self.seen) if self.known.beliefs.evidence >= self.patience.enough_inputs else 0.0,
        )  # fmt: skip

    def _for_answers(self) -> tuple[Expectation, Verdict]:
        soonest = self._expected(self.question.best(*self._now))
        leaving = self.facts.surviving(self.known.beliefs.carried)
        return soonest, weigh_answers(self.plan, soonest.plan, leaving, self.patience.least_gain, self._changes)

    def _for_dollars(self) -> tuple[Expectation, Verdict]:
        """The cheapest plan; on its devices the one of most goodput, which costs no more."""
        wanted_per_s = self._demand.for_dollars(self.question.reserve, self.running.kept)
        cheapest = self.question.carrying(wanted_per_s, *self._now) or self.question.best(*self._now)
        survival, corrections, counts = self._now
        uses = cheapest.devices()
        of_these = self.question.best(survival, corrections, {kind: uses.get(kind, 0) for kind in counts})
        better = max((self._expected(plan) for plan in (cheapest, of_these)), key=lambda each: each.goodput_per_s)
        if not is_content(self.seen) and better.goodput_per_s < self.running.goodput_per_s:
            return self.running, Verdict(False, "no devices are given back while inputs are missed")
        reserve = self.question.reserve
        return better, weigh_dollars(self.running, better, self._demand, self.patience, reserve, self._changes)

    @cached_property
    def _demand(self) -> Demand:
        beliefs = self.known.beliefs
        expected = demand(beliefs.forecast, self.seen, beliefs.peak_per_s(self.now_s), self.patience.replan_every_s)
        return replace(expected, expected_per_s=max(expected.expected_per_s, self.rush_per_s))

    @property
    def _terms(self) -> QuickTerms:
        if self.question.quickest:
            return latency_terms(self._demand, self.running, self.patience.least_gain)
        return quick_terms(self._demand, self.most, self.question.objective.slo_s or 0.0, self.patience.notice)

    def _quick(self, terms: QuickTerms) -> Expectation | None:
        """The quickest plan that sustains enough; None where none could be enough quicker than the one of most goodput.

        It is expected to keep as much of its promise as the running one.
        """
        if terms.needed_per_s >= self.most.goodput_per_s or terms.answer_s(self.most) < terms.least_saved_s:
            return None
        quick = self.question.carrying(terms.needed_per_s / max(self.running.kept, 1e-3), *self._now)
        return self._expected(quick) if quick else None

    @property
    def _now(self) -> tuple[tuple[float, ...], Corrections, Mapping[str, int]]:
        return self.known.beliefs.carried, self.known.corrections, self.counts

    def _expected(self, plan: Plan) -> Expectation:
        return Expectation(plan, self.score(plan), self.known.record.kept(plan))

    def _unless_objected(self, plan: Plan, verdict: Verdict, forced: bool) -> Verdict:
        if forced or not verdict.moves or verdict.must:
            return verdict
        objection = self.known.record.objection(plan, self.known.beliefs.evidence, self.now_s)
        return replace(verdict, moves=False, why=objection) if objection else verdict

    def _as_pinned(self, pinned: Plan, verdict: Verdict) -> Verdict:
        """The user's own plan, whose devices are all there, goes before a better one."""
        if same(pinned, self.plan):
            return replace(verdict, moves=False, why=f"the plan is pinned (without that: {verdict.why})")
        return Verdict(not self.known.record.paused, "the devices of the pinned plan are there", must=True)


class Relief:
    """Which plan runs at once when inputs are refused: the one of most goodput that is known on the same devices."""

    def __init__(self) -> None:
        self._known: Plan | None = None
        self._not_before_s = -inf

    def know(self, plan: Plan | None) -> None:
        """This is the best plan there is; None: it is not known, and sought when it is needed."""
        self._known = plan

    def wait(self, until_s: float) -> None:
        """The plan could not be rolled out just now."""
        self._not_before_s = until_s

    def may_help(self, running: Plan, now_s: float) -> bool:
        return now_s >= self._not_before_s and not (self._known and same(self._known, running))

    def sought(self, moment: Snapshot) -> tuple[Plan, Verdict] | None:
        """The plan, and why it should run; None where none sustains clearly more, as far as is known now."""
        try:
            plan = self._known or moment.most.plan
        except UserError:
            return None
        verdict = moment.relieved(plan)
        self._known = plan if verdict.moves else moment.plan
        return (plan, verdict) if verdict.moves else None
