"""Every field has a default and a description; a wrong field is reported in one line, here or on a cluster."""

from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.deployments.cluster_checks import ClusterState, check_cluster
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.named import function_at
from isobatch.optimizer import Placement, Plan, Split
from isobatch.profiles.errors import UserError


def test_every_field_is_described_and_has_a_default() -> None:
    AppConfig()
    assert all(field.description and not field.is_required() for field in AppConfig.model_fields.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_bach": 8}, "no field 'max_bach'; there are: model, "),
        ({"max_batch": 0}, "max_batch = 0: .*greater than or equal to 1"),
        ({"slo_ms": True}, "args: slo_ms = true: this must be a number"),
        ({"devices": {"cpu": True}, "profile": "q.json"}, "args: devices.cpu = true: this must be a number"),
        ({"device": "gpu"}, "device = 'gpu': 'gpu' must be 'cpu' or 'cuda': Ray gives"),
        ({"dtype": "int4"}, "dtype = 'int4'.*'bfloat16'"),
        ({"backend": "virtual"}, "args: backend: virtual needs its profile too"),
        ({"plan": "p.json"}, "args: a plan needs its profile too"),
        ({"plan": "p.json", "profile": "q.json", "device": "cuda"}, "device cannot be set beside a plan"),
        ({"max_inside": 10**12}, "max_inside = 1000000000000: .*less than or equal to 1048576"),
        ({"max_waiting": True}, "max_waiting = True: .*valid integer"),
        ({"loader": "toy.load"}, "loader = 'toy.load'.*package.module:function"),
        ({"order": "dass"}, "order 'dass' is not known; known are: deadline, priority, das, slotted_das"),
        ({"devices": "auto"}, "a plan needs its profile too"),
        ({"devices": {"v100": 1}, "profile": "q.json", "device": "cpu"}, "device cannot be set beside a plan"),
        ({"devices": {"v100": 0}, "profile": "q.json"}, "counts of at least one"),
        ({"devices": {}, "profile": "q.json"}, "counts of at least one"),
        ({"rate_per_s": 5.0}, "rate_per_s needs devices"),
        ({"standby": {"cpu/2": 2}}, "standby.*'cpu/2' must be a kind of whole devices"),
        ({"links": {"v100": 0.08}}, "must name two kinds of whole devices: KIND>KIND"),
        ({"links": {"v100/2>oddity": 0.08}}, "must name two kinds of whole devices: KIND>KIND"),
        ({"links": {"v100>oddity": 0}}, "links"),
        ({"answers": "early", "exits": False}, "answers: early needs exits"),
        (
            {"answers": "early", "ramp_budget": 0.1},
            "ramp_budget is for answers: early with devices:, where the plan is",
        ),
        *(({"ports": wrong}, "must be FIRST-LAST") for wrong in ("24000", "24001-24000", "80-90", "24000-70000")),
        *(({"ports": wrong}, "must be FIRST-LAST") for wrong in ("a-b", "-1-5")),
        *(({"allowed_origins": [wrong]}, "must be as browsers send it") for wrong in ("*", "a.example")),
        *(({"allowed_origins": [f"https://a.example{end}"]}, "must be as browsers send it") for end in ("/", " b")),
        *(({"allowed_hosts": [wrong]}, "must be a name") for wrong in ("*", "https://a.example", "a.example:80", "")),
    ],
)
def test_a_wrong_field_is_named_with_its_value(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        checked(AppConfig, arguments)
    assert "\n" not in str(error.value)


def test_older_files_call_max_inside_max_waiting() -> None:
    assert checked(AppConfig, {"max_waiting": 9}) == checked(AppConfig, {"max_inside": 9}) != AppConfig()


def test_a_plan_brings_the_slo_that_it_was_made_for(tmp_path: Path) -> None:
    plan, file = Plan((Placement("v100", 1, (Split(0, 4, 8),)),), slo_s=0.25), tmp_path / "plan.json"
    arguments = {"plan": str(file), "profile": "q.json"}
    usual = AppConfig().slo_ms
    assert checked(AppConfig, arguments).slo_ms == usual, "what is wrong with the file is said where it is needed"
    file.write_text(plan.to_json())
    assert checked(AppConfig, arguments).slo_ms == 250
    assert checked(AppConfig, arguments | {"slo_ms": 100}).slo_ms == 100
    file.write_text(replace(plan, slo_s=None).to_json())
    assert checked(AppConfig, arguments).slo_ms == usual
    file.write_text(replace(plan, slo_s=0.0).to_json())
    with pytest.raises(UserError, match=r"args: slo_ms = 0\.0: Input should be greater than 0"):
        checked(AppConfig, arguments)


@pytest.mark.parametrize("path", ["nowhere:load", "math:cubic_root", "math:pi", "math"])
def test_an_import_path_that_names_no_function_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=path):
        function_at(path)


# On a cluster

ONE, TWO = ("10.0.0.1",), ("10.0.0.1", "10.0.0.2")
FINE = AppConfig(model="/models/it")
LOOPBACK = r"could not be reached \(10\.0\.0\.1, 10\.0\.0\.2\): write 0\.0\.0\.0"


@pytest.mark.parametrize("around", [ClusterState("127.0.0.1", False, ONE), ClusterState("0.0.0.0", False, TWO)])
def test_clusters_that_can_be_reached_are_accepted(around: ClusterState) -> None:
    check_cluster(FINE, around)
    check_cluster(AppConfig(model="s3://models/it"), around)


@pytest.mark.parametrize(
    ("around", "sentence"),
    [
        *((ClusterState(host, False, TWO), LOOPBACK) for host in ("127.0.0.1", "localhost", "::1")),
        (ClusterState("0.0.0.0", True, ONE), "put a load balancer with TLS before it"),
    ],
)
def test_clusters_that_cannot_be_reached_are_refused(around: ClusterState, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_cluster(FINE, around)


@pytest.mark.parametrize("name", ["model", "plan", "profile"])
def test_relative_paths_are_refused_since_each_node_has_its_own(name: str) -> None:
    config = checked(AppConfig, {"profile": "/p.json"} | {name: "here.json"})
    with pytest.raises(UserError, match=f"{name} = 'here.json' must be an absolute path"):
        check_cluster(config, ClusterState("0.0.0.0", False, ONE))
