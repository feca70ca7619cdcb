"""The plan that is made at the start, for configured devices or those of the cluster; impossible ones are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.input_planning import classifier_problem
from isobatch.deployments import ray_facts, resources
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.graph import read_graph
from isobatch.deployments.planning import DeviceCounts, first_plan, has_room_beside, summary
from isobatch.optimizer import Placement, Plan, Split
from isobatch.optimizer.plan import DecodingTerms, Promise, SimulatedTimes
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import MOST_BATCH, LatencyTable

BLOCKS = 4
CUT = (Placement("v100", 2, (Split(0, 1, 8, ramps=(0,)), Split(1, BLOCKS, 8))),)


def table(kind: str, block_s: float) -> LatencyTable:
    """A profile in which a launch takes as long for eight inputs as for one."""
    row, none, sizes = (block_s,) * BLOCKS, (0.0,) * BLOCKS, (100,) * BLOCKS
    return LatencyTable(kind, (1, 8), (row, row), (none, none), 0.001, sizes, sizes, "made up")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    tables = (table("v100", 0.001), table("oddity", 0.002), table("cpu", 0.1))
    save(Profile("toy", tables, ExitProfile((1.0, 0.5, 0.5, 0.25))), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def plan_for(profile: str, has: DeviceCounts | None = None, **told: object) -> dict[str, int]:
    config = checked(AppConfig, {"profile": profile} | told)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_facts, "nodes", list)
        patched.setattr(resources, "devices_on", lambda _: has)
        return first_plan(config, load(Path(profile))).devices()


def test_a_kind_that_is_in_no_catalogue_is_as_good_as_any(profile: str) -> None:
    config = AppConfig(profile=profile, devices={"oddity": 2}, backend="virtual")
    assert read_graph(config).plan.devices() == {"oddity": 2}


def test_the_devices_that_were_named_are_used_or_the_existing_ones_that_were_profiled(profile: str) -> None:
    assert plan_for(profile, devices={"v100": 3}) == {"v100": 3}
    assert plan_for(profile, {"v100": 2, "h100": 8, "cpu": 1}, devices="auto", slo_ms=100) == {"v100": 2}
    assert plan_for(profile, {"cpu": 5}, devices="auto", cpus_per_replica=2) == {"cpu": 2}, "one CPU is the front's"
    assert plan_for(profile, {"cpu": 5}, devices="auto", front_replicas=2) == {"cpu": 3}, "each front takes one"
    with pytest.raises(UserError, match=r"this Ray has 8 h100, .* has times of v100, oddity, cpu"):
        plan_for(profile, {"h100": 8, "cpu": 1}, devices="auto")


def test_a_new_front_has_room_beside_the_old_one_with_its_replicas(profile: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(Plan(CUT).to_json())
    front, nodes = {"CPU": 1.0}, [{"CPU": 4.0, "v100": 4.0}]
    config = AppConfig(plan=str(tmp_path / "plan.json"), profile=profile, backend="virtual", cpus_per_replica=0.5)

    def fits(cpus: float, gpus: float, config: AppConfig = config) -> bool:
        return has_room_beside(config, front, nodes, [{"CPU": cpus, "v100": gpus}])

    assert fits(2.0, 2.0)
    assert not fits(2.0, 1.0), "one of the two replicas has no device"
    assert not fits(1.5, 2.0), "nor one of them a processor"
    assert fits(1.0, 0.0, AppConfig()), "a front without a plan needs nothing else"
    assert not fits(9.0, 9.0, AppConfig(profile=profile, devices="auto")), "it may plan for all that there is"


def test_early_answers_neither_split_nor_shorten_the_network(profile: str, tmp_path: Path) -> None:
    fields = {"profile": profile, "devices": {"v100": 2}, "answers": "early"}
    early, generous = (read_graph(checked(AppConfig, fields | more)) for more in ({}, {"ramp_budget": 0.3}))
    assert [(split.start, split.stop, split.ramps) for split in early.plan.splits] == [(0, BLOCKS, ())]
    assert generous.plan.ramps == (0,), "a look takes a millisecond of five, and half of the inputs leave there"
    assert generous.facts.survival == (1.0,) * BLOCKS
    assert generous.route.stages[0].launch_s[0] == pytest.approx(0.006)
    cut = first_plan(checked(AppConfig, {"profile": profile, "devices": {"v100": 2}}), load(Path(profile)))
    (tmp_path / "cut.json").write_text(replace(cut, placements=CUT).to_json())
    with pytest.raises(UserError, match="needs a plan without cuts"):
        read_graph(checked(AppConfig, {"profile": profile, "plan": str(tmp_path / "cut.json"), "answers": "early"}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"thresholds": ((3, 0.5),)}, r"plan\.json has a ramp after block 3: the last one is after block 2"),
        ({"thresholds": ((-1, 0.5),)}, "has a ramp after block -1: the last one is after block 2"),
        ({"placements": (Placement("v100", 2, (Split(0, BLOCKS, 8, ramps=(3,)),)),)}, "has a ramp after block 3: the"),
        ({"backend": "abacus"}, "toy on v100 has no times of abacus, only of torch float32: measure some"),
    ],
)
def test_a_plan_that_does_not_fit_its_profile_is_refused(
    profile: str, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    known = load(Path(profile))
    tables = tuple(replace(each, backend="torch", dtype="float32") for each in known.tables)
    save(replace(known, tables=tables), Path(profile))
    fields = {"profile": profile, "plan": str(tmp_path / "plan.json")}
    plan = Plan(CUT, backend="torch", thresholds=((2, 0.5),))
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_graph(checked(AppConfig, fields)).plan == plan
    (tmp_path / "plan.json").write_text(replace(plan, **change).to_json())
    with pytest.raises(UserError, match=sentence):
        read_graph(checked(AppConfig, fields))


def test_the_largest_batch_is_kept(profile: str) -> None:
    config = checked(AppConfig, {"profile": profile, "devices": {"v100": 3}, "max_batch": 4})
    made = first_plan(config, load(Path(profile)))
    assert max(split.batch_size for split in made.splits) <= 4


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"devices": {"v100": 3}, "slo_ms": 1.0}, "ms"),
        (
            {"devices": {"k80": 3}},
            "no table for device kind 'k80' .*'isobatch profile ... --devices k80', or measure there",
        ),
        ({"devices": {"v100": "two"}}, r"^args: devices\.v100 = 'two': Input should be a valid integer"),
    ],
)
def test_impossible_plans_are_reported(profile: str, told: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        plan_for(profile, **told)
    assert "\n" not in str(error.value)


def test_plans_and_fronts_use_the_declared_speed_of_a_link(profile: str) -> None:
    fields = {"profile": profile, "devices": {"v100": 1, "oddity": 1}, "backend": "virtual", "slo_ms": 1000}
    config = checked(AppConfig, fields | {"links": {"v100>oddity": 0.08}})
    graph = read_graph(config)
    declared = {ends: link.bytes_per_s for ends, link in graph.facts.links.items()}
    assert declared["v100", "oddity"] == 1e7
    assert declared["oddity", "v100"] > 1e9
    assert classifier_problem(ControllerConfig(), config, load(Path(profile))).gbit_per_s == {"v100>oddity": 0.08}


def test_a_controller_keeps_to_the_largest_batch_of_its_application(profile: str) -> None:
    fields = {"profile": profile, "devices": {"v100": 1}}
    whole, limited = checked(AppConfig, fields), checked(AppConfig, fields | {"max_batch": 4})

    def largest(controller: ControllerConfig, config: AppConfig) -> int:
        return classifier_problem(controller, config, load(Path(profile))).objective.max_batch

    assert largest(ControllerConfig(), limited) == 4
    assert largest(ControllerConfig(max_batch=8), limited) == 8
    assert largest(ControllerConfig(), whole) == MOST_BATCH


def test_the_summary_of_a_plan_has_simulated_latencies_that_of_full_launches_and_of_first_tokens() -> None:
    promise = Promise(48.0, latency_s=0.9496, cost_per_hour=1.0, gap=0.0)
    plan = Plan(CUT, promise, origin="measured", backend="torch")
    blocks = "blocks 0 at 8, 1-3 at 8 on 2 v100; 48/s by measured times (torch)"
    assert summary(plan) == f"{blocks}; not simulated; full launches all the way: 950 ms"
    rare = replace(plan, promise=replace(promise, goodput_per_s=0.04))
    assert "; 0.04/s by" in summary(rare)
    played = replace(plan, promise=replace(promise, simulated=SimulatedTimes(0.12, 1.481, 0.99)))
    times = "as simulated: p50 120 ms, p99 1,481 ms, 99.0 % in time"
    assert summary(played) == f"{blocks}; {times}; full launches all the way: 950 ms"
    terms = DecodingTerms("off", prompt_rows=64, kv_megabytes=100, ttft_s=0.5, tpot_s=0.05)
    texts = Plan(CUT, Promise(3.0, latency_s=0.5, cost_per_hour=1.0, gap=0.0), decoding=terms)
    assert summary(texts).endswith("; 3/s, first tokens in 500 ms")
