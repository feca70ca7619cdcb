"""The problems by which plans are judged."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.simulator.simulation import World
from cluster.simulator.sustained import run
from experiments.bound import judged as of_each
from experiments.bound import plans
from experiments.bound.admitted import Replayed
from experiments.bound.judged import JudgedProblem, Until, figures, judged
from experiments.bound.plans import JudgedPlan
from experiments.bound.problems import playable
from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.pipelines.baselines import NO_EXITS
from optimizer.pipelines.spread import joined
from optimizer.plan import Placement, Plan, Split
from optimizer.search.exact import search

PLAN = JudgedPlan(10.0, 9.0, -0.1, 0.0, "", None, 1.0)


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


def test_no_lane_stands_idle_while_inputs_are_refused() -> None:
    """A launch of the slower lane takes nearly as long as the SLO if anybody stays, and 94 % of its inputs leave early.

    A few launches that go to the end do not show that the lane is too slow.
    """
    problem = playable(55)
    assert problem is not None
    facts, objective = problem
    assert objective.slo_s is not None
    ramps = (0, 1, 2, 5, 6, 9)
    lanes = [Plan((Placement(kind, 3, (Split(0, 12, batch, ramps),)),)) for kind, batch in (("kind2", 4), ("kind1", 2))]
    world = World(joined(lanes), facts, objective.slo_s)
    for seed in (4, 5, 31):
        assert run(world, 950.0, 5000, seed).good_share > 0.99


def test_a_plan_that_promises_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "planned", lambda facts, objective: plans.FIND(facts, objective))
    monkeypatch.setattr(plans, "INPUTS", 1000)
    monkeypatch.setattr(plans, "SLOS", 30)
    found = plans.judge(7)
    assert found is not None
    assert found.error < -0.2
    assert found.neighbour_gain is None


def test_the_next_run_judges_only_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def plan(seed: int) -> JudgedPlan | None:
        asked.append(seed)
        return PLAN if seed else None

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(of_each, "judge", plan)
    monkeypatch.setattr(of_each, "replayed", lambda seed: Replayed(8, seed, 0, 100, 1))
    later, over = Until(time.time() + 600), Until(0.0)
    with ThreadPoolExecutor(1) as cores:
        before = judged(range(2), later, cores)
        assert before == [
            JudgedProblem(0, None, Replayed(8, 0, 0, 100, 1)),
            JudgedProblem(1, PLAN, Replayed(8, 1, 0, 100, 1)),
        ]
        assert judged(range(3), over, cores) == before
        assert [each.seed for each in judged(range(1, 3), later, cores)] == [1, 2]
    assert asked == [0, 1, 2]


def test_any_problems_have_all_figures() -> None:
    worse = PLAN._replace(error=0.05, beaten_by=NO_EXITS, neighbour_gain=0.03)
    found = figures(
        [JudgedProblem(seed, plan, Replayed(8, 1, seed, 100, 2)) for seed, plan in enumerate((PLAN, worse, None))]
    )
    counts = {"problems": 3, "planned": 2, "neighbours": 1, "beaten_by_baseline": 1, "refused_replayed": 24}
    shares = {"promise_error_max": 0.1, "promise_error_p50": 0.075, "best_neighbour_p90": 0.03, "late_admitted": 0.02}
    assert found | counts == found
    assert {name: found[name] for name in shares} == pytest.approx(shares)
    assert found["refused_though_in_time"] == pytest.approx(1 / 8)
    assert found["gained_by_letting_in"] == pytest.approx((0 + 1 + 2) / 24)
    assert found["gained_by_letting_in_error"] == pytest.approx((1 + 0 + 1) ** 0.5 / 24)


def test_a_baseline_that_sustains_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "INPUTS", 200)
    problem = playable(7)
    assert problem is not None
    assert NO_EXITS in plans.better(*problem, 1.0)
    assert not list(plans.better(*problem, 1e6))
