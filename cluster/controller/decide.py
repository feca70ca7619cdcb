"""Decides whether another plan is worth the change: both are judged by the same cost model, under the same forecast.

`weigh` compares goodput, `weigh_quick` what a quicker plan gains and gives up, `weigh_dollars` cost. `Trial` finds out
afterwards whether the new plan was a mistake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

from cluster.controller.config import Patience
from cluster.controller.record import TrackRecord, unpromised
from cluster.controller.sentences import is_content, milliseconds, rate
from deployments.front.observed import Observed, merged
from optimizer import Objective, Plan, Problem, Score
from optimizer.answers import answered_s
from profiles.forecast import Forecast

REFUSED_SHARE, LEAST_REFUSED = 0.02, 3  # of a second's inputs: more refusals mean that the plan is overloaded
# Times `least_gain` that a change must gain: where new replicas start though all is well, and where a message is enough
# and inputs are missed.
HEADROOM, URGENT = 3, 1 / 3
FREE_CHANGES = 2  # recent changes that make the next one no harder
LEAST_PER_S = 1e-9
SAME = 1e-6  # a gain below this is a rounding error

SURGE = 1.5  # where dollars count, a plan is made for so many times the expected arrivals at most
LEAST_KEPT = 0.5  # of a promise: without it, what is planned for would grow without end
MANY_ARRIVALS = 100  # in one look, which tell the rate well enough
TENFOLD = 10.0  # times the expected arrivals that a quicker plan must sustain
TWICE = 2.0  # the same where the user's goal is latency

TRIAL_ARRIVALS = 50  # before a trial can be judged
BUSY = 0.9  # of what the old plan sustained: with fewer arrivals no gain can be seen, only a loss


@dataclass(frozen=True)
class Verdict:
    """Whether to change the plan, and the sentence that says why. `must`: the running plan cannot go on as it is."""

    moves: bool
    why: str
    gain: float | None = None
    must: bool = False


@dataclass(frozen=True)
class Expectation:
    """What a plan is expected to do: the cost model's score, and the share of such promises that was kept so far."""

    plan: Plan
    score: Score
    kept: float

    @property
    def goodput_per_s(self) -> float:
        return self.score.goodput_per_s * self.kept

    def gain_over(self, other: "Expectation") -> float:
        return self.goodput_per_s / max(other.goodput_per_s, LEAST_PER_S) - 1


@dataclass(frozen=True)
class Moving:
    """What a change takes: `starts` of the new plan's `replicas` are not running yet.

    >>> Moving(starts=0, replicas=4).lost_share(start_s=10, hold_s=100)
    0.0
    >>> Moving(starts=2, replicas=4).lost_share(start_s=10, hold_s=100)  # half is missing for a tenth of the time
    0.05
    """

    starts: int
    replicas: int

    @property
    def in_words(self) -> str:
        return f"for which {self.starts} of {self.replicas} replicas start" if self.starts else "without new replicas"

    def lost_share(self, start_s: float, hold_s: float) -> float:
        """Of the goodput while the new plan holds: a device brings nothing before its replica has started."""
        return min(1.0, start_s / hold_s) * self.starts / self.replicas


def moving(before: Plan, after: Plan) -> Moving:
    """A replica may run any block, so all of a kind are alike: only how many there are takes time."""
    has, wants = before.devices(), after.devices()
    starts = sum(max(0, count - has.get(kind, 0)) for kind, count in wants.items())
    return Moving(starts, sum(wants.values()))


def expected_best(
    best: Plan, running: Expectation, record: TrackRecord, score: Callable[[Plan], Score], objective: Objective,
    counts: Mapping[str, int],
) -> Expectation:  # fmt: skip
    """The planner's best, or a plan that ran lately and kept more of its promise.

    A plan that never ran is expected to keep as much as others did, unless the running one falls short because it is
    late, which the new one will not be.
    """
    hopeful = is_late(running.score, objective) and unpromised(best) not in record.plans
    candidates = [Expectation(best, score(best), 1.0 if hopeful else record.kept(best))]
    known = (plan for plan in record.plans if not lacking(plan, counts))
    candidates += [Expectation(plan, score(plan), record.kept(plan)) for plan in known]
    return max(candidates, key=lambda each: each.goodput_per_s)


