"""The problems by which plans are judged."""

import time

import pytest

from experiments.bound import plans
from experiments.bound.plans import Until, judge
from experiments.bound.problems import playable
from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.pipelines.baselines import NO_EXITS
from optimizer.search.exact import search


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_problem_has_an_slo_that_some_plan_keeps(seed: int) -> None:
    problem = playable(seed)
    assert problem is not None
    facts, objective = problem
    fastest = search(facts, Objective(goal="latency", max_batch=objective.max_batch))
    assert fastest is not None
    assert objective.slo_s is not None
    assert evaluate(fastest, facts).latency_s < objective.slo_s
    assert problem == playable(seed)


def test_a_plan_that_promises_too_much_is_found_out_and_nothing_is_judged_after_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "planned", lambda facts, objective: plans.FIND(facts, objective))
    monkeypatch.setattr(plans, "INPUTS", 1000)
    monkeypatch.setattr(plans, "SLOS", 30)
    found = judge(7, Until(time.time() + 600))
    assert found is not None
    assert found.error < -0.2
    assert judge(7, Until(time.time())) is None


def test_a_baseline_that_sustains_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "INPUTS", 200)
    problem = playable(7)
    assert problem is not None
    assert NO_EXITS in plans.better(*problem, 1.0)
    assert not list(plans.better(*problem, 1e6))
