"""What `isobatch plan` finds, for its report, its picture and its JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from optimizer import Objective, Plan, Problem, Score, evaluate, read_plan
from optimizer.baselines import Baseline, baselines, held_to
from optimizer.dp import search
from optimizer.infeasible import reason
from optimizer.lanes import side_by_side
from profiles.errors import UserError


@dataclass(frozen=True)
class Answer:
    """A plan, and what is to be said of it."""

    facts: Problem
    objective: Objective
    plan: Plan
    score: Score
    baselines: tuple[Baseline, ...]

    @property
    def lanes(self) -> list[tuple[Plan, Score]]:
        """Every pipeline with its score."""
        return list(zip(self.plan.lanes, self.score.lanes or (self.score,), strict=True))

    def as_json(self) -> dict[str, object]:
        """Described in docs/planner.md; fields are added, never renamed, within a schema version."""
        score = asdict(self.score)
        return {
            "schema_version": 1,
            "plan": json.loads(self.plan.to_json()),
            "score": {**score, "latency_parts_s": self.score.latency_parts_s},
            "tables": [
                {"kind": table.kind, "source": table.source, "estimated": table.from_datasheet}
                for table in self.facts.tables
            ],
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


def answer(
    facts: Problem, objective: Objective, alpha: float | None, gap: float, apart: bool, file: Path | None
) -> Answer:
    """The best plan, or the one in `file`, beside the baselines. Says why when nothing fits."""
    others = baselines(facts, objective)
    if alpha is not None:
        objective = held_to(objective, others[0], alpha)
    find = side_by_side if apart else search
    found = read_plan(file) if file else find(facts, objective, gap)
    if found is None:
        raise UserError(reason(facts, objective))
    return Answer(facts, objective, found, evaluate(found, facts, objective), others)