def weigh(
    running: Expectation, better: Expectation, objective: Objective, patience: Patience, *, changes: int,
    start_s: float, counts: Mapping[str, int], content: bool, chance: float,
) -> Verdict:  # fmt: skip
    """Change for more goodput.

    `changes` are the recent ones: from the third on, each doubles what the next one has to promise, so that none
    follow without end. `content`: every input is answered in time as it is, so that only headroom can be gained, which
    must be more than may seem to be gained by `chance`.
    """
    if missing := lacking(running.plan, counts):
        return Verdict(True, f"{missing}: the plan for what is left", must=True)
    gain = better.gain_over(running)
    if same(running.plan, better.plan) or gain < SAME:
        best = f"no plan on these devices sustains more than the running one, {rate(running.goodput_per_s)}"
        return Verdict(False, _too_late(running.score, objective) + best, max(0.0, gain))
    change = moving(running.plan, better.plan)
    lost = change.lost_share(start_s, patience.hold_windows * patience.replan_every_s)
    times = (HEADROOM if content else 1) if change.starts else (1 if content else URGENT)
    needed = max(asked_of(times * patience.least_gain, changes) + lost, chance if content else 0.0)
    moves = gain >= needed
    compared = (
        f"{rate(better.goodput_per_s)} can be sustained in place of {rate(running.goodput_per_s)}, {gain:.1%} more"
    )
    limit = f"a change {change.in_words}{_of_late(changes)} must bring {needed:.1%}"
    why = f"{_too_late(running.score, objective)}{compared}: {'worth it' if moves else 'not worth it'}, as {limit}"
    return Verdict(moves, why, gain)


def asked_of(least_gain: float, changes: int) -> float:
    """The gain that a change must promise, if moving costs nothing.

    >>> [round(asked_of(0.03, changes), 2) for changes in (0, 2, 3, 4)]
    [0.03, 0.03, 0.06, 0.12]
    """
    return least_gain * 2.0 ** max(0, changes - FREE_CHANGES)


def chance(seen: Observed) -> float:
    """What a plan may seem to gain by chance: as survival is known to about so much after so many answers."""
    return 1 / sqrt(max(1, seen.answered))


def is_idle(seen: Observed) -> bool:
    """Whether nobody asked, for as long as was looked."""
    return seen.seconds > 0 and not seen.arrivals


