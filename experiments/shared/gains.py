"""Plans of baselines, plans with `--no-later`, and E3's two fleets by datasheets."""

from dataclasses import dataclass, replace
from functools import cached_property, partial

from experiments.planner.settings import BERT_BASE
from isobatch.cluster.simulator.plan_choice import DEFAULT_EFFORT, best_simulated
from isobatch.cluster.simulator.tails import Tails
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS, baseline
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError

GAP = 0.01  # of the planner


def baseline_plan(name: str, facts: Problem, objective: Objective) -> Plan:
    plan = baseline(name, facts, objective).plan
    if plan is None:
        raise UserError(f"{name}: no batch size keeps these limits")
    return plan


def keeping_tail(plan: Plan, facts: Problem, limited: Objective) -> tuple[Tails, Plan]:
    """The tail without exits, and the plan of `isobatch plan --no-later`. `plan`: the plan before simulation."""
    assert limited.slo_s, "This is a bug: a plan that is no later has an SLO."
    stock, find = baseline_plan(NO_EXITS, facts, limited), partial(side_by_side, gap=GAP)
    tails = Tails(facts, stock, limited.slo_s, DEFAULT_EFFORT.last_inputs)
    return tails, best_simulated(plan, facts, limited, find, replace(DEFAULT_EFFORT, tails=tails)).plan


@dataclass(frozen=True)
class PaperFleet:
    """BERT-base by datasheets, in single precision as in E3, within its SLO of 100 ms, on one of its fleets."""

    devices: str
    slo_s: float = 0.1

    @cached_property
    def facts(self) -> Problem:
        return BERT_BASE.facts(self.devices, "float32")


ONE_KIND, MIXED = PaperFleet("v100=16"), PaperFleet("v100=6,p100=8,k80=15")  # of figures 7 and 13
