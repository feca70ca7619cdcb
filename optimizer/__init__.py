"""The exact planner: decides what runs where. It is pure: it uses no network, no cluster, no clock.

A plan cuts the network into splits and gives each a kind of device, a batch size and its ramps. With an *option* o for
each way to run blocks a .. b - 1 as one split, and *labels* for the partial plans that stand before a block,

    labels(0) = { nothing used }
    labels(b) = undominated { x + o : x in labels(a), o an option from a that stops at b, bound(x + o) <= limit }
    best      = min over x in labels(end) of value(loads of x, latency of x)

where loads are device seconds per arriving input, summed by placement (m replicas sustain m / load inputs per second).
Only labels that another one dominates or that a bound rules out are dropped, so the result is the best of all plans.

The package, in the order of planning:
    objective, goals/, problem   the question: the goal (one file each), the limits, the network and its devices
    model/                       what a plan costs: split_costs has every assumption about hardware
    search/options -> bounds -> labels -> sweeps -> exact    one pipeline; local_placements: its other kind of plans
    pipelines/                   several side by side, the baselines, and upper bounds (ceiling, batch_gain)
    fleets/                      the devices of several applications
    plan, infeasible                 the answer, and why there is none
    effort                           the constants of the search
    early_answers                    an input is answered at a ramp but runs to the end
    tuning                           which inputs leave with a plan's own ramps, and thresholds for these ramps

>>> from isobatch.profiles.devices import fleet, links_between
>>> from isobatch.profiles.datasheet import datasheet_table, encoder
>>> from isobatch.profiles.exits import ExitProfile
>>> from isobatch.profiles.files import Profile
>>> devices = fleet("v100=4")
>>> exits = ExitProfile((1.0, 0.95, 0.8, 0.4, 0.3, 0.25))
>>> shape = encoder("distilbert", layers=6, hidden=768, inner=3072, length=128, vocabulary=30522)
>>> profile = Profile("distilbert", (datasheet_table(shape, "v100"),), exits)
>>> plan = optimize(profile, devices, links_between(devices), Objective(slo_s=0.1))
>>> plan.num_blocks, plan.promise.latency_s < 0.08, plan.promise.gap
(6, True, 0.0)
"""

from collections.abc import Sequence

from isobatch.optimizer.early_answers import early_plan
from isobatch.optimizer.infeasible import NoPlanError
from isobatch.optimizer.model.evaluate import Score, evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side as best_pipelines
from isobatch.optimizer.plan import Placement, Plan, Promise, Split, read_plan
from isobatch.optimizer.problem import Problem, problem
from isobatch.optimizer.search.exact import search
from isobatch.optimizer.tuning import plan_for_its_ramps
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

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
    exits: ExitProfile | None = None,
    gap: float = 0.0,
    side_by_side: bool = True,
) -> Plan:
    """The best plan. If there is none, the error names the limit that binds and the nearest feasible value.

    The plan is made for the survival that its own open ramps cause, if the profile knows it (`ExitProfile.sure`).
    `exits` replace those of the profile, for a forecast. `gap`: the search stops when no plan can be better by more
    than this share. Each kind of device may be a pipeline of its own (`Plan.beside`) if that is better, unless
    `side_by_side` is False. If the profile knows the lengths of texts, the plan counts tokens (`Plan.length`). If the
    objective has a budget for ramps, answers are early (optimizer/early_answers.py).
    """
    exits = exits or profile.exits_of(profile.length)
    facts = problem(profile, devices, links, length=profile.length, exits=exits)

    def find(facts: Problem) -> Plan:
        if objective.ramp_budget is not None:
            return facts.annotated(early_plan(facts, objective))
        plan = best_pipelines(facts, objective, gap) if side_by_side else search(facts, objective, gap)
        if plan is None:
            raise NoPlanError(facts, objective)
        return facts.annotated(plan)

    planned = plan_for_its_ramps(facts, objective, find)
    assert planned, "This is a bug: where there is no plan, an error says why."
    return planned[0]


if __name__ != "isobatch.optimizer":  # under a second name, each class would exist twice
    raise ImportError("optimizer is a part of isobatch: import isobatch.optimizer")
