"""Decides whether another plan is worth the change: both are scored by the same cost model, under the same forecast.

`weigh` compares goodput, `weigh_quick` compares the time that a quicker plan saves with the goodput that it loses,
`weigh_values` compares the values of another goal. `Trial` measures after a change whether the new plan was a mistake.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.sentences import nearly_all_in_time
from isobatch.deployments.front.observed import Observed, merged
from isobatch.optimizer import Objective, Plan, Problem, Score
from isobatch.optimizer.early_answers import answered_s
from isobatch.optimizer.goals import Goal
from isobatch.optimizer.plan import milliseconds, rate

REFUSED_SHARE = 0.02  # the share of a second's inputs whose refusal means that the plan is overloaded
LEAST_REFUSED = 3  # refused inputs: with fewer, the share may be chance
HEADROOM = 3  # times `least_gain`: for a change that starts replicas although all inputs are answered in time
URGENT = 1 / 3  # times `least_gain`: for a change that starts no replica while inputs are late or refused
FREE_CHANGES = 2  # recent changes after which the next one is still as easy
LEAST_PER_S = 1e-9  # the least goodput that a value or another goodput is divided by
SAME = 1e-6  # a smaller gain is a rounding error

SURGE = 1.5  # times the expected rate: the cheapest plan is made for no more than this
LEAST_KEPT = 0.5  # the smallest kept share that is planned with: a smaller one would make plans grow without end
MANY_ARRIVALS = 100  # inputs, from which the rate is known to about 10 %
TENFOLD = 10.0  # times the expected rate that a quicker plan must sustain, so that bursts are answered
TWICE = 2.0  # the same where the user's goal is latency

TRIAL_ARRIVALS = 50  # inputs before a trial is judged
BUSY = 0.9  # the share of the old plan's goodput that must arrive for a gain to show; with less, only a loss shows


@dataclass(frozen=True)
class Verdict:
    """Whether to change the plan, and the sentence that says why. `must`: the running plan has lost devices."""

    moves: bool
    why: str
    gain: float | None = None
    must: bool = False


@dataclass(frozen=True)
class Expectation:
    """The cost model's score of a plan, and the goodput that is expected of the plan under load."""

    plan: Plan
    score: Score
    goodput_per_s: float

    def value(self, aim: Goal) -> float:
        """The value of a goal: the smaller, the better."""
        return float(aim.value(max(self.goodput_per_s, LEAST_PER_S), self.score.cost_per_hour, self.score.latency_s))

    def gain_over(self, other: "Expectation") -> float:
        return self.goodput_per_s / max(other.goodput_per_s, LEAST_PER_S) - 1


@dataclass(frozen=True)
class PlanChange:
    """The cost of a change: `starts` of the new plan's `replicas` are not running yet.

    >>> PlanChange(starts=0, replicas=4).lost_share(start_s=10, hold_s=100)
    0.0
    >>> PlanChange(starts=2, replicas=4).lost_share(start_s=10, hold_s=100)  # half is missing for a tenth of the time
    0.05
    """

    starts: int
    replicas: int

    @property
    def text(self) -> str:
        return f"that starts {self.starts} of {self.replicas} replicas" if self.starts else "without new replicas"

    def lost_share(self, start_s: float, hold_s: float) -> float:
        """The lost share of the goodput while the new plan holds: a device answers nothing until its replica starts."""
        return min(1.0, start_s / hold_s) * self.starts / self.replicas


def plan_change(before: Plan, after: Plan) -> PlanChange:
    """A replica may run any block, so replicas of a kind are alike: only additional ones must start."""
    has, wants = before.devices(), after.devices()
    starts = sum(max(0, count - has.get(kind, 0)) for kind, count in wants.items())
    return PlanChange(starts, sum(wants.values()))


