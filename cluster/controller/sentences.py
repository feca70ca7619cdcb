"""Sentences that several decisions share: rates and times with units, arrivals, why a plan falls short."""

from dataclasses import replace

from isobatch.cluster.controller.corrections import Corrections
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan, milliseconds, rate
from isobatch.optimizer.text_plans import tokens_per_s

NEARLY_ALL = 0.98  # the share of inputs answered in time with which a plan suffices: the rest are bursts
UNDER_WAY = 1  # inputs that may lack their answer when a window ends, which count against no plan
SHORT = 0.95  # the share of its promise below which a decision says why a plan sustains less
SLOW = 1.03  # times the launch times of the tables: slower launches are named as a cause
LONG_WAIT_S = 0.0005  # a longer wait between two launches is named as a cause
LOST = 0.97  # a smaller kept share is named as a cause


def nearly_all_in_time(observed: Observed) -> bool:
    """Whether so few inputs were late or refused that a plan of more goodput would gain nothing."""
    return observed.answerable - observed.in_time <= max(UNDER_WAY, (1 - NEARLY_ALL) * observed.arrivals)


def arrivals_text(observed: Observed) -> str:
    """
    >>> arrivals_text(Observed(0.0, 10.0, 1040, 720, ()))
    '104/s arrived and 72/s were answered in time'
    """
    if not observed.arrivals:
        return "no input arrived"
    if nearly_all_in_time(replace(observed, excused=0)):
        return f"{rate(observed.arrivals_per_s)} arrived and were answered in time"
    excused = f", {observed.excused:,} failed or were abandoned" if observed.excused else ""
    return f"{rate(observed.arrivals_per_s)} arrived and {rate(observed.goodput_per_s)} were answered in time{excused}"


def promised_per_s(plan: Plan) -> float:
    """The promised goodput in the inputs that the controller counts: of a decoder, these are tokens. 0: none."""
    if plan.writes_texts:
        return tokens_per_s(plan)
    return plan.promise.goodput_per_s if plan.promise else 0.0


def shortfall(plan: Plan, sustains_per_s: float, corrections: Corrections, kept_share: float) -> str:
    """Why a plan sustains less than it promised; empty where it keeps its promise."""
    promised = promised_per_s(plan) if plan.promise else 0.0  # a controller's plan of a decoder has only an estimate
    if sustains_per_s >= SHORT * promised:
        return ""
    causes = list[str]()
    for kind in plan.devices():
        factors = corrections.factors.get(kind, (1.0,))
        if (slower := sum(factors) / len(factors)) > SLOW:
            causes.append(f"launches on {kind} take {slower:.2f} times what the tables say")
        if (between_s := corrections.between_s.get(kind, 0.0)) > LONG_WAIT_S:
            causes.append(f"{kind} waits {milliseconds(between_s)} between two launches")
    if kept_share < LOST:
        causes.append(f"under load, {kept_share:.0%} of what the tables predict was answered in time")
    what = "tokens leave at later blocks, or texts are longer," if plan.writes_texts else "inputs leave at later blocks"
    why = " and ".join(causes) or f"{what} than the plan expects"
    return f"the plan promised {rate(promised)} and sustains {rate(sustains_per_s)}: {why}"
