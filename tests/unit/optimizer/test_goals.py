"""A new goal is one class: what it is worth, and as much of its bounds as one cares to say."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from experiments.planner.bruteforce import best_value
from experiments.planner.random_problems import random_objective, random_problem
from isobatch.optimizer.effort import Number
from isobatch.optimizer.goals import GOALS, Goal, register
from isobatch.optimizer.goals.relaxation import Cut, Relaxation
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search


class Impatience(Goal):
    """Every second of latency is as bad as ten dollars per hour. It says all it knows: latency alone is a bound."""

    name = "impatience"
    needs_latency = True

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return latency_s + cost_per_hour / 10

    def most_seconds_per_input(self, value: float) -> float:
        return value

    def first_bound(self, relaxation: Relaxation) -> Cut:
        return relaxation.fastest()


class Thrift(Goal):
    """Dollars, with a little more for every second per input. It says nothing of its bounds."""

    name = "thrift"

    def value(self, goodput_per_s: Number, cost_per_hour: Number, latency_s: Number) -> Number:
        return cost_per_hour + 1 / goodput_per_s


@pytest.fixture(params=[Impatience, Thrift])
def goal(request: pytest.FixtureRequest) -> Iterator[str]:
    register(request.param)
    yield request.param.name
    del GOALS[request.param.name]


def random_question(seed: int, goal: str) -> tuple[Problem, Objective]:
    facts = random_problem(seed)
    return facts, replace(random_objective(seed, facts), goal=goal)


@pytest.mark.parametrize("seed", [0, 1, 7, 22])
def test_a_new_goal_gets_the_best_plan_of_all(seed: int, goal: str) -> None:
    facts, objective = random_question(seed, goal)
    plan, best = search(facts, objective), best_value(facts, objective)
    assert plan or best == float("inf")
    if plan:
        score = evaluate(plan, facts, objective)
        assert not score.broken
        assert plan.promise
        assert plan.promise.gap == 0
        value = objective.aim.value(score.goodput_per_s, score.cost_per_hour, score.latency_s)
        assert value == pytest.approx(best, rel=1e-8)


def test_an_unknown_goal_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        Objective(goal="fame")