def weigh(
    running: Expectation, better: Expectation, objective: Objective, patience: Patience, *, changes: int,
    start_s: float, counts: Mapping[str, int], in_time: bool, chance: float,
) -> Verdict:  # fmt: skip
    """Change for more goodput.

    `changes` counts the recent changes: from the third on, each doubles the gain that the next one must promise, so
    that plans settle. The gain must exceed `chance`, which noise alone could produce. `in_time`: nearly all inputs are
    answered in time, so that a change gains headroom only.
    """
    if lost := lost_devices(running.plan, counts):
        return Verdict(True, f"{lost}: the best plan for the remaining devices", must=True)
    gain = better.gain_over(running)
    if served_alike(running.plan, better.plan) or gain < SAME:
        best = f"no plan on these devices sustains more than the running plan ({rate(running.goodput_per_s)})"
        return Verdict(False, _late_text(running.score, objective) + best, max(0.0, gain))
    change = plan_change(running.plan, better.plan)
    lost_share = change.lost_share(start_s, patience.hold_s)
    times = (HEADROOM if in_time else 1) if change.starts else (1 if in_time else URGENT)
    needed = max(required_gain(times * patience.least_gain, changes) + lost_share, chance)
    moves = gain >= needed
    compared = (
        f"another plan sustains {rate(better.goodput_per_s)}, {gain:.1%} more than the running plan "
        f"({rate(running.goodput_per_s)})"
    )
    limit = f"a change {change.text}{_recent_text(changes)} must gain {needed:.1%}"
    worth = "worth it" if moves else "not worth it"
    return Verdict(moves, f"{_late_text(running.score, objective)}{compared}: {worth}, because {limit}", gain)


def required_gain(least_gain: float, changes: int) -> float:
    """The gain that a change must promise, if the change itself costs nothing.

    >>> [round(required_gain(0.03, changes), 2) for changes in (0, 2, 3, 4)]
    [0.03, 0.03, 0.06, 0.12]
    """
    return least_gain * 2.0 ** max(0, changes - FREE_CHANGES)


def is_idle(observed: Observed) -> bool:
    return observed.seconds > 0 and not observed.arrivals


def is_refusing(observed: Observed) -> bool:
    """Whether more than a few inputs, and a noticeable share of all, were refused."""
    return observed.refused >= max(LEAST_REFUSED, REFUSED_SHARE * observed.arrivals)


def served_alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans are equal except for their promises and thresholds."""
    return plan.unpromised == other.unpromised


def exits_alike(plan: Plan, other: Plan) -> bool:
    """Whether all inputs of both plans leave at the same ramps by the same thresholds."""
    same_ramps = len({pipeline.ramps for each in (plan, other) for pipeline in each.pipelines}) == 1
    return plan.thresholds == other.thresholds and (same_ramps or served_alike(plan, other))


def lost_devices(plan: Plan, counts: Mapping[str, int]) -> str:
    """The devices of a plan that are not present, as text; empty if all are.

    >>> from isobatch.optimizer import Placement, Split
    >>> lost_devices(Plan((Placement("v100", 4, (Split(0, 6, 8),)),)), {"v100": 3})
    '1 of 4 v100 are gone'
    """
    gone = {kind: used - counts.get(kind, used) for kind, used in plan.devices().items()}
    return ", ".join(f"{lost} of {plan.devices()[kind]} {kind} are gone" for kind, lost in gone.items() if lost > 0)


def _late_text(score: Score, objective: Objective) -> str:
    """Answers that may use more than half of the slack, as text."""
    if objective.slo_s is None or score.latency_s <= objective.slo_s * (1 - objective.slack / 2):
        return ""
    taken = f"{milliseconds(score.latency_s)} of an SLO of {milliseconds(objective.slo_s)}"
    return f"answers of the running plan may take {taken}; "


def _recent_text(changes: int) -> str:
    """
    >>> _recent_text(0), _recent_text(1), _recent_text(3)
    ('', ' after 1 recent change', ' after 3 recent changes')
    """
    return f" after {changes} recent change{'s' if changes > 1 else ''}" if changes else ""


@dataclass(frozen=True)
class Demand:
    """Inputs per second: the expected rate, the upper end of the forecast, and the largest rate of the last day."""

    expected_per_s: float
    high_per_s: float
    peak_per_s: float

    def for_rate(self, reserve: float, kept_share: float) -> float:
        """The goodput that a plan must promise, if plans keep this share of it."""
        wanted = min(SURGE * self.expected_per_s, max(self.high_per_s, (1 + reserve) * self.expected_per_s))
        return max(wanted, LEAST_PER_S) / max(kept_share, LEAST_KEPT)


@dataclass(frozen=True)
class QuickTerms:
    """The terms on which a quicker plan replaces the plan of most goodput.

    It must sustain `needed_per_s`, and its answers must come `least_saved_s` sooner at the expected rate.
    """

    expected_per_s: float
    needed_per_s: float
    needed_for: str  # the reason for `needed_per_s`, as text
    least_saved_s: float

    def answer_s(self, plan: Expectation) -> float:
        return plan.score.answer_s(self.expected_per_s)

    def is_worth_its_loss(self, plan: Expectation, most: Expectation) -> bool:
        """Whether a plan of less goodput is worth its loss."""
        sooner_s = self.answer_s(most) - self.answer_s(plan)
        return plan.goodput_per_s >= self.needed_per_s and sooner_s >= self.least_saved_s

    def text(self, quick: Expectation, slow: Expectation, most: Expectation) -> str:
        """The time that a quicker plan saves, and the goodput that it loses."""
        sooner = f"answers take {milliseconds(self.answer_s(quick))} instead of {milliseconds(self.answer_s(slow))}"
        bursts = f"the quicker plan sustains {rate(quick.goodput_per_s)}, more than {self.needed_for}"
        given_up = f"given up: {1 - quick.goodput_per_s / most.goodput_per_s:.0%} of the {rate(most.goodput_per_s)}"
        return f"{sooner} at {rate(self.expected_per_s)}; {bursts}; {given_up} that these devices can sustain"


def quick_terms(expected: Demand, most: Expectation, slo_s: float, notice: float) -> QuickTerms:
    """For the most goodput: a user must notice the saved time, and bursts must still be answered."""
    tenfold, most_per_s = TENFOLD * expected.expected_per_s, most.goodput_per_s
    rates = ((expected.peak_per_s, "the largest rate of the last day"), (tenfold, "ten times the expected rate"))
    needed_per_s, needed_for = min(max(rates), (most_per_s, "all that these devices can sustain"))
    return QuickTerms(expected.expected_per_s, needed_per_s, needed_for, notice * slo_s)


def latency_terms(expected: Demand, running: Expectation, least_gain: float) -> QuickTerms:
    """For the goal latency: twice the expected rate is enough, and the saved share of the answer's time counts."""
    rates = expected.expected_per_s, TWICE * expected.expected_per_s, "twice the expected rate (goal: latency)"
    return QuickTerms(*rates, HEADROOM * least_gain * running.score.answer_s(expected.expected_per_s))


