"""Among which plans is chosen: the planner's best, and those that ran lately."""

from collections.abc import Mapping

from cluster.controller.record import Record
from cluster.controller.verdict import Worth, is_late, lacking
from optimizer import Objective, Plan, Problem, evaluate


def expected_best(
    best: Plan, running: Worth, record: Record, facts: Problem, objective: Objective, counts: Mapping[str, int]
) -> Worth:
    """The planner's best, or a plan that ran lately and kept more of its promise.

    Of a plan that never ran no more is expected than of others, unless the running one falls short because it is
    late, which the new one will not be.
    """
    hopeful = is_late(running.score, objective) and best not in record.plans
    worths = [Worth(best, evaluate(best, facts), 1.0 if hopeful else record.kept(best))]
    known = (plan for plan in record.plans if not lacking(plan, counts))
    worths += [Worth(plan, evaluate(plan, facts), record.kept(plan)) for plan in known]
    return max(worths, key=lambda each: each.goodput_per_s)
