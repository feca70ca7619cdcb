"""A plan becomes a route with the planner's own times."""

from dataclasses import replace

import pytest

from isobatch.deployments.dispatch.route import Stage, route_of
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem, problem
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from tests.helpers.virtual_device import SURVIVAL, table


def facts_of(named: str, measured: LatencyTable | None = None) -> Problem:
    devices = fleet(named)
    profile = Profile("made up", (measured or table(),), ExitProfile(SURVIVAL))
    return problem(profile, devices, links_between(devices))


def lone_stage(*ramps: int, count: int = 1, facts: Problem | None = None) -> Stage:
    """All blocks as one split."""
    plan = Plan((Placement("v100", count, (Split(0, 4, 8, ramps=ramps),)),))
    (stage,) = route_of(plan, facts or facts_of(f"v100={count}"), ["all"]).stages
    return stage


def test_stages_follow_the_plan_and_its_cost_model() -> None:
    plan = Plan((Placement("v100", 2, (Split(0, 2, 8, ramps=(1,)),)), Placement("v100", 1, (Split(2, 4, 4),))))
    facts = facts_of("v100=3")
    route = route_of(plan, facts, ["front", "back"])
    front, back = route.stages
    assert (front.start, front.stop, front.batch, front.group, front.ramps) == (0, 2, 8, "front", {1})
    assert (back.survival, back.group) == (0.5, "back")
    scores = evaluate(plan, facts).splits
    assert [stage.launch_s[-1] for stage in route.stages] == [pytest.approx(score.launch_s) for score in scores]
    assert list(front.launch_s) == sorted(front.launch_s)
    assert (front.transfer_s, back.transfer_s) == (0.0, pytest.approx(scores[1].transfer_s))


def test_a_stage_s_exit_points_have_the_planned_times() -> None:
    plan = Plan((Placement("v100", 2, (Split(0, 4, 8, ramps=(1,)),)),))
    facts = facts_of("v100=2")
    (stage,) = route_of(plan, facts, ["all"]).stages
    assert [(point.block, point.survival) for point in stage.exits] == [(1, SURVIVAL[2]), (3, 0.0)]
    (score,) = evaluate(plan, facts).splits
    ramp_s, end_s = stage.until_s(8)
    assert end_s == pytest.approx(score.felt_s)
    assert ramp_s < score.launch_s < end_s, "some launches end at the ramp"
    assert stage.until_s(1) < stage.until_s(8)
    assert stage.until_s(99) == stage.until_s(8)
    assert [stage.exit_at(block) for block in range(4)] == [0, 0, 1, 1]


def test_a_stage_that_no_input_should_reach_takes_as_long_as_one_that_few_reach() -> None:
    """Inputs that ask for the whole network get there; by a shorter time their replica would count as hung."""
    plan = Plan((Placement("v100", 2, (Split(0, 2, 8, ramps=(1,)),)), Placement("v100", 1, (Split(2, 4, 4),))))
    none, few = (
        route_of(plan, facts_of("v100=3").surviving((1.0, 0.8, share, share)), ["front", "back"]).stages[1]
        for share in (0.0, 1e-6)
    )
    assert none.launch_s == pytest.approx(few.launch_s)
    assert none.until_s(4) == pytest.approx(few.until_s(4))


def test_a_short_text_takes_less_until_each_exit_point() -> None:
    one, many = table().block_s
    few, ramp = tuple(each / 10 for each in one), table().ramp_s[0]
    texts = replace(table(), length=100, batch_sizes=(0.1, 1, 8), block_s=(few, one, many), ramp_s=(ramp,) * 3)
    facts = replace(facts_of("v100=2", texts), length=100)
    stage = lone_stage(1, count=2, facts=facts)
    short, long = stage.until_s(10), stage.until_s(100)
    assert all(0.2 < less / more < 0.4 for less, more in zip(short, long, strict=True))


def test_pipelines_side_by_side_are_routes_side_by_side_with_groups_of_their_own() -> None:
    lane = Plan((Placement("v100", 1, (Split(0, 4, 4),)),))
    facts = facts_of("v100=2")
    route = route_of(Plan(lane.placements, beside=(lane,)), facts, ["left", "right"])
    assert [[stage.group for stage in each.stages] for each in route.pipelines] == [["left"], ["right"]]


def test_a_local_placement_transfers_nothing_to_itself() -> None:
    splits = (Split(0, 2, 8, ramps=(1,)), Split(2, 4, 4))
    facts = facts_of("v100=1")
    local, sent = (
        route_of(Plan((Placement("v100", 1, splits, local=local),)), facts, ["all"]) for local in (True, False)
    )
    assert [stage.local for stage in local.stages] == [True, True]
    assert (local.stages[1].transfer_s, local.keeps(local.stages[0])) == (0.0, True)
    assert sent.stages[1].transfer_s > 0
    assert not sent.keeps(sent.stages[0])


def test_a_plan_s_thresholds_go_with_the_ramps_of_all_pipelines() -> None:
    lane = Plan((Placement("v100", 1, (Split(0, 2, 4, (1,)), Split(2, 4, 4, (2,)))),))
    facts = facts_of("v100=2")
    plan = Plan(lane.placements, beside=(lane,), thresholds=((0, 0.1), (1, 0.2)))
    assert Plan.from_json(plan.to_json()) == plan
    route = route_of(plan, facts, ["left", "right"])
    assert [each.ramps for each in route.pipelines] == [{1: 0.2, 2: None}] * 2
    assert route_of(lane, facts, ["left"]).ramps == {1, 2}


@pytest.mark.parametrize(("behind", "blocks"), [(None, (0, 1, 2, 3)), (1, (2, 3)), (2, (3,))])
def test_an_input_that_stays_costs_its_part_of_each_later_block(behind: int | None, blocks: tuple[int, ...]) -> None:
    stage = lone_stage(1, 2)
    each_input_s = sum(0.001 * (block + 1) for block in blocks)  # as in the table
    assert stage.staying_s(6, 1, behind) == pytest.approx(each_input_s)
    assert stage.seconds(6) - stage.seconds(5) < stage.staying_s(6, 1)  # others leave


def test_inputs_that_all_stay_cost_a_launch_that_does_not_shrink() -> None:
    stage, whole = lone_stage(1, 2), lone_stage()
    ramps_s, launch_s = 2 * 0.0001, 0.0005  # a batch stops at both ramps
    assert stage.staying_s(6, 6) == pytest.approx(whole.seconds(6) + ramps_s + 2 * launch_s)
    assert stage.staying_s(6, 6, behind=2) == pytest.approx(6 * 0.004 + launch_s)
