"""Pipelines side by side, and what a wrong forecast costs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.planner.random_problems import random_objective, random_problem
from optimizer.dp import search
from optimizer.evaluate import evaluate
from optimizer.lanes import side_by_side
from optimizer.objective import Objective
from optimizer.sensitivity import sensitivity
from profiles.errors import UserError

few = settings(max_examples=12, deadline=None, derandomize=True)


@few
@given(st.integers(0, 10**6))
def test_side_by_side_is_no_worse_than_one_pipeline_and_below_its_ceiling(seed: int) -> None:
    facts = random_problem(seed)
    objective = replace(random_objective(seed, facts), goal="goodput", goodput_per_s=0.0, cost_per_hour=None)
    objective = replace(objective, arrivals_per_s=None)
    one, several = search(facts, objective), side_by_side(facts, objective)
    assert (one is None) <= (several is None)
    if several is None or several.promise is None:
        return
    score = evaluate(several, facts, objective)
    assert not score.broken
    assert score.goodput_per_s == pytest.approx(several.promise.goodput_per_s)
    kinds = [{placement.kind for placement in lane.placements} for lane in several.lanes]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    if one and one.promise:
        assert score.goodput_per_s >= one.promise.goodput_per_s * (1 - 1e-8)
        assert score.goodput_per_s * (1 + several.promise.gap) >= one.promise.goodput_per_s * (1 - 1e-8)


def test_only_goodput_is_planned_side_by_side() -> None:
    with pytest.raises(UserError, match="side by side"):
        side_by_side(random_problem(1), Objective(goal="latency"))


@few
@given(st.integers(0, 10**6))
def test_a_right_forecast_loses_nothing(seed: int) -> None:
    facts = random_problem(seed)
    objective = Objective(slo_s=random_objective(seed, facts).slo_s)
    plan = search(facts, objective)
    if plan:
        (right,) = sensitivity(plan, facts, objective, errors=(0.0,))
        assert right.within_slo
        assert right.lost == pytest.approx(0.0, abs=1e-6)
