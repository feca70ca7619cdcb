"""Which plan should run by what is known at one moment, and whether that is worth a change from the one that runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cluster.controller.beliefs import Beliefs
from cluster.controller.config import Patience
from cluster.controller.corrections import Corrections
from cluster.controller.decide import (
    Demand,
    Expectation,
    Verdict,
    demand,
    expected_best,
    has_room,
    is_content,
    is_idle,
    lacking,
    same,
    weigh,
    weigh_answers,
    weigh_dollars,
    weigh_latency,
)
from cluster.controller.question import AnyQuestion
from cluster.controller.record import TrackRecord
from deployments.front.observed import Observed
from optimizer.model.evaluate import Score
from optimizer.plan import Plan


@dataclass(frozen=True)
class Moment:
    """All that a decision rests on. `seen` is the window before it; `counts` are the devices that are there."""

    plan: Plan  # that runs
    pinned: Plan | None
    question: AnyQuestion
    patience: Patience
    beliefs: Beliefs
    corrections: Corrections
    record: TrackRecord
    counts: Mapping[str, int]
    facts: Any  # as the question has them
    seen: Observed
    now_s: float

    @cached_property
    def running(self) -> Expectation:
        return Expectation(self.plan, self.score(self.plan), self.record.kept(self.plan))

    def score(self, plan: Plan) -> Score:
        """What a plan does with what is known now."""
        return self.question.score(plan, self.facts)

    def better(self) -> tuple[Expectation, Demand | None]:
        """What the running plan is weighed against: for what is expected, or by goodput alone (None)."""
        cheapest = self.question.cheapest
        asked = demand(self.beliefs.forecast, self.seen, cheapest, self.patience.replan_every_s)
        now, running = (self.beliefs.carried, self.corrections, self.counts), self.running
        if self.question.answers_early:
            soonest = self.question.best(*now)
            return Expectation(soonest, self.score(soonest), running.kept), None
        if asked and (cheapest or (not lacking(self.plan, self.counts) and has_room(running, asked, self.seen))):
            best = self.question.carrying(asked.planned_for(running.kept), *now)
            if best or cheapest:
                best = best or self.question.best(*now)
                return Expectation(best, self.score(best), running.kept), asked
        best = self.question.best(*now)
        return expected_best(best, running, self.record, self.score, self.question.objective, self.counts), None

    def weighed(self, better: Expectation, asked: Demand | None, forced: bool) -> tuple[Expectation, Verdict]:
        """The plan to run and whether it is worth the change; a plan that the user has pinned goes before a better."""
        verdict = self._verdict(better, asked, forced)
        if self.pinned and not lacking(self.pinned, self.counts):
            return self._as_pinned(self.pinned, verdict)
        return better, verdict

    def _verdict(self, better: Expectation, asked: Demand | None, forced: bool) -> Verdict:
        record, running, changes = self.record, self.running, self.record.changes(self.now_s)
        if is_idle(self.seen) and not (forced or self.question.cheapest or lacking(self.plan, self.counts)):
            verdict = Verdict(False, "no input came: there is nothing to gain from a change")
        elif self.question.answers_early and not lacking(self.plan, self.counts):
            leaving = self.facts.surviving(self.beliefs.carried)
            verdict = weigh_answers(self.plan, better.plan, leaving, self.patience.least_gain, changes)
        elif asked and not lacking(self.plan, self.counts):
            weigh_them = weigh_dollars if self.question.cheapest else weigh_latency
            verdict = weigh_them(running, better, asked, self.patience.least_gain, changes)
        else:
            verdict = weigh(
                running, better, self.question.objective, self.patience,
                changes=changes, start_s=record.start_s, counts=self.counts, content=is_content(self.seen),
            )  # fmt: skip
        moves = (verdict.moves or forced) and not same(better.plan, self.plan)
        if record.paused:
            would = "would change" if moves else "would stay"
            return replace(verdict, moves=False, why=f"paused ({would}: {verdict.why})")
        if forced or not moves or verdict.must:
            return replace(verdict, moves=moves)
        objection = record.objection(better.plan, self.beliefs.evidence, self.now_s)
        return replace(verdict, moves=False, why=objection) if objection else verdict

    def _as_pinned(self, pinned: Plan, verdict: Verdict) -> tuple[Expectation, Verdict]:
        """The user's own plan, whose devices are all there, instead of the best one."""
        plan = Expectation(pinned, self.score(pinned), self.record.kept(pinned))
        if same(pinned, self.plan):
            return plan, replace(verdict, moves=False, why=f"the plan is pinned (without that: {verdict.why})")
        return plan, Verdict(not self.record.paused, "the devices of the pinned plan are there", must=True)
