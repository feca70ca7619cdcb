"""Decides whether another plan is worth the change: both are judged by the same cost model, under the same forecast.

`weigh` compares goodput, `weigh_latency` the time of an answer, `weigh_dollars` cost. `Trial` finds
out afterwards whether the new plan was a mistake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.controller.config import Patience
from cluster.controller.record import TrackRecord, unpromised
from deployments.front.observed import Observed, merged
from optimizer import Objective, Plan, Problem, Score
from optimizer.answers import answered_s
from profiles.forecast import Forecast

CONTENT = 0.98  # of the inputs answered in time: the rest are bursts
UNDER_WAY = 1  # input that may lack its answer when the window ends, so that it counts against no plan
HEADROOM = 3  # times as much is asked where more goodput would not be used; a third where some is missed, for a message
FREE_CHANGES = 2  # recent changes that make the next one no harder
LEAST_PER_S = 1e-9
SAME = 1e-6  # a gain below this is a rounding error

SURGE = 1.5  # a plan is made for so many times the expected arrivals at most
LEAST_KEPT = 0.5  # of a promise: without it, what is planned for would grow without end
MANY_ARRIVALS = 100  # in one look, which tell the rate well enough
SPARE = 1.1  # times the expected arrivals a plan must sustain to stay
ROOM = 2.0  # times the expected arrivals a plan must sustain for its latency to be worth more than more goodput

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
    def told(self) -> str:
        return f"{self.starts} of {self.replicas} replicas start" if self.starts else "a message"

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
    start_s: float, counts: Mapping[str, int], content: bool,
) -> Verdict:  # fmt: skip
    """`changes` are the recent ones: from the third on, each doubles what the next one has to promise, so that none
    follow without end. `content`: every input is answered in time as it is, so that only headroom can be gained.
    """
    if missing := lacking(running.plan, counts):
        return Verdict(True, f"{missing}: the plan for what is left", must=True)
    gain = better.goodput_per_s / max(running.goodput_per_s, LEAST_PER_S) - 1
    if same(running.plan, better.plan) or gain < SAME:
        return Verdict(False, "the running plan is the best there is", max(0.0, gain))
    change = moving(running.plan, better.plan)
    lost = change.lost_share(start_s, patience.hold_windows * patience.replan_every_s)
    times = HEADROOM if content else 1 if change.starts else 1 / HEADROOM
    needed = asked_of(times * patience.least_gain, changes) + lost
    moves = gain >= needed
    late = _too_late(running.score, objective)
    reason = f"{needed:.1%} are asked of a change that takes {change.told}" + _of_late(changes)
    reason += " while all inputs are answered in time" if content else ""
    return Verdict(moves, f"{late}{gain:.1%} more goodput {'is' if moves else 'is not'} worth it: {reason}", gain)


def asked_of(least_gain: float, changes: int) -> float:
    """The gain that a change must promise, if moving costs nothing.

    >>> [round(asked_of(0.03, changes), 2) for changes in (0, 2, 3, 4)]
    [0.03, 0.03, 0.06, 0.12]
    """
    return least_gain * 2.0 ** max(0, changes - FREE_CHANGES)


def is_content(seen: Observed) -> bool:
    """Whether nearly all inputs are answered in time, as where none came: more goodput would serve nobody."""
    return seen.arrivals - seen.in_time <= max(UNDER_WAY, (1 - CONTENT) * seen.arrivals)


def is_idle(seen: Observed) -> bool:
    """Whether nobody asked, for as long as was looked."""
    return seen.seconds > 0 and not seen.arrivals


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
    ('', ', the 2nd of late', ', the 4th of late')
    """
    return f", the {changes + 1}{ {1: 'nd', 2: 'rd'}.get(changes, 'th') } of late" if changes else ""


# Where so many inputs are expected that a plan need not sustain all it can


@dataclass(frozen=True)
class Demand:
    """Inputs per second: so many are expected, and plans are made for so many."""

    expected_per_s: float
    wanted_per_s: float

    def planned_for(self, kept: float) -> float:
        """The goodput that a plan must promise, if it keeps as large a share of its promise as the running one."""
        return self.wanted_per_s / max(kept, LEAST_KEPT)