def is_refusing(seen: Observed) -> bool:
    """Whether inputs are refused that a plan of more goodput might answer: more than a few, and a noticeable share."""
    return seen.refused >= max(LEAST_REFUSED, REFUSED_SHARE * seen.arrivals)


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans are served alike, whatever was promised of them."""
    return unpromised(one) == unpromised(other)


def lacking(plan: Plan, counts: Mapping[str, int]) -> str:
    """Which devices of a plan are not there, or nothing.

    >>> from optimizer import Placement, Split
    >>> lacking(Plan((Placement("v100", 4, (Split(0, 6, 8),)),)), {"v100": 3})
    '1 of 4 v100 are gone'
    """
    gone = {kind: used - counts.get(kind, used) for kind, used in plan.devices().items()}
    return ", ".join(f"{lost} of {plan.devices()[kind]} {kind} are gone" for kind, lost in gone.items() if lost > 0)


def is_late(score: Score, objective: Objective) -> bool:
    """Whether a plan uses more than half of the slack: below that, none is changed for a few microseconds."""
    return objective.slo_s is not None and score.latency_s > objective.slo_s * (1 - objective.slack / 2)


def _too_late(score: Score, objective: Objective) -> str:
    if not is_late(score, objective):
        return ""
    return f"answers of the running plan may take {score.latency_s * 1e3:.0f} ms; "


def _of_late(changes: int) -> str:
    """
    >>> _of_late(0), _of_late(1), _of_late(3)
    ('', ', the 2nd of late,', ', the 4th of late,')
    """
    return f", the {changes + 1}{ {1: 'nd', 2: 'rd'}.get(changes, 'th') } of late," if changes else ""


# How many inputs are expected, and what a plan must sustain that is not the one of most goodput


@dataclass(frozen=True)
class Demand:
    """Inputs per second: those that are expected, the upper end of the forecast, and the largest rate of a day."""

    expected_per_s: float
    high_per_s: float
    peak_per_s: float

    def for_dollars(self, reserve: float, kept: float) -> float:
        """The goodput that the cheapest plan must promise, if it keeps as large a share of that as the running one."""
        wanted = min(SURGE * self.expected_per_s, max(self.high_per_s, (1 + reserve) * self.expected_per_s))
        return max(wanted, LEAST_PER_S) / max(kept, LEAST_KEPT)


def demand(forecast: Forecast | None, seen: Observed, peak_per_s: float, window_s: float) -> Demand:
    """The demand of the next window. After a whole window without any input, none is expected."""
    if is_idle(seen) and seen.seconds >= window_s * (1 - 1e-9):
        return Demand(0.0, 0.0, peak_per_s)
    likely, high = (forecast.arrivals_per_s, forecast.arrivals_high_per_s) if forecast else (0.0, 0.0)
    return Demand(max(likely, seen.arrivals_per_s), high, max(peak_per_s, seen.arrivals_per_s))


@dataclass(frozen=True)
class QuickTerms:
    """What a plan must do to run in place of the one of most goodput: sustain `needed_per_s` and answer sooner.

    Answers are compared at the rate that is expected. They must come `least_saved_s` sooner.
    """

    expected_per_s: float
    needed_per_s: float
    needed_for: str  # in words
    least_saved_s: float

    def answer_s(self, plan: Expectation) -> float:
        return plan.score.answer_s(self.expected_per_s)

    def stands_in(self, plan: Expectation, most: Expectation) -> bool:
        """Whether a plan of less goodput is worth what it gives up."""
        sooner_s = self.answer_s(most) - self.answer_s(plan)
        return plan.goodput_per_s >= self.needed_per_s and sooner_s >= self.least_saved_s

    def in_words(self, quick: Expectation, slow: Expectation, most: Expectation) -> str:
        """What a quicker plan brings, and what it gives up."""
        sooner = f"answers take {milliseconds(self.answer_s(quick))} instead of {milliseconds(self.answer_s(slow))}"
        bursts = f"the plan sustains {rate(quick.goodput_per_s)}, more than {self.needed_for}"
        given_up = f"given up: {1 - quick.goodput_per_s / most.goodput_per_s:.0%} of {rate(most.goodput_per_s)}"
        return f"{sooner} at {rate(self.expected_per_s)}; {bursts}; {given_up}"


def quick_terms(expected: Demand, most: Expectation, slo_s: float, notice: float) -> QuickTerms:
    """For the most goodput: a user must notice the time that is saved, and bursts must be answered all the same."""
    tenfold, most_per_s = TENFOLD * expected.expected_per_s, most.goodput_per_s
    rates = ((expected.peak_per_s, "the largest rate of the last day"), (tenfold, "ten times what is expected"))
    needed_per_s, needed_for = min(max(rates), (most_per_s, "all that the devices can"))
    return QuickTerms(expected.expected_per_s, needed_per_s, needed_for, notice * slo_s)


def latency_terms(expected: Demand, running: Expectation, least_gain: float) -> QuickTerms:
    """Where the goal is latency: twice what is expected is enough, and a share of the answer's own time counts."""
    rates = expected.expected_per_s, TWICE * expected.expected_per_s, "twice what is expected (goal: latency)"
    return QuickTerms(*rates, HEADROOM * least_gain * running.score.answer_s(expected.expected_per_s))


def weigh_quick(
    running: Expectation,
    most: Expectation,
    quick: Expectation | None,
    terms: QuickTerms,
    to_most: Verdict,
    changes: int,
) -> tuple[Expectation, Verdict]:
    """The plan of most goodput, by the verdict `to_most`, unless a quicker one is worth what it gives up."""
    if quick and not same(quick.plan, running.plan) and terms.stands_in(quick, most):
        saved_s = terms.answer_s(running) - terms.answer_s(quick)
        if saved_s >= asked_of(terms.least_saved_s, changes):
            return quick, Verdict(True, terms.in_words(quick, running, most), quick.gain_over(running))
    if terms.stands_in(running, most) and not same(running.plan, most.plan):
        return running, Verdict(False, terms.in_words(running, most, most), 0.0)
    if to_most.moves or not quick or same(quick.plan, running.plan):
        return most, to_most
    saved_s = max(0.0, terms.answer_s(running) - terms.answer_s(quick))
    sooner = f"the quickest plan that sustains {rate(terms.needed_per_s)} ({terms.needed_for}) would answer"
    asked = f"{milliseconds(saved_s)} sooner; a change needs {milliseconds(asked_of(terms.least_saved_s, changes))}"
    return most, Verdict(False, f"{to_most.why}; {sooner} {asked}", to_most.gain)