def weigh_quick(
    running: Expectation,
    most: Expectation,
    quick: Expectation | None,
    terms: QuickTerms,
    to_most: Verdict,
    changes: int,
) -> tuple[Expectation, Verdict]:
    """The plan of most goodput, by the verdict `to_most`, unless a quicker plan is worth the goodput it gives up."""
    if quick and not served_alike(quick.plan, running.plan) and terms.is_worth_its_loss(quick, most):
        saved_s = terms.answer_s(running) - terms.answer_s(quick)
        if saved_s >= required_gain(terms.least_saved_s, changes):
            return quick, Verdict(True, terms.text(quick, running, most), quick.gain_over(running))
    if terms.is_worth_its_loss(running, most) and not served_alike(running.plan, most.plan):
        return running, Verdict(False, terms.text(running, most, most), 0.0)
    if to_most.moves or not quick or served_alike(quick.plan, running.plan):
        return most, to_most
    saved_s = max(0.0, terms.answer_s(running) - terms.answer_s(quick))
    sooner = f"the quickest plan that sustains {rate(terms.needed_per_s)} ({terms.needed_for}) would answer"
    needed = milliseconds(required_gain(terms.least_saved_s, changes))
    saved = f"{milliseconds(saved_s)} sooner: not worth it, because a change must save {needed}"
    return most, Verdict(False, f"{to_most.why}; {sooner} {saved}", to_most.gain)


def weigh_answers(running: Plan, better: Plan, facts: Problem, least_gain: float, changes: int) -> Verdict:
    """Where answers are early: other ramps, if inputs are answered clearly sooner with them on average."""
    if served_alike(running, better):
        return Verdict(False, "no other ramps within the budget answer sooner", 0.0)
    before_s, after_s = answered_s(running, facts), answered_s(better, facts)
    saved, needed = 1 - after_s / before_s, required_gain(least_gain, changes)
    times = f"launches answer after {1e3 * before_s:.4g} ms on average, with other ramps after {1e3 * after_s:.4g} ms"
    worth = "worth it" if saved >= needed else "not worth it"
    return Verdict(saved >= needed, f"{times}: {worth}, because a change must save {needed:.1%}", saved)


