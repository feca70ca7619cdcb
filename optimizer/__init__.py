"""What to run where. Pure: no network, no cluster, no clock.

>>> from profiles.devices import fleet, links_between
>>> from profiles.datasheet import datasheet_table
>>> from profiles.exits import ExitProfile
>>> from profiles.files import Profile
>>> from profiles.shapes import distilbert
>>> devices = fleet("v100=4")
>>> exits = ExitProfile((1.0, 0.95, 0.8, 0.4, 0.3, 0.25))
>>> profile = Profile("distilbert", (datasheet_table(distilbert(), "v100"),), exits)
>>> plan = optimize(profile, devices, links_between(devices), Objective(slo_s=0.1))
>>> plan.num_blocks, plan.promise.latency_s < 0.08, plan.promise.gap
(6, True, 0.0)
"""

from collections.abc import Sequence

from optimizer import lanes
from optimizer.dp import search
from optimizer.evaluate import Score, evaluate
from optimizer.infeasible import reason
from optimizer.objective import Objective
from optimizer.plan import Placement, Plan, Promise, Split, read_plan
from optimizer.problem import Problem, problem
from profiles.devices import Device, Link
from profiles.errors import UserError
from profiles.files import Profile

__all__ = [
    "Objective",
    "Placement",
    "Plan",
    "Problem",
    "Promise",
    "Score",
    "Split",
    "evaluate",
    "optimize",
    "problem",
    "read_plan",
]


def optimize(
    profile: Profile,
    devices: Sequence[Device],
    links: Sequence[Link],
    objective: Objective,
    *,
    survival: Sequence[float] | None = None,
    pessimistic: Sequence[float] | None = None,
    gap: float = 0.0,
    side_by_side: bool = True,
) -> Plan:
    """The best plan there is. When there is none, the error names what binds and the nearest value that would do.

    `survival` replaces the profile's own, for a forecast. With `pessimistic`, the plan keeps its promise when that many
    survive as well. `gap` lets the search stop when no plan can be better by more than this share. Kinds of devices may
    serve in pipelines of their own (`Plan.beside`) where that is better, unless `side_by_side` is False.
    """
    facts = problem(profile, devices, links, survival, pessimistic)
    plan = lanes.side_by_side(facts, objective, gap) if side_by_side else search(facts, objective, gap)
    if plan is None:
        raise UserError(reason(facts, objective))
    return plan
