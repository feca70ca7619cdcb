"""What keeps a plan from the goodput that nothing exceeds: restrictions are lifted one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.pipelines.oracle import oracle_per_s
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.plan import Plan
from optimizer.problem import Problem

WAITING, FEW = "bursts and queues", "how few devices there are"
LAUNCHES, RAMPS = "launches and hand-overs", "ramps, which cost time or are closed"
LATENCY, APART = "the SLO", "kinds that cannot share every block"
MANY, GAP = 100, 0.01  # times the devices; of the planner
FREE = 1e18  # bytes a second


@dataclass(frozen=True)
class Shortfall:
    """`share`: of the goodput that nothing exceeds."""

    why: str
    share: float


def shortfalls(
    plan: Plan, facts: Problem, objective: Objective, sustained_per_s: float | None = None
) -> tuple[Shortfall, ...]:
    """What each restriction costs once those before it are lifted; with what the plan keeps, all add up to 1.

    `sustained_per_s`: what is known to be kept of the plan's promise; None: all of it.
    """
    batch = objective.batches[1]
    bound = oracle_per_s(facts, objective.slo_s or inf, batch)
    at, found = min(sustained_per_s or evaluate(plan, facts).goodput_per_s, bound), []
    for why, per_s in _lifted(plan, facts, objective):
        above = min(max(per_s, at), bound)
        found.append(Shortfall(why, (above - at) / bound))
        at = above
    return (*found, Shortfall(APART, (bound - at) / bound))


def _lifted(plan: Plan, facts: Problem, objective: Objective) -> Iterator[tuple[str, float]]:
    """The goodput of the best plan by the planner's beliefs, as one restriction after the other is gone."""
    asked = replace(objective, goal="goodput", goodput_per_s=0.0, cost_per_hour=None)
    yield WAITING, evaluate(plan, facts).goodput_per_s
    facts = facts.with_devices([replace(each, count=MANY * each.count) for each in facts.devices])
    yield FEW, _planned(facts, asked)
    free = tuple(replace(table, launch_s=0.0, stop_s=0.0) for table in facts.tables)
    facts = replace(without_hand_overs(facts), tables=free)
    yield LAUNCHES, _planned(facts, asked)
    nothing = (0.0,) * facts.num_blocks
    facts = replace(facts, tables=tuple(replace(each, ramp_s=(nothing,) * len(each.ramp_s)) for each in facts.tables))
    yield RAMPS, _planned(facts, asked)
    yield LATENCY, _planned(facts, replace(asked, slo_s=None))


def without_hand_overs(facts: Problem) -> Problem:
    """The same where they cost nothing."""
    links = {ends: replace(link, bytes_per_s=FREE, latency_s=0.0, turn_s=0.0) for ends, link in facts.links.items()}
    return replace(facts, links=links)


def _planned(facts: Problem, objective: Objective) -> float:
    plan = side_by_side(facts, objective, GAP)
    return evaluate(plan, facts).goodput_per_s / MANY if plan else 0.0
