"""The result of `isobatch plan`, from which its report, its picture and its JSON are made."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import Objective, Plan, Problem, Score, evaluate, read_plan
from optimizer.effort import EFFORT, Effort
from optimizer.infeasible import reason
from optimizer.pipelines.baselines import Baseline, baselines, constrained
from optimizer.pipelines.batch_gain import BatchGain
from optimizer.pipelines.side_by_side import few_splits, side_by_side
from optimizer.plan import SimulatedTimes
from optimizer.search.exact import search
from optimizer.tuning import opened, plan_for_its_ramps
from profiles.errors import UserError
from profiles.exits import ExitProfile

if TYPE_CHECKING:
    from cluster.simulator.choice import Find, SimulatedChoice

# Simulates a plan and others near it; None: no plan is simulated.
Simulate = Callable[[Plan, Problem, Objective, "Find"], "SimulatedChoice | None"]
# The planner stops at this gap where its plan is only a candidate: simulation corrects what its estimates miss.
CANDIDATE_GAP = 0.03


@dataclass(frozen=True)
class PlanResult:
    """A plan, and everything that is reported of it."""

    facts: Problem
    objective: Objective
    plan: Plan
    score: Score
    baselines: tuple[Baseline, ...]
    simulated: "SimulatedChoice | None" = None  # what the simulator says of it
    not_simulated: str = ""  # why it was not simulated
    batch_gains: tuple[BatchGain, ...] = ()  # by kind of device

    @property
    def pipelines(self) -> list[tuple[Plan, Score]]:
        """Every pipeline with its score."""
        return list(zip(self.plan.pipelines, self.score.pipelines or (self.score,), strict=True))

    @property
    def times(self) -> SimulatedTimes | None:
        """What the simulator shows at the promised rate; of a plan from a file, what it showed when that was made."""
        return self.plan.promise.simulated if self.plan.promise else None

    def as_json(self) -> dict[str, object]:
        """The JSON that docs/planner.md describes; fields are added, never renamed, within a schema version."""
        return {
            "schema_version": 1,
            "plan": json.loads(self.plan.to_json()),
            "score": {**self.score.as_json(), "latency_parts_s": self.score.latency_parts_s},
            "tables": [
                {
                    "kind": table.kind,
                    "source": table.source,
                    "estimated": table.derived,
                    "origin": table.origin,
                    "backend": table.backend,
                    "dtype": table.dtype,
                }
                for table in self.facts.tables
            ],
            "played": self.simulated
            and {
                "before_per_s": self.simulated.before_per_s,
                "after_per_s": self.simulated.after_per_s,
                "tried": self.simulated.tried,
                **(asdict(self.times) if self.times else {}),
            },
            "batch_gains": [asdict(each) for each in self.batch_gains],
            "baselines": [
                {
                    "name": each.name,
                    "goodput_per_s": each.score.goodput_per_s if each.score else 0.0,
                    "cost_per_hour": each.score.cost_per_hour if each.score else None,
                    "latency_s": each.score.latency_s if each.score else None,
                }
                for each in self.baselines
            ],
        }


def settled_result(
    exits: ExitProfile,
    facts_of: Callable[[tuple[float, ...]], Problem],
    result: Callable[..., PlanResult],
    effort: Callable[[], Effort],
    simulate: Simulate | None,
) -> PlanResult:
    """The result for those who leave with the ramps that its plan opens; plans are simulated once this is known.

    `facts_of` gives the facts for a survival, `result` what `plan_result` says of facts, for an effort and a simulate.
    """
    survival = exits.survival
    if exits.sure:
        with suppress(UserError):  # that no plan fits is said below
            plan_found = plan_for_its_ramps(
                exits, lambda each: result(facts_of(each), effort=effort()), lambda plan_found: plan_found.plan
            )
            survival = exits.planning_survival(opened(plan_found.plan)) if plan_found else survival
    return result(facts_of(survival), effort=effort(), simulate=simulate)


def plan_result(
    facts: Problem,
    objective: Objective,
    alpha: float | None,
    gap: float,
    apart: bool,
    file: Path | None,
    max_splits: int | None = None,
    effort: Effort = EFFORT,
    simulate: Simulate | None = None,
) -> PlanResult:
    """The best plan, or the one in `file`, beside the baselines. The error says why when no plan fits.

    A plan that was simulated need not fit the latency that the planner believes in, and none has to fit it with slack.
    """
    if objective.cuts and objective.cuts[-1] >= facts.num_blocks:
        last, blocks = facts.num_blocks - 1, facts.num_blocks
        within = f"{blocks} blocks: cut before 1 to {last}" if last else "1 block, which cannot be cut"
        raise UserError(f"--cut {objective.cuts[-1]}: the network has {within}")
    others = baselines(facts, objective)
    if alpha is not None:
        objective = constrained(objective, others[0], alpha)
    one = partial(side_by_side if apart else search, effort=effort)

    def find(facts: Problem, objective: Objective, gap: float = CANDIDATE_GAP) -> Plan | None:
        return few_splits(facts, objective, gap, max_splits, one) if max_splits else one(facts, objective, gap)

    plan_found = read_plan(file) if file else find(facts, objective, gap)
    first = plan_found or (find(facts, replace(objective, slack=0.0), gap) if simulate else None)
    better = simulate(first, facts, objective, find) if simulate and first else None
    if better:
        plan_found, objective = better.plan, replace(objective, slo_s=None)
    if plan_found is None:
        raise UserError(reason(facts, objective))
    plan = facts.annotated(plan_found)
    return PlanResult(facts, objective, plan, evaluate(plan, facts, objective), others, better)
