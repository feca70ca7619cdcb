"""Is it worth it? The running plan and a better one by the same cost model, under the same forecast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.controller.config import Patience
from cluster.controller.moving import moving
from deployments.front.observed import Observed
from optimizer import Objective, Plan, Score

CONTENT = 0.98  # of the inputs answered in time: the rest are bursts
HEADROOM = 3  # times as much is asked where more goodput would not be used; a third where some is missed, for a message
FREE = 2  # changes of late that make the next one no harder
LEAST_PER_S = 1e-9
SAME = 1e-6  # a gain below this is a rounding error


@dataclass(frozen=True)
class Verdict:
    """Whether to move, and the sentence that says why. `must`: the running plan cannot go on as it is."""

    moves: bool
    why: str
    gain: float | None = None
    must: bool = False


@dataclass(frozen=True)
class Worth:
    """What is to be expected of a plan: the cost model's say, times the share of such sayings that was kept."""

    plan: Plan
    score: Score
    kept: float

    @property
    def goodput_per_s(self) -> float:
        return self.score.goodput_per_s * self.kept


def weigh(
    running: Worth, better: Worth, objective: Objective, patience: Patience, *, changes: int, start_s: float,
    counts: Mapping[str, int], content: bool,
) -> Verdict:  # fmt: skip
    """`changes` are those of late: from the third on, each doubles what the next one has to promise, so that none
    follow without end. `content`: every input is answered in time as it is, so that only headroom can be gained.
    """
    if missing := lacking(running.plan, counts):
        return Verdict(True, f"{missing}: the plan for what is left", must=True)
    gain = better.goodput_per_s / max(running.goodput_per_s, LEAST_PER_S) - 1
    if same(running.plan, better.plan) or gain < SAME:
        return Verdict(False, "the running plan is the best there is", max(0.0, gain))
    effort = moving(running.plan, better.plan)
    lost = effort.lost_share(start_s, patience.hold_windows * patience.replan_every_s)
    times = HEADROOM if content else 1 if effort.starts else 1 / HEADROOM
    needed = asked_of(times * patience.least_gain, changes) + lost
    moves = gain >= needed
    late = _too_late(running.score, objective)
    reason = f"{needed:.1%} are asked of a change that takes {effort.told}" + _of_late(changes)
    reason += " while all inputs are answered in time" if content else ""
    return Verdict(moves, f"{late}{gain:.1%} more goodput {'is' if moves else 'is not'} worth it: {reason}", gain)


def asked_of(least_gain: float, changes: int) -> float:
    """The gain that a change must promise, if moving costs nothing.

    >>> [round(asked_of(0.03, changes), 2) for changes in (0, 2, 3, 4)]
    [0.03, 0.03, 0.06, 0.12]
    """
    return least_gain * 2.0 ** max(0, changes - FREE)


def is_content(seen: Observed) -> bool:
    """Everybody is answered in time."""
    return seen.arrivals > 0 and seen.in_time >= CONTENT * seen.arrivals


def same(one: Plan, other: Plan) -> bool:
    """Whatever was promised of them."""
    return replace(one, promise=None) == replace(other, promise=None)


def lacking(plan: Plan, counts: Mapping[str, int]) -> str:
    """Which devices of a plan are not there, or nothing.

    >>> from optimizer import Placement, Split
    >>> lacking(Plan((Placement("v100", 4, (Split(0, 6, 8),)),)), {"v100": 3})
    '1 of 4 v100 are gone'
    """
    gone = {kind: used - counts.get(kind, used) for kind, used in plan.devices().items()}
    return ", ".join(f"{lost} of {plan.devices()[kind]} {kind} are gone" for kind, lost in gone.items() if lost > 0)


def is_late(score: Score, objective: Objective) -> bool:
    """A plan may use half of the slack, so that none goes for a hair's breadth."""
    return objective.slo_s is not None and score.latency_s > objective.slo_s * (1 - objective.slack / 2)


def _too_late(score: Score, objective: Objective) -> str:
    if not is_late(score, objective):
        return ""
    return f"answers of the running plan may take {score.latency_s * 1e3:.0f} ms; "


def _of_late(changes: int) -> str:
    return f", the {_ordinal(changes + 1)} of late" if changes else ""


def _ordinal(number: int) -> str:
    """
    >>> [_ordinal(number) for number in (2, 3, 4)]
    ['2nd', '3rd', '4th']
    """
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"
