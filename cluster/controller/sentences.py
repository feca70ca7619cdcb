"""Words of decisions that several of them have in common: numbers with units, what was seen, why a plan does less."""

from cluster.controller.corrections import Corrections
from deployments.front.observed import Observed
from optimizer.plan import Plan

CONTENT = 0.98  # of the inputs answered in time: the rest are bursts
UNDER_WAY = 1  # input that may lack its answer when the window ends, so that it counts against no plan
SHORT = 0.95  # of its promise: a plan that sustains less has a reason that is told
SLOW, LONG_S, LOST = 1.03, 0.0005, 0.97  # launches, by the tables; between two of them; of what is left


def is_content(seen: Observed) -> bool:
    """Whether nearly all inputs are answered in time, as where none came: more goodput would serve nobody."""
    return seen.arrivals - seen.in_time <= max(UNDER_WAY, (1 - CONTENT) * seen.arrivals)


def rate(per_s: float) -> str:
    """
    >>> rate(30938.4), rate(0.0312)
    ('30,938/s', '0.0312/s')
    """
    return f"{per_s:,.0f}/s" if per_s >= 100 else f"{per_s:.3g}/s"


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(0.0116), milliseconds(1.5)
    ('11.6 ms', '1,500 ms')
    """
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def seen_in_words(seen: Observed) -> str:
    """
    >>> seen_in_words(Observed(0.0, 10.0, 1040, 720, ()))
    '104/s came and 72/s were answered in time'
    """
    if not seen.arrivals:
        return "no input came"
    if is_content(seen):
        return f"{rate(seen.arrivals_per_s)} came and were answered in time"
    return f"{rate(seen.arrivals_per_s)} came and {rate(seen.goodput_per_s)} were answered in time"


def shortfall(plan: Plan, sustains_per_s: float, corrections: Corrections, kept: float) -> str:
    """Why a plan sustains less than it promised; nothing, where it does not."""
    promised_per_s = plan.promise.goodput_per_s if plan.promise else 0.0
    if sustains_per_s >= SHORT * promised_per_s:
        return ""
    causes = list[str]()
    for kind in plan.devices():
        factors = corrections.factors.get(kind, (1.0,))
        if (slower := sum(factors) / len(factors)) > SLOW:
            causes.append(f"launches on {kind} take {slower:.2f} times what the tables say")
        if (between_s := corrections.between_s.get(kind, 0.0)) > LONG_S:
            causes.append(f"{kind} waits {milliseconds(between_s)} between two launches")
    if kept < LOST:
        causes.append(f"under load, {kept:.0%} of what the tables predict was answered in time")
    why = " and ".join(causes) or "inputs go deeper than it was planned for"
    return f"the plan promised {rate(promised_per_s)} and sustains {rate(sustains_per_s)}: {why}"