def demand(forecast: Forecast | None, seen: Observed, cheapest: bool, window_s: float) -> Demand | None:
    """The demand of the next window; None where no input came that could tell. Room costs nothing but dollars.

    Where dollars count and nobody asked in a whole window, the least is planned for, whatever came before.
    """
    if cheapest and is_idle(seen) and seen.seconds >= window_s * (1 - 1e-9):
        return Demand(0.0, LEAST_PER_S)
    likely, high = (forecast.arrivals_per_s, forecast.arrivals_high_per_s) if forecast else (0.0, 0.0)
    expected = max(likely, seen.arrivals_per_s)
    wanted = min(SURGE * expected, max(high, SPARE * expected)) if cheapest else ROOM * expected
    return Demand(expected, wanted) if expected else None


def has_room(running: Expectation, asked: Demand, seen: Observed) -> bool:
    """Whether nobody needs more goodput: all inputs are answered in time, and more could be."""
    return is_content(seen) and running.goodput_per_s >= SPARE * asked.expected_per_s


def weigh_latency(running: Expectation, better: Expectation, asked: Demand, least_gain: float, changes: int) -> Verdict:
    """Change for clearly quicker answers at the rate that is expected."""
    carried = f"that sustains {asked.wanted_per_s:.4g} per second, {ROOM:g} times what is expected"
    if same(running.plan, better.plan):
        return Verdict(False, f"the running plan is the quickest {carried}", 0.0)
    before_s, after_s = (each.score.answer_s(asked.expected_per_s) for each in (running, better))
    saved = 1 - after_s / before_s
    needed = asked_of(HEADROOM * least_gain, changes)
    moves = saved >= needed
    promised = f"the running plan takes {before_s * 1e3:,.4g} ms, the quickest {carried}, takes {after_s * 1e3:,.4g} ms"
    told = (
        f"more goodput is not needed: at {asked.expected_per_s:.4g} per second {promised}; {needed:.1%} less is asked"
    )
    return Verdict(moves, told, saved)


def weigh_answers(running: Plan, better: Plan, facts: Problem, least_gain: float, changes: int) -> Verdict:
    """Where answers are early: other ramps, if inputs are answered clearly sooner with them on average."""
    if same(running, better):
        return Verdict(False, "no other ramps within the budget answer sooner", 0.0)
    before_s, after_s = answered_s(running, facts), answered_s(better, facts)
    saved, needed = 1 - after_s / before_s, asked_of(least_gain, changes)
    told = f"launches answer after {before_s * 1e3:.4g} ms on average, with other ramps after {after_s * 1e3:.4g}"
    return Verdict(saved >= needed, f"{told}; {needed:.1%} less time is asked", saved)


def is_swamped(seen: Observed, sustained_per_s: float) -> bool:
    """Whether more inputs arrive than the running plan can answer in time."""
    return not is_content(seen) and seen.arrivals >= MANY_ARRIVALS and seen.arrivals_per_s > sustained_per_s


def weigh_dollars(running: Expectation, better: Expectation, asked: Demand, least_gain: float, changes: int) -> Verdict:
    """Change where the running plan does not sustain what is expected; else only for clearly fewer dollars."""
    if same(running.plan, better.plan):
        return Verdict(False, "the running plan is the cheapest there is", 0.0)
    if running.goodput_per_s < SPARE * asked.expected_per_s:
        gain = better.goodput_per_s / max(running.goodput_per_s, LEAST_PER_S) - 1
        sustains = f"the running plan sustains {running.goodput_per_s:.4g} of {asked.expected_per_s:.4g} per second"
        return Verdict(gain >= least_gain, f"{sustains} that are expected: {gain:.1%} more goodput", gain)
    dollars = running.score.cost_per_hour
    saved = 1 - better.score.cost_per_hour / dollars if dollars else 0.0
    needed = asked_of(HEADROOM * least_gain, changes)
    moves = saved >= needed
    why = f"{saved:.1%} fewer dollars {'are' if moves else 'are not'} worth it: {needed:.1%} are asked"
    return Verdict(moves, why, saved)


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
