"""An upper bound on goodput, and the gap of a plan to it, explained by lifting one restriction after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from scipy.optimize import linprog

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
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
MANY = 100  # times the devices: as many as lift the restriction of few devices
GAP = 0.01  # the gap of the plans under lifted restrictions
FREE_BYTES_PER_S = 1e18  # bytes per second of a link that costs nothing


@dataclass(frozen=True)
class Shortfall:
    """A restriction and the goodput that it costs, as a share of the upper bound."""

    why: str
    share: float


def shortfalls(
    plan: Plan, facts: Problem, objective: Objective, sustained_per_s: float | None = None
) -> tuple[Shortfall, ...]:
    """The cost of each restriction once those before it are lifted. With the plan's own share, all add up to 1.

    `sustained_per_s`: the goodput that the plan is known to keep; None: its promise.
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
    """The goodput of the best plan by the planner's estimates, as one restriction after the other is lifted."""
    most = objective.for_most_goodput
    yield WAITING, evaluate(plan, facts).goodput_per_s
    facts = facts.with_devices([replace(each, count=MANY * each.count) for each in facts.devices])
    yield FEW, _planned(facts, most)
    free = tuple(replace(table, launch_s=0.0, stop_s=0.0) for table in facts.tables)
    facts = replace(without_hand_overs(facts), tables=free)
    yield LAUNCHES, _planned(facts, most)
    nothing = (0.0,) * facts.num_blocks
    facts = replace(facts, tables=tuple(replace(each, ramp_s=(nothing,) * len(each.ramp_s)) for each in facts.tables))
    yield RAMPS, _planned(facts, most)
    yield LATENCY, _planned(facts, replace(most, slo_s=None))


def without_hand_overs(facts: Problem) -> Problem:
    """The same problem with links that cost nothing."""
    links = {
        ends: replace(link, bytes_per_s=FREE_BYTES_PER_S, latency_s=0.0, turn_s=0.0)
        for ends, link in facts.links.items()
    }
    return replace(facts, links=links)


def _planned(facts: Problem, objective: Objective) -> float:
    plan = side_by_side(facts, objective, GAP)
    return evaluate(plan, facts).goodput_per_s / MANY if plan else 0.0


def oracle_per_s(facts: Problem, slo_s: float, max_batch: int) -> float:
    """The goodput that no system exceeds: every input pays for its blocks only, in the best batch that the SLO allows.

    Ramps, launches, links, queues and the arrival of inputs cost nothing, and any block runs on any device. A linear
    program assigns blocks to kinds: rate * survival[k] inputs reach block k, and no kind exceeds its time.
    """
    cost_s = np.array([list(_each_s(facts, kind, slo_s, max_batch)) for kind in range(len(facts.devices))])
    kinds, blocks = cost_s.shape
    rate = np.append(np.zeros(kinds * blocks), -1.0)  # variables: inputs per second by kind and block, then the rate
    reach = np.hstack([np.tile(np.eye(blocks), kinds), -np.array(facts.survival)[:, None]])
    busy = np.zeros((kinds, kinds * blocks + 1))
    for kind in range(kinds):
        busy[kind, kind * blocks : (kind + 1) * blocks] = np.where(np.isfinite(cost_s[kind]), cost_s[kind], 1e6)
    counts = [device.count for device in facts.devices]
    return float(-linprog(rate, busy, counts, reach, np.zeros(blocks)).fun)


def _each_s(facts: Problem, kind: int, slo_s: float, max_batch: int) -> Iterator[float]:
    """By block: the time of one input in the best batch that ends within the SLO after the fastest way to the block."""
    sizes = np.arange(1, min(max_batch, facts.tables[kind].largest) + 1)
    times_s = facts.tables[kind].block_times_s(sizes)
    fastest_s = np.min([table.block_times_s(1) for table in facts.tables], axis=0)
    for block in range(facts.num_blocks):
        fits = times_s[:, block] + fastest_s[:block].sum() <= slo_s
        yield float((times_s[:, block] / sizes)[fits].min(initial=np.inf))
