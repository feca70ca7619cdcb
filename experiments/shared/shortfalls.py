"""Explains the gap of a plan to the upper bound on goodput, by lifting one restriction after another."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.batch_gain import oracle_per_s, times_more, without_hand_overs
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

# The restrictions, in the order in which they are lifted.
WAITING = "bursts and queues"
FEW = "how few devices there are"
LAUNCHES = "launches and hand-overs"
RAMPS = "ramps, which cost time or are closed"
LATENCY = "the SLO"
APART = "kinds that cannot share every block"
GAP = 0.01  # the gap of the plans under lifted restrictions


@dataclass(frozen=True)
class Shortfall:
    """A restriction and the goodput that it costs, as a share of the upper bound."""

    why: str
    share: float


def shortfalls(
    plan: Plan, facts: Problem, objective: Objective, sustained_per_s: float | None = None
) -> tuple[Shortfall, ...]:
    """The cost of each restriction after the earlier ones are lifted. With the plan's share, they add up to 1.

    `sustained_per_s`: the goodput that the plan sustains in simulation; None: its promise.
    """
    batch = objective.batches[1]
    bound = oracle_per_s(facts, objective.slo_s or inf, batch)
    at, costs = min(sustained_per_s or evaluate(plan, facts).goodput_per_s, bound), []
    for why, per_s in _lifted(plan, facts, objective):
        above = min(max(per_s, at), bound)
        costs.append(Shortfall(why, (above - at) / bound))
        at = above
    return (*costs, Shortfall(APART, (bound - at) / bound))


def _lifted(plan: Plan, facts: Problem, objective: Objective) -> Iterator[tuple[str, float]]:
    """The estimated goodput of the best plan, while one restriction after another is lifted."""
    most = objective.for_most_goodput
    yield WAITING, evaluate(plan, facts).goodput_per_s
    times = times_more(facts)
    facts = facts.with_devices([replace(each, count=times * each.count) for each in facts.devices])
    yield FEW, _planned(facts, most, times)
    free = tuple(replace(table, launch_s=0.0, stop_s=0.0) for table in facts.tables)
    facts = replace(without_hand_overs(facts), tables=free)
    yield LAUNCHES, _planned(facts, most, times)
    nothing = (0.0,) * facts.num_blocks
    facts = replace(facts, tables=tuple(replace(each, ramp_s=(nothing,) * len(each.ramp_s)) for each in facts.tables))
    yield RAMPS, _planned(facts, most, times)
    yield LATENCY, _planned(facts, replace(most, slo_s=None), times)


def _planned(facts: Problem, objective: Objective, times: int) -> float:
    plan = side_by_side(facts, objective, GAP)
    return evaluate(plan, facts).goodput_per_s / times if plan else 0.0
