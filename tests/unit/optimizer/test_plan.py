"""Plans as values and as files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planner.networks import distilbert
from isobatch.deployments.dispatch.route import route_of
from isobatch.optimizer import Objective, evaluate, optimize, problem
from isobatch.optimizer.plan import Placement, Plan, Promise, Split, read_plan
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load
from isobatch.profiles.lengths import Lengths

DEMO = Path(__file__).parents[3] / "cluster" / "demo"
PLAN = Plan(
    (
        Placement("v100", 6, (Split(0, 3, 8, (0, 2)), Split(5, 12, 4, ()))),
        Placement("k80", 15, (Split(3, 5, 16, (4,)),), local=True),
    ),
    Promise(1000.0, 0.08, 28.5, 0.0),
)


def test_a_plan_survives_its_file_and_a_placement_is_local_only_where_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    assert read_plan(path) == PLAN
    fields = json.loads(PLAN.to_json())
    del fields["placements"][1]["local"]
    assert not any(placement.local for placement in Plan.from_json(json.dumps(fields)).placements)


def test_splits_come_in_the_order_of_the_network_wherever_they_are_placed() -> None:
    assert [(split.start, split.stop) for split in PLAN.splits] == [(0, 3), (3, 5), (5, 12)]
    assert PLAN.ramps == (0, 2, 4)
    assert PLAN.devices() == {"k80": 15, "v100": 6}
    assert PLAN.placement_of(PLAN.splits[1]).kind == "k80"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 7}, "schema_version 7"),
        ({"placement": []}, "placement: there is no such field"),
        ({"placements": [{"kind": "v100", "replicas": 0, "splits": []}]}, "replicas = 0"),
        (
            {"placements": [{"kind": "v100", "replicas": 1, "splits": [{"start": 0, "stop": 2}]}]},
            "batch_size: this field is missing",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(PLAN.to_json()), **change}))
    with pytest.raises(UserError, match=sentence) as error:
        read_plan(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"replicas": 6', '"replicas": 1000000000000', "placement on v100: replicas = 1000000000000 must be"),
        ('"goodput_per_s": 1000.0', '"goodput_per_s": NaN', "promise.goodput_per_s: Input should be a finite number"),
        ('"latency_s": 0.08', '"latency_s": 1e999', "promise.latency_s: Input should be a finite number"),
        ('"replicas": 6', '"replicas": true', "placements.0.replicas = true: this must be a number"),
        (PLAN.to_json(), "", "is not JSON"),
        (PLAN.to_json(), "[1, 2]", "must be a JSON object, got list"),
        ('"schema_version": 1', '"schema_version": true', "schema_version True, this isobatch reads 1"),
        (
            '"simulated": null',
            '"played": {"p50_s": true, "p99_s": 0.1, "in_time": 1}',
            "promise.played.p50_s: Input should be a valid number",
        ),
        ('"thresholds": []', '"thresholds": [[1, NaN]]', "thresholds.0.1: Input should be a finite number"),
    ],
)
def test_a_number_that_nothing_can_have_is_refused_by_its_place(old: str, new: str, sentence: str) -> None:
    text = PLAN.to_json()
    assert old in text
    with pytest.raises(UserError, match=sentence):
        Plan.from_json(text.replace(old, new))


def test_gaps_and_overlaps_of_splits_and_ramps_outside_theirs_are_refused() -> None:
    for splits in ((Split(0, 2, 1), Split(3, 4, 1)), (Split(0, 2, 1), Split(1, 4, 1)), (Split(1, 2, 1),)):
        with pytest.raises(ValueError, match="cover every block once"):
            Plan((Placement("v100", 1, splits),))
    with pytest.raises(ValueError, match=r"ramps \(3,\)"):
        Split(0, 3, 1, (3,))


def test_pipelines_side_by_side_survive_their_file_and_share_nothing_but_the_network() -> None:
    beside = Plan((Placement("p100", 8, (Split(0, 12, 32),)),))
    plan = Plan(PLAN.placements, PLAN.promise, (beside,))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.devices() == {"k80": 15, "p100": 8, "v100": 6}
    assert [pipeline.num_blocks for pipeline in plan.pipelines] == [12, 12]
    with pytest.raises(ValueError, match="must cover 12 blocks"):
        Plan(PLAN.placements, None, (Plan((Placement("p100", 8, (Split(0, 11, 32),)),)),))


def test_a_plan_that_counts_tokens_says_so_and_older_files_count_inputs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(replace(PLAN, length=24).to_json())
    assert read_plan(path).length == 24
    fields = json.loads(PLAN.to_json())
    del fields["length"]
    assert Plan.from_json(json.dumps(fields)) == PLAN
    with pytest.raises(UserError, match="length = 0 must be at least 1 token"):
        Plan.from_json(json.dumps(fields | {"length": 0}))


def test_where_lengths_are_known_the_planner_counts_tokens() -> None:
    sheet = datasheet_table(distilbert(), "v100", batch_sizes=(1, 8, 32))
    exits, by_tokens = ExitProfile((1.0, 0.9, 0.6, 0.5, 0.4, 0.3)), ExitProfile((1.0, 0.95, 0.7, 0.6, 0.5, 0.4))
    known = Profile("net", (sheet,), exits, lengths=Lengths((20, 40, 60)), token_exits=by_tokens)
    devices = fleet("v100=2")
    links, goal = links_between(devices), Objective(slo_s=0.1)
    plan = optimize(known, devices, links, goal)
    assert plan.length == 40
    facts = problem(known, devices, links, length=plan.length)
    assert (facts.length, facts.lengths, facts.survival) == (40, known.lengths, by_tokens.survival)
    assert problem(known, devices, links, length=60).lengths is None, "those of another mean are not known"
    assert evaluate(plan, facts, goal).goodput_per_s == plan.promise.goodput_per_s
    inputs = optimize(replace(known, lengths=None), devices, links, goal)
    assert inputs.length is None
    assert inputs == optimize(Profile("net", (sheet,), exits), devices, links, goal)
    route = route_of(plan, facts, [f"g{number}" for number, _ in enumerate(plan.all_placements)])
    stage = route.stages[0]
    assert (route.length, stage.room) == (40, 40 * stage.batch)
    assert stage.seconds(stage.room) == stage.launch_s[-1]
    assert 0 < stage.seconds(1) <= stage.launch_s[0]


def test_a_profile_is_not_taken_for_a_plan_nor_a_plan_for_a_profile(tmp_path: Path) -> None:
    profile, plan = DEMO / "profile.json", DEMO / "plan.json"
    with pytest.raises(UserError, match=r"profile\.json: this is not a plan: 'isobatch plan' writes one"):
        read_plan(profile)
    with pytest.raises(UserError, match=r"plan\.json is not a profile: 'isobatch profile' writes one"):
        load(plan)