def is_overloaded(looks: Sequence[Observed], sustained_per_s: float) -> bool:
    """Whether more inputs arrive than the running plan can answer in time, by the latest looks with enough of them."""
    for first in reversed(range(len(looks))):
        latest = merged(looks[first:])
        if latest.arrivals >= MANY_ARRIVALS:
            return latest.arrivals_per_s > sustained_per_s and not nearly_all_in_time(latest)
    return False


def weigh_values(
    running: Expectation, better: Expectation, aim: Goal, expected: Demand, patience: Patience, reserve: float,
    changes: int,
) -> Verdict:  # fmt: skip
    """Change to sustain what is expected; else for a clearly better value, or for clearly more goodput at the same."""
    alike = served_alike(running.plan, better.plan)
    if running.goodput_per_s < (1 + reserve) * expected.expected_per_s:
        gain = 0.0 if alike else better.gain_over(running)
        sustains = f"the running plan sustains {rate(running.goodput_per_s)}, but {rate(expected.expected_per_s)}"
        other = "no plan on these devices sustains more" if alike else f"another plan sustains {gain:.1%} more"
        why = f"{sustains} and a reserve of {reserve:.0%} are needed: {other}"
        return Verdict(gain >= patience.least_gain, why, gain)
    if alike:
        return Verdict(False, "no plan that sustains the expected rate is better than the running plan", 0.0)
    value, smaller = running.value(aim), better.value(aim)
    saved = 1 - smaller / value if value else 0.0
    needed = required_gain(HEADROOM * patience.least_gain, changes)
    gain = better.gain_over(running)
    if abs(saved) < SAME and gain >= needed:
        return Verdict(True, f"another plan on the same devices sustains {gain:.1%} more at the same value", gain)
    moves = saved >= needed
    sustains = f"it sustains {rate(better.goodput_per_s)}, and {rate(expected.expected_per_s)} are expected"
    worth = "worth it" if moves else "not worth it"
    compared = f"another plan {aim.saving(saved)}: {worth}, because a change must save {needed:.1%}"
    return Verdict(moves, f"{compared}; {sustains}", saved)


@dataclass
class Trial:
    """Judges whether the new plan answers as many inputs in time as the previous plan would have, of the same arrivals.

    The estimate for the previous plan is the cost model's present score, times `kept_share`, the share of such promises
    that was kept while it ran. So neither harder inputs nor a quieter hour count against the new plan. Decoders report
    no launches: their kept share also counts late tokens under little load. `number` is that of the event that records
    the change.
    """

    number: int
    before: Plan
    kept_share: float
    observed: Observed | None = None
    moved: bool = False  # the first look is left out, because it still covers the old plan and the change

    def add(self, observed: Observed) -> None:
        if not self.moved:
            self.moved = True
            return
        self.observed = merged([self.observed, observed]) if self.observed else observed

    @property
    def seconds(self) -> float:
        return self.observed.seconds if self.observed else 0.0

    def judge(self, sustained_per_s: Callable[[Plan], float], least_loss: float) -> Verdict | None:
        """Whether to return to the previous plan; None: too few inputs arrived to judge.

        `sustained_per_s` is the present cost model. The verdict has a gain if enough inputs arrived to measure it.
        """
        if self.observed is None or self.observed.arrivals < TRIAL_ARRIVALS:
            return None
        arrivals, achieved = self.observed.answerable / self.observed.seconds, self.observed.goodput_per_s
        sustained = self.kept_share * sustained_per_s(self.before)
        answerable = arrivals if self.observed.launches else min(1.0, self.kept_share) * arrivals
        expected = min(answerable, sustained)
        gain = achieved / expected - 1 if expected else 0.0
        chance = 2 / (expected * self.observed.seconds) ** 0.5 if expected else 1.0  # two deviations of a count
        failed = -gain > least_loss + chance
        why = f"{rate(achieved)} were answered in time; that plan would have answered {rate(expected)}"
        return Verdict(failed, why, gain if failed or arrivals > BUSY * sustained else None)
