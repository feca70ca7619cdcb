"""The result of `isobatch plan`, from which its report, its picture and its JSON are made."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from optimizer import Objective, Plan, Problem, Score
from optimizer.pipelines.baselines import Baseline
from optimizer.pipelines.batch_gain import BatchGain
from optimizer.plan import SimulatedTimes

if TYPE_CHECKING:
    from cluster.simulator.plan_choice import SimulatedChoice


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
                "cell": self.simulated.cell and asdict(self.simulated.cell),
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
