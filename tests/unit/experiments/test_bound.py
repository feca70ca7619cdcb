"""The problems by which plans are judged."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.bound import plans
from experiments.bound.plans import JudgedPlan, Until, judge, judged
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


def test_the_next_run_judges_only_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def found(seed: int, out_of_time: Until) -> JudgedPlan | None:
        asked.append(seed)
        return None if out_of_time() else JudgedPlan(seed, 10.0, 9.0, -0.1, 0.0, "", 1.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "judge", found)
    later, over = Until(time.time() + 600), Until(0.0)
    with ThreadPoolExecutor(1) as cores:
        assert len(judged(range(2), later, cores)) == 2
        assert [each.seed for each in judged(range(3), over, cores)] == [0, 1]
        assert [each.seed for each in judged(range(1, 3), later, cores)] == [1, 2]
    assert asked == [0, 1, 2, 2]


def test_a_baseline_that_sustains_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "INPUTS", 200)
    problem = playable(7)
    assert problem is not None
    assert NO_EXITS in plans.better(*problem, 1.0)
    assert not list(plans.better(*problem, 1e6))
