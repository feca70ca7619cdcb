"""Large fleets are simulated as cells, so that a run costs the same at any rate."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.cluster.simulator.cells import LARGER, SIZE, WHOLE, world_of
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import World
from isobatch.cluster.simulator.sustained import inputs_of, run
from isobatch.deployments.dispatch.messages import Limits
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.pipelines.spread import joined
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem
from tests.helpers.simulated_fleet import BLOCKS, facts

LATENCY_SLOS = 0.04  # s, some times what an input takes alone


def fleet_of(first: int, second: int, slow: int) -> tuple[Problem, Plan]:
    """Two placements of fast devices in one pipeline, with slow devices beside it."""
    chain = Plan((Placement("fast", first, (Split(0, 2, 8, (0, 1)),)), Placement("fast", second, (Split(2, 4, 8),))))
    alone = Plan((Placement("slow", slow, (Split(0, BLOCKS, 6, (0, 1)),)),))
    return facts(fast=first + second, slow=slow), joined([chain, alone])


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_a_cell_has_every_split_and_equal_shares_of_inputs_and_devices(first: int, second: int, slow: int) -> None:
    problem, plan = fleet_of(first, second, slow)
    world = world_of(plan, problem, LATENCY_SLOS)
    whole_per_s, cell_per_s = (evaluate(each, problem).goodput_per_s for each in (plan, world.plan))
    assert cell_per_s == pytest.approx(world.share * whole_per_s)
    assert [each.splits for each in world.plan.pipelines] == [each.splits for each in plan.pipelines]
    if LATENCY_SLOS * whole_per_s <= WHOLE:
        assert world == World(plan, problem, LATENCY_SLOS)
    else:
        assert world.slo_s * cell_per_s <= 1.3 * max(LARGER) * SIZE


def test_survivors_that_move_in_the_fleet_move_in_its_cell() -> None:
    splits, problem = (Split(0, 2, 8, (0, 1)), Split(2, BLOCKS, 8)), facts(fast=2, slow=1)
    plan = Plan((Placement("fast", 2, splits),))
    for each, replicas in ((plan, 2), (replace(plan, placements=(replace(plan.placements[0], local=True),)), 1)):
        world = world_of(each, problem, 10 * WHOLE / evaluate(each, problem).goodput_per_s)
        assert world.plan.devices() == {"fast": replicas}


@pytest.mark.parametrize("times", [30, 3_000])
def test_a_run_has_as_many_inputs_at_any_rate(times: int) -> None:
    problem, plan = fleet_of(6 * times, 2 * times, 12 * times)
    small, small_plan = fleet_of(6, 2, 12)
    inputs = [
        inputs_of(world_of(each, facts_of, LATENCY_SLOS), evaluate(each, facts_of).goodput_per_s, 1, 30)
        for each, facts_of in ((small_plan, small), (plan, problem))
    ]
    assert inputs[1] <= 30 * 1.3 * max(LARGER) * SIZE
    world = world_of(plan, problem, LATENCY_SLOS)
    share = sum(world.plan.devices().values()) / sum(plan.devices().values())
    assert world.share == pytest.approx(share, rel=0.05), "devices are divided in proportion"
    assert inputs[0] <= inputs[1]


def test_a_pipeline_of_one_device_does_not_keep_a_cell_large() -> None:
    problem, plan = fleet_of(180, 60, 1)
    world = world_of(plan, problem, 5_000 / evaluate(plan, problem).goodput_per_s)
    assert world.share < 0.25
    assert world.plan.devices()["slow"] == 1


@pytest.mark.parametrize(("load", "slow"), [(0.95, 240), (0.95, 1)])
def test_a_cell_answers_as_many_in_time_as_the_whole_fleet(load: float, slow: int) -> None:
    problem, plan = fleet_of(180, 60, slow)
    whole, cell = World(plan, problem, 0.02, Limits(max_inside=10**6)), world_of(plan, problem, 0.02, 2 * SIZE)
    assert cell.share < 0.5
    rate_per_s = load * evaluate(plan, problem).goodput_per_s
    of_whole, of_cell = (run(each, rate_per_s, inputs, 3) for each, inputs in ((whole, 14_000), (cell, 8_000)))
    assert good_later(of_cell) == pytest.approx(good_later(of_whole), abs=0.03)
    assert of_cell.tally.quantile_s(0.5) == pytest.approx(of_whole.tally.quantile_s(0.5), rel=0.15)


def good_later(report: Report) -> float:
    """The share in time of the inputs of the second half, after all devices began at once."""
    lost = report.tally.refused + report.tally.expired
    return float(1 - lost[len(lost) // 2 :].sum() / report.tally.arrived[len(lost) // 2 :].sum())


def test_a_fast_device_that_cannot_be_divided_gets_a_shorter_slo() -> None:
    problem = facts(fast=1)
    plan = Plan((Placement("fast", 1, (Split(0, BLOCKS, 8),)),))
    world = world_of(plan, problem, 60.0)
    assert (world.plan, world.share) == (plan, 1.0)
    assert world.slo_s < 60.0
    assert world.slo_s * evaluate(plan, problem).goodput_per_s <= max(LARGER) * SIZE * 1.001
    assert world_of(plan, problem, 0.5) == replace(world, slo_s=0.5)
