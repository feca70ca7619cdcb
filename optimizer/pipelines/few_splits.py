"""Plans of a few splits: every choice of so many cuts is planned for, and the best plan is taken."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import comb

from optimizer.objective import Objective
from optimizer.pipelines.spread import best_of
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.errors import UserError

MOST_CHOICES = 600  # of cuts, each a search of its own

Find = Callable[[Problem, Objective, float], Plan | None]


def few_splits(facts: Problem, objective: Objective, gap: float, most: int, find: Find) -> Plan | None:
    """The best plan by `find` whose pipelines have at most so many splits each.

    Where the best plan of all has more, it is the best of those whose pipelines are all cut at the same blocks.
    """
    plan = find(facts, objective, gap)
    if plan is None or all(len(pipeline.splits) <= most for pipeline in plan.pipelines):
        return plan
    inside = range(1, facts.num_blocks)
    choices = sum(comb(len(inside), count) for count in range(most))
    if choices > MOST_CHOICES:
        raise UserError(
            f"{facts.num_blocks} blocks are cut into at most {most} splits in {choices:,} ways, and {MOST_CHOICES} can "
            "be tried: ask for fewer splits, or name the cuts"
        )
    found = [
        find(facts, replace(objective, cuts=cuts), gap) for count in range(most) for cuts in combinations(inside, count)
    ]
    return best_of(found, facts, objective)
