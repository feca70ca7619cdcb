"""Where the fewest dollars are sought: what the cheapest plan must sustain, and when it is worth to move to it."""

from dataclasses import dataclass

from cluster.controller.verdict import HEADROOM, LEAST_PER_S, Verdict, Worth, asked_of, is_content, same
from deployments.front.observed import Observed
from profiles.forecast import Forecast

SURGE = 1.5  # times what is expected, at most, a plan is made for
LEAST_KEPT = 0.5  # of a promise: what is planned for does not grow without end
MANY = 100  # arrivals of one look that tell how many come
ENOUGH = 1.1  # times what is expected a plan must sustain to stay


@dataclass(frozen=True)
class Demand:
    """Inputs per second: as many are expected, and plans are made for so many."""

    expected_per_s: float
    wanted_per_s: float

    def planned_for(self, kept: float) -> float:
        """What a plan must promise. No more of it is expected to be kept than of the running one's promise."""
        return self.wanted_per_s / max(kept, LEAST_KEPT)


def demand(forecast: Forecast | None, seen: Observed) -> Demand | None:
    """Of the next window. None: nothing came that could tell."""
    likely, high = (forecast.arrivals_per_s, forecast.arrivals_high_per_s) if forecast else (0.0, 0.0)
    expected = max(likely, seen.arrivals_per_s)
    return Demand(expected, min(SURGE * expected, max(high, ENOUGH * expected))) if expected else None


def is_swamped(seen: Observed, sustained_per_s: float) -> bool:
    """More arrive than the running plan can answer in time."""
    return not is_content(seen) and seen.arrivals >= MANY and seen.arrivals_per_s > sustained_per_s


def weigh_dollars(running: Worth, better: Worth, asked: Demand, least_gain: float, changes: int) -> Verdict:
    """Move where the running plan does not sustain what is expected; else only for a good deal fewer dollars."""
    if same(running.plan, better.plan):
        return Verdict(False, "the running plan is the cheapest there is", 0.0)
    if running.goodput_per_s < ENOUGH * asked.expected_per_s:
        gain = better.goodput_per_s / max(running.goodput_per_s, LEAST_PER_S) - 1
        sustains = f"the running plan sustains {running.goodput_per_s:.4g} of {asked.expected_per_s:.4g} per second"
        return Verdict(gain >= least_gain, f"{sustains} that are expected: {gain:.1%} more goodput", gain)
    dollars = running.score.cost_per_hour
    saved = 1 - better.score.cost_per_hour / dollars if dollars else 0.0
    needed = asked_of(HEADROOM * least_gain, changes)
    moves = saved >= needed
    why = f"{saved:.1%} fewer dollars {'are' if moves else 'are not'} worth it: {needed:.1%} are asked"
    return Verdict(moves, why, saved)