def weigh_answers(running: Plan, better: Plan, facts: Problem, least_gain: float, changes: int) -> Verdict:
    """Where answers are early: other ramps, if inputs are answered clearly sooner with them on average."""
    if same(running, better):
        return Verdict(False, "no other ramps within the budget answer sooner", 0.0)
    before_s, after_s = answered_s(running, facts), answered_s(better, facts)
    saved, needed = 1 - after_s / before_s, asked_of(least_gain, changes)
    times = f"launches answer after {1e3 * before_s:.4g} ms on average, with other ramps after {1e3 * after_s:.4g}"
    return Verdict(saved >= needed, f"{times}; {needed:.1%} less time is asked", saved)


def is_swamped(seen: Observed, sustained_per_s: float) -> bool:
    """Whether more inputs arrive than the running plan can answer in time."""
    return not is_content(seen) and seen.arrivals >= MANY_ARRIVALS and seen.arrivals_per_s > sustained_per_s


def weigh_dollars(
    running: Expectation, better: Expectation, expected: Demand, patience: Patience, reserve: float, changes: int
) -> Verdict:
    """Change to sustain what is expected; else for clearly fewer dollars, or for clearly more goodput at no cost."""
    if same(running.plan, better.plan):
        return Verdict(False, "the running plan is the cheapest there is", 0.0)
    if running.goodput_per_s < (1 + reserve) * expected.expected_per_s:
        gain = better.gain_over(running)
        sustains = f"the running plan sustains {rate(running.goodput_per_s)}, and {rate(expected.expected_per_s)}"
        why = f"{sustains} with a reserve of {reserve:.0%} are needed: {gain:.1%} more goodput"
        return Verdict(gain >= patience.least_gain, why, gain)
    dollars = running.score.cost_per_hour
    saved = 1 - better.score.cost_per_hour / dollars if dollars else 0.0
    needed = asked_of(HEADROOM * patience.least_gain, changes)
    gain = better.gain_over(running)
    if abs(saved) < SAME and gain >= needed:
        return Verdict(True, f"{gain:.1%} more goodput costs nothing on the same devices", gain)
    moves = saved >= needed
    kept = f"it sustains {rate(better.goodput_per_s)}, and {rate(expected.expected_per_s)} are expected"
    costs = f"another plan costs {abs(saved):.1%} {'less' if saved > 0 else 'more'}"
    worth = "worth it" if moves else "not worth it"
    return Verdict(moves, f"{costs}: {worth}, as {needed:.1%} less are asked; {kept}", saved)


# After a change


@dataclass(frozen=True)
class TrialResult:
    """What a trial found. `gain` is None where too few inputs came to see one."""

    gain: float | None
    failed: bool
    why: str


@dataclass
class Trial:
    """Judges whether the new plan is at least as good as the one before would have been, for the same arrivals.

    The old plan would have done what the cost model says of it now, times `kept`, the share of its promise that it kept
    while it ran. So neither harder inputs nor a quieter hour speak against the new plan. `number` is that of the event
    which tells of the change.
    """

    number: int
    before: Plan
    kept: float
    seen: Observed | None = None
    moved: bool = False  # the first look still saw the old plan, and the change itself

    def add(self, observed: Observed) -> None:
        if not self.moved:
            self.moved = True
            return
        self.seen = merged([self.seen, observed]) if self.seen else observed

    def judge(self, sustained: Callable[[Plan], float], least_loss: float) -> TrialResult | None:
        """`sustained` is the cost model, for the inputs and the tables of now. None: too early to say."""
        if self.seen is None or self.seen.arrivals < TRIAL_ARRIVALS:
            return None
        arrivals, achieved = self.seen.arrivals_per_s, self.seen.goodput_per_s
        would = self.kept * min(arrivals, sustained(self.before))
        gain = achieved / would - 1 if would else 0.0
        chance = 2 / (would * self.seen.seconds) ** 0.5 if would else 1.0  # two standard deviations of a count
        failed = -gain > least_loss + chance
        told = f"{achieved:.4g} in time per second; the plan before would have made {would:.4g} of the same arrivals"
        return TrialResult(gain if failed or arrivals > BUSY * sustained(self.before) else None, failed, told)
