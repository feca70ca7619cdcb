"""Chooses the plan that should run now, and decides whether it is worth a change."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt

from isobatch.cluster.controller import decide
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.decide import Demand, Expectation, QuickTerms, Verdict, lost_devices, served_alike
from isobatch.cluster.controller.knowledge import CostModel, CurrentWindow, Knowledge, PlanningProblem
from isobatch.cluster.controller.sentences import nearly_all_in_time
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan, rate
from isobatch.profiles.errors import UserError

MOST_PROVEN = 8  # earlier plans among which one is chosen while the best is barred
MOST_BELOW = 0.5  # a plan that ran before goes before a barred one if it sustains no less than this share less


def expected_demand(
    known: Knowledge, patience: Patience, window: CurrentWindow, observed: Observed, now_s: float
) -> Demand:
    """The demand of the next window by the forecast and the last window; at least the present rate, if inputs are late
    or refused. None is expected once no input has come for as long as a window."""
    peak_per_s, forecast, rush_per_s = known.estimate.peak_per_s(now_s), known.estimate.forecast, window.rush_per_s
    if window.quiet_s >= patience.replan_every_s * (1 - 1e-9):
        return Demand(rush_per_s, 0.0, peak_per_s)
    likely, high = (forecast.arrivals_per_s, forecast.arrivals_high_per_s) if forecast else (0.0, 0.0)
    observed_per_s = observed.arrivals_per_s
    return Demand(max(likely, observed_per_s, rush_per_s), high, max(peak_per_s, observed_per_s))


@dataclass(frozen=True)
class Snapshot:
    """All that a decision rests on: the running plan, the devices that may be used, and the observed window.

    `window` is the present one, which may have begun with the decision.
    """

    plan: Plan
    pinned: Plan | None
    known: Knowledge
    patience: Patience
    counts: Mapping[str, int]
    observed: Observed
    window: CurrentWindow
    now_s: float
    granted: bool = False  # devices were granted by an arbiter, which has weighed the change
    forced: bool = False  # a person wants the best plan, however little it gains and even if it failed before

    @cached_property
    def problem(self) -> PlanningProblem:
        return self.known.next_problem

    @cached_property
    def cost_model(self) -> CostModel:
        return self.known.cost_model()

    @cached_property
    def running(self) -> Expectation:
        return self._expected(self.plan)

    @cached_property
    def most(self) -> Expectation:
        """The plan of most goodput: the planner's, or the running one, which may be better by the planner's `gap`."""
        best = self._unless_barred(self._best)
        stays = not lost_devices(self.plan, self.counts) and self.running.goodput_per_s >= best.goodput_per_s
        return self.running if stays else best

    def decide(self) -> tuple[Plan, Verdict]:
        """The plan that the running plan is compared with, and whether it should run."""
        plan, verdict = self._unless_paused
        if self.known.record.paused:
            would = "would change" if verdict.moves else "would stay"
            verdict = replace(verdict, moves=False, why=f"paused ({would}: {verdict.why})")
        return plan, verdict

    @property
    def _unless_paused(self) -> tuple[Plan, Verdict]:
        pinned = self.pinned if self.pinned and not lost_devices(self.pinned, self.counts) else None
        if self.window.parked:
            verdict = Verdict(True, "the application was parked: replicas start", must=True)
            return pinned or self._by_goal()[0].plan, verdict
        better, verdict = self._by_goal()
        moves = (verdict.moves or self.forced) and not served_alike(better.plan, self.plan)
        verdict = self._unless_objected(better.plan, replace(verdict, moves=moves))
        return (pinned, self._as_pinned(pinned, verdict)) if pinned else (better.plan, verdict)

    @property
    def weighs_goodput(self) -> bool:
        """Whether the decision searches for the plan of most goodput."""
        return not (self.problem.answers_early or self.problem.aim.at_expected_rate or decide.is_idle(self.observed))

    def relieve_by(self, plan: Plan) -> Verdict:
        """While inputs are refused: whether this plan sustains enough more to run now."""
        better = self._expected(plan)
        gain = better.gain_over(self.running)
        needed = max(decide.required_gain(self.patience.least_gain, self._changes), self._chance)
        sustains = f"another plan sustains {rate(better.goodput_per_s)} instead of {rate(self.running.goodput_per_s)}"
        moves = gain >= needed and not self._is_barred(plan)
        must = self._uses_granted(better)
        return Verdict(moves or must, f"{self.observed.refused:,} inputs were refused: {sustains}", gain, must)

    def _by_goal(self) -> tuple[Expectation, Verdict]:
        if lost_devices(self.plan, self.counts):
            return self.most, self._for_goodput
        always = self.window.parked or self.granted or self.forced
        if decide.is_idle(self.observed) and not (always or self.problem.aim.at_expected_rate):
            return self.running, Verdict(False, "a change would gain nothing")
        if self.problem.answers_early:
            return self._for_answers()
        if self.problem.aim.at_expected_rate:
            return self._for_value()
        if not nearly_all_in_time(self.observed) or self.problem.objective.slo_s is None:
            return self.most, self._for_goodput
        terms = self._terms
        return decide.weigh_quick(self.running, self.most, self._quick(terms), terms, self._for_goodput, self._changes)

    @cached_property
    def _changes(self) -> int:
        return self.known.record.changes(self.now_s)

    @property
    def _chance(self) -> float:
        """The gain that noise alone could produce: n inputs measure survival to about 1 / sqrt(n).

        0 while too few inputs have arrived for any change.
        """
        enough = self.known.estimate.recent_inputs >= self.patience.enough_inputs
        return 1 / sqrt(max(1, self.observed.answered + self.observed.full)) if enough else 0.0

    def _uses_granted(self, better: Expectation) -> bool:
        """Whether a plan uses granted devices. One that is not barred runs at once: idle devices serve nobody."""
        return self.granted and not self._is_barred(better.plan) and better.gain_over(self.running) > decide.SAME

    @cached_property
    def _for_goodput(self) -> Verdict:
        if self._uses_granted(self.most):
            sustains = f"{rate(self.most.goodput_per_s)} instead of {rate(self.running.goodput_per_s)}"
            gain = self.most.gain_over(self.running)
            return Verdict(True, f"on the granted devices another plan sustains {sustains}", gain, must=True)
        return decide.weigh(
            self.running, self.most, self.problem.objective, self.patience, changes=self._changes,
            start_s=self.known.record.start_s, counts=self.counts, in_time=nearly_all_in_time(self.observed),
            chance=self._chance,
        )  # fmt: skip

    def _for_answers(self) -> tuple[Expectation, Verdict]:
        """The plan that answers soonest; if it does not answer clearly sooner, it may still sustain more, as when a
        device has come back."""
        facts = self.cost_model.facts.surviving(self.known.estimate.carried)
        verdict = decide.weigh_answers(self.plan, self._best, facts, self.patience.least_gain, self._changes)
        if verdict.moves or self.problem.aim.at_expected_rate or not self._for_goodput.moves:
            return self._expected(self._best), verdict
        return self.most, self._for_goodput

    def _for_value(self) -> tuple[Expectation, Verdict]:
        """The best plan by the goal, or the plan of most goodput on the same devices, which costs no more."""
        aim, reserve = self.problem.aim, self.problem.reserve
        wanted_per_s = self.demand.for_rate(reserve, self.known.record.kept_share)
        best = self.problem.sustaining(wanted_per_s, *self._now) or self._best
        better = self._unless_barred(best, wanted_per_s)
        if aim.at_given_goodput:
            survival, corrections, counts = self._now
            uses = better.plan.devices()
            same_devices = self.problem.best(survival, corrections, {kind: uses.get(kind, 0) for kind in counts})
            if not self._is_barred(same_devices):
                better = max(better, self._expected(same_devices), key=lambda each: each.goodput_per_s)
        if not nearly_all_in_time(self.observed) and better.goodput_per_s < self.running.goodput_per_s:
            return self.running, Verdict(False, "no device is given back while inputs are late or refused")
        terms = self.demand, self.patience, reserve, self._changes
        return better, decide.weigh_values(self.running, better, aim, *terms)

    @cached_property
    def demand(self) -> Demand:
        return expected_demand(self.known, self.patience, self.window, self.observed, self.now_s)

    @property
    def _terms(self) -> QuickTerms:
        if self.problem.aim.quickest:
            return decide.latency_terms(self.demand, self.running, self.patience.least_gain)
        return decide.quick_terms(self.demand, self.most, self.problem.objective.slo_s or 0.0, self.patience.notice)

    def _quick(self, terms: QuickTerms) -> Expectation | None:
        """The quickest plan that sustains enough; None where the plan of most goodput cannot be replaced."""
        if terms.needed_per_s >= self.most.goodput_per_s or terms.answer_s(self.most) < terms.least_saved_s:
            return None
        quick = self.problem.sustaining(terms.needed_per_s / max(self.known.record.kept_share, 1e-3), *self._now)
        return self._expected(quick) if quick else None

    @cached_property
    def _best(self) -> Plan:
        return self.problem.best(*self._now)

    @property
    def _now(self) -> tuple[tuple[float, ...], Corrections, Mapping[str, int]]:
        return self.known.estimate.carried, self.known.corrections, self.counts

    def _is_barred(self, plan: Plan) -> bool:
        return not self.forced and self.known.record.barred.until_s(plan, self.now_s) is not None

    def _unless_barred(self, best: Plan, wanted_per_s: float | None = None) -> Expectation:
        """The planner's choice or, while that is barred, the best plan that ran before, if that is worth running.

        The best one is the cheapest that sustains the wanted rate, or that of most goodput.
        """
        chosen = self._expected(best)
        if not self._is_barred(best):
            return chosen
        fit = [
            plan
            for plan in self.known.record.proven
            if plan.length == self.plan.length and not lost_devices(plan, self.counts)
        ]
        others = [self._expected(plan) for plan in fit[:MOST_PROVEN]]
        if enough := [each for each in others if wanted_per_s and each.score.goodput_per_s >= wanted_per_s]:
            return min(enough, key=lambda each: each.value(self.problem.aim))
        other = max(others, key=lambda each: each.goodput_per_s, default=chosen)
        ends = self.window.parked or bool(lost_devices(self.plan, self.counts))  # then no plan runs to compare with
        gains = other.gain_over(chosen) >= -MOST_BELOW if ends else other.gain_over(self.running) > decide.SAME
        return other if gains else chosen

    def _expected(self, plan: Plan) -> Expectation:
        score = self.cost_model.score(plan)
        return Expectation(plan, score, score.goodput_per_s * self.known.record.kept_share)

    def _unless_objected(self, plan: Plan, verdict: Verdict) -> Verdict:
        if self.forced or not verdict.moves or verdict.must:
            return verdict
        objection = self.known.record.objection(plan, self.known.estimate.recent_inputs, self.now_s)
        return replace(verdict, moves=False, why=objection) if objection else verdict

    def _as_pinned(self, pinned: Plan, verdict: Verdict) -> Verdict:
        """The user's own plan, whose devices are all present, goes before a better plan."""
        if served_alike(pinned, self.plan):
            return replace(verdict, moves=False, why=f"the plan is pinned (without that: {verdict.why})")
        return Verdict(True, "the devices of the pinned plan are present", must=True)


@dataclass
class OverloadRelief:
    """Holds the plan that runs at once when inputs are refused: the plan of most goodput on the same devices."""

    best: Plan | None = None  # None: unknown, and searched for when it is needed
    not_before_s: float = -inf  # no plan is proposed before this time, because a roll-out has just failed

    def waits(self, now_s: float) -> bool:
        return now_s < self.not_before_s

    def may_help(self, running: Plan, now_s: float) -> bool:
        return not self.waits(now_s) and not (self.best and served_alike(self.best, running))

    def propose(self, snapshot: Snapshot) -> tuple[Plan, Verdict] | None:
        """The plan, and why it should run; None where no known plan sustains clearly more."""
        try:
            plan = self.best or snapshot.most.plan
        except UserError:
            return None
        verdict = snapshot.relieve_by(plan)
        self.best = plan if verdict.moves else snapshot.plan
        return (plan, verdict) if verdict.moves else None
