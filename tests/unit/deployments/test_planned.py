"""A plan becomes a route with the planner's own times."""

import pytest

from deployments.planned import route_of
from optimizer.evaluate import evaluate
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import problem
from profiles.devices import fleet, links_between
from profiles.exits import ExitProfile
from profiles.files import Profile
from tests.unit.deployments.test_virtual import SURVIVAL, table


def test_stages_follow_the_plan_and_its_cost_model() -> None:
    plan = Plan((Placement("v100", 2, (Split(0, 2, 8, ramps=(1,)),)), Placement("v100", 1, (Split(2, 4, 4),))))
    devices = fleet("v100=3")
    facts = problem(Profile("made up", (table(),), ExitProfile(SURVIVAL)), devices, links_between(devices))
    route = route_of(plan, facts, {plan.placements[0]: "front", plan.placements[1]: "back"})
    front, back = route.stages
    assert (front.start, front.stop, front.batch, front.group, front.ramps) == (0, 2, 8, "front", {1})
    assert (back.survival, back.group) == (0.5, "back")
    scores = evaluate(plan, facts).splits
    assert [stage.launch_s[-1] for stage in route.stages] == [pytest.approx(score.launch_s) for score in scores]
    assert list(front.launch_s) == sorted(front.launch_s)
