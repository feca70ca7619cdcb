"""The files in cluster/ that say where isobatch runs: Ray, KubeRay, Kubernetes and Compose would take them so."""

import os
import re
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from experiments.planner import networks as shapes
from experiments.planner.settings import BERT_BASE
from isobatch.cluster.cli import app
from isobatch.cluster.commands.deploy import DASHBOARDS, environment
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.serving.capacity import check_capacity
from isobatch.cluster.serving.haproxy import MAX_CONNECTIONS
from isobatch.cluster.serving.kubernetes import FORGETS_S
from isobatch.cluster.serving.local import local_nodes
from isobatch.cluster.serving.serve_file import (
    APPLICATION,
    CONTROLLER,
    NODES,
    OF_APPLICATIONS,
    OF_FILES,
    OF_HTTP,
    controllers,
    serve_file,
)
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.front.proxy import allowed_connections
from isobatch.deployments.ray_facts import drained_s
from isobatch.deployments.ray_settings import MOST_FILES, PROXY_PROGRAM, files_of_a_node, node_settings
from isobatch.deployments.resources import KIND, Resources
from isobatch.profiles.devices import CATALOGUE
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import load
from tests.helpers.ray_service import RayService, check_pod

CLUSTER = Path(__file__).parents[3] / "cluster"
SERVE = ["serve.yaml", "demo.yaml", "local.yaml", "two-apps.yaml"]
UP = ["aws.yaml", "gcp.yaml"]
RAY = "2.60.0"
COMMAND = typer.main.get_command(app)


def content(name: str) -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load((CLUSTER / name).read_text())
    return result


def kuberay() -> RayService:
    return RayService.model_validate(content("kuberay.yaml"))


# Files of Serve


def serve_contents() -> list[Any]:
    inside = yaml.safe_load(kuberay().spec.serveConfigV2)
    return [*(pytest.param(content(name), id=name) for name in SERVE), pytest.param(inside, id="kuberay.yaml")]


@pytest.mark.parametrize("told", serve_contents())
def test_serve_takes_them_and_knows_every_field(told: dict[str, Any]) -> None:
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    ServeDeploySchema.model_validate(told)
    assert set(told) - {NODES} <= known(ServeDeploySchema)
    assert set(told["http_options"]) <= known(HTTPOptionsSchema)
    for application in told["applications"]:
        assert set(application) <= known(ServeApplicationSchema)
        if application["import_path"] == APPLICATION:
            checked(AppConfig, application.get("args") or {})
        else:
            assert application["import_path"] == CONTROLLER
            ControllerConfig.model_validate(application["args"])


def known(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def test_the_fields_that_are_let_pass_are_those_that_serve_reads() -> None:
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    assert (known(ServeDeploySchema), known(ServeApplicationSchema)) == (OF_FILES, OF_APPLICATIONS)
    assert known(HTTPOptions) == OF_HTTP


@cache
def taken(name: str) -> dict[str, Any]:
    """As `isobatch serve` takes it, which plans for its devices."""
    return serve_file(CLUSTER / name, {})


@pytest.mark.parametrize("name", SERVE)
def test_isobatch_serve_takes_them(name: str) -> None:
    assert taken(name)["applications"]


def test_the_local_fleet_has_a_node_for_each_kind_and_a_plan_for_at_least_three() -> None:
    settings = taken("local.yaml")
    config = checked(AppConfig, settings["applications"][0]["args"])
    from isobatch.deployments.graph import read_graph

    there: dict[str, int] = {}
    for node in local_nodes(settings):
        there |= node.devices
    assert there == config.devices
    assert len(read_graph(config).plan.devices()) >= 3


def test_two_applications_share_all_devices_of_their_file_and_name_no_more() -> None:
    config = taken("two-apps.yaml")
    nodes: list[Resources] = [{"CPU": 2.0}, *(node.devices for node in local_nodes(config))]
    check_capacity(config, nodes)
    for kind, node in (("v100", 1), ("k80", 2)):
        fewer = {**nodes[node], kind: nodes[node][kind] - 1}
        with pytest.raises(UserError, match=f"{kind}: this Ray has .* reviews may use .* queries may use"):
            check_capacity(config, [*nodes[:node], fewer, *nodes[node + 1 :]])
    for controller in controllers(config):
        assert controller["route_prefix"] == f"/{controller['args']['application']}/controller"


def test_the_local_profile_is_what_datasheets_say() -> None:
    profile = load(CLUSTER / "local" / "profile.json")
    long_texts = replace(BERT_BASE, shape=shapes.bert_base(512))
    made = long_texts.profile("v100=1,p100=1,k80=1,t4=1", "float32")
    assert (profile.model, profile.exits) == (made.model, made.exits)
    for kind in made.kinds:
        assert np.allclose(profile.table(kind).block_s, made.table(kind).block_s, rtol=1e-3)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([{"devices": {}}], "devices"),
        ([{"devices": {"t4": 1}, "gpus": 1}], "^nodes.0: there is no field 'gpus'; there are: devices, cpus"),
        ([{"devices": {"t4": 1}}, {"devices": {"GPU": 1}}], "^nodes.1: devices.GPU.*'GPU' must be a kind of whole dev"),
        ([{"devices": {"t4/2": 1}}], "'t4/2' must be a kind of whole devices, as in t4"),
        (["t4"], "^nodes.0: "),
        ([{"cpus": 1}], "devices"),
        ([{"devices": {"t4": 0}}], "^nodes.0: devices.t4 = 0: Input should be greater than 0"),
        ("four", "^nodes = 'four': this must be a list"),
    ],
)
def test_wrong_nodes_are_one_sentence(nodes: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        local_nodes({"nodes": nodes})


# Files of `ray up`


@pytest.mark.parametrize("name", UP)
def test_ray_up_takes_them(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(content(name)))


@pytest.mark.parametrize("name", UP)
def test_nodes_say_their_kind_and_ray_has_our_settings_and_shows_its_dashboard_to_nobody(name: str) -> None:
    config = content(name)
    for kind, node in config["available_node_types"].items():
        if "GPU" in node["resources"]:
            assert node["labels"] == {KIND: kind}
            assert kind in CATALOGUE
    assert RAY in config["docker"]["image"]
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert commands[0] == "ray stop"
        heeds_labels = "RAY_enable_autoscaler_v2=1 "  # Ray's other autoscaler does not
        assert commands[1].startswith(f'eval "$(isobatch environment)"; {heeds_labels}ray start')
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]
    assert "/home/ray/.ray/auth_token" in config["file_mounts"]


@pytest.mark.parametrize("name", UP)
def test_nodes_that_start_later_have_the_models_too(name: str) -> None:
    config = content(name)
    assert config["file_mounts"]["/home/ray/my-models"] == "my-models"
    assert "/my-models" in config["rsync_exclude"], "the checkout, which has them, would bring them again"


def test_no_gpu_on_aws_gets_rays_default_image_whose_driver_is_too_old() -> None:
    nodes = [node for node in content("aws.yaml")["available_node_types"].values() if "GPU" in node["resources"]]
    assert len(nodes) == 4
    for node in nodes:
        assert node["node_config"]["ImageId"].startswith("ami-")


def test_the_head_on_google_has_docker_as_its_workers_have() -> None:
    nodes = content("gcp.yaml")["available_node_types"].values()
    images = {disk["initializeParams"]["sourceImage"] for node in nodes for disk in node["node_config"]["disks"]}
    assert len(images) == 1


# KubeRay


def templates() -> list[dict[str, Any]]:
    cluster = kuberay().spec.rayClusterConfig
    return [group.template for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs)]


def test_kubernetes_takes_its_pods() -> None:
    from kubernetes_validate import ValidationError

    for template in templates():
        check_pod(template)
    with pytest.raises(ValidationError, match="restartPolcy"):
        check_pod({"spec": template["spec"] | {"restartPolcy": "Always"}})


def test_pods_outlive_their_drain_and_the_head_runs_nothing() -> None:
    spec = kuberay().spec
    config = checked(AppConfig, yaml.safe_load(spec.serveConfigV2)["applications"][0]["args"])
    ends_s = drained_s(config.drain_s) + FORGETS_S
    for template in templates():
        assert template["spec"]["terminationGracePeriodSeconds"] >= ends_s
    assert (spec.rayClusterDeletionDelaySeconds or 0) >= ends_s
    assert spec.rayClusterConfig.headGroupSpec.rayStartParams["num-cpus"] == "0"
    assert spec.rayClusterConfig.rayVersion == RAY
    for group in spec.rayClusterConfig.workerGroupSpecs:
        assert group.labels == {KIND: group.groupName}


def test_every_pod_has_the_key_that_the_applications_ask_for() -> None:
    variables = {
        each["args"]["api_key_variable"] for each in yaml.safe_load(kuberay().spec.serveConfigV2)["applications"]
    }
    for template in templates():
        assert variables <= {each["name"] for each in template["spec"]["containers"][0]["env"]}


# The image


def test_the_image_has_the_settings_of_a_node() -> None:
    folder = "/home/ray/.isobatch"
    lines = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    (setting,) = [line.removeprefix("ENV ") for line in lines if line.startswith("ENV ")]
    settings = dict(word.split("=", 1) for word in shlex.split(setting))
    wanted = node_settings(folder, f"{folder}/haproxy", MAX_CONNECTIONS) | {"RAY_SERVE_HAPROXY_NBTHREAD": "4"}
    assert settings == wanted
    assert any(re.fullmatch(rf"FROM rayproject/ray:{RAY}-\S+", line) for line in lines)


# What `isobatch environment` writes


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="ib", dir="/tmp") as folder:  # as the paths of sockets must be
        yield Path(folder)


def test_a_node_gets_settings_a_shell_can_read_and_the_files_that_they_name(short: Path) -> None:
    for _ in range(2):  # a machine is set up again
        printed = CliRunner().invoke(app, ["environment", "--folder", str(short)])
        assert printed.exit_code == 0, printed.output
    *exports, limit = printed.output.splitlines()
    settings = dict(shlex.split(line)[1].split("=", 1) for line in exports)
    assert limit == f"ulimit -Sn {files_of_a_node()}"
    subprocess.run(["sh", "-c", limit], check=True)
    connections = allowed_connections(MAX_CONNECTIONS)  # as many as the open files of this machine allow
    assert settings == node_settings(str(short), f"{short}/haproxy", connections)
    assert os.access(settings[PROXY_PROGRAM], os.X_OK)
    assert not (short / "starting").exists(), "HAProxy would never ask Serve's own proxy"
    assert (Path.home() / ".ray").stat().st_mode & 0o777 == 0o700, "others could read the token, which runs code"


@pytest.mark.parametrize(
    ("limits", "files"),
    [
        ((1024, 1_048_576), MOST_FILES),
        ((1024, 4096), 4096),
        ((1024, resource.RLIM_INFINITY), MOST_FILES),
        ((200_000, 1_048_576), 200_000),
    ],
)
def test_a_node_may_have_as_many_open_files_as_a_server_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], files: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert files_of_a_node() == files


def test_a_folder_that_is_too_long_for_sockets_is_one_sentence(short: Path) -> None:
    for long in ("a-name-that-is-too-long", "\u30c6" * 6):  # of 18 bytes
        with pytest.raises(UserError, match="at most 29 bytes"):
            environment(short / long)


def test_a_folder_that_haproxy_cannot_read_or_that_others_can_is_one_sentence(short: Path) -> None:
    with pytest.raises(UserError, match="HAProxy reads no blanks"):
        environment(short / "a b")
    short.chmod(0o755)
    with pytest.raises(UserError, match=f"open to others, who could give HAProxy commands: chmod 700 {short}"):
        environment(short)


def test_a_folder_of_another_user_is_one_sentence(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: short.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to another user, who could give HAProxy commands: name your own"):
        environment(short)


# Files for one machine: the Makefile, an image, Compose and systemd

VENV_THAT_FAILS_ONCE = """#!/bin/sh
test "$2" = venv || exit 0
mkdir -p .venv/bin && ln -sf /bin/true .venv/bin/python
test -e failed && ln -sf /bin/true .venv/bin/pip && exit
touch failed && exit 1
"""


def test_make_setup_goes_on_once_debian_has_its_package_for_environments(tmp_path: Path) -> None:
    """Without it Python makes an environment that has no pip."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(CLUSTER.parent / name, tmp_path)
    (tmp_path / "python").write_text(VENV_THAT_FAILS_ONCE)
    (tmp_path / "python").chmod(0o700)
    ends = [subprocess.run(["make", "setup", "PYTHON=./python"], cwd=tmp_path, capture_output=True) for _ in range(2)]
    assert [bool(end.returncode) for end in ends] == [True, False], ends[-1].stderr


def understood(words: list[str]) -> None:
    name, *arguments = words
    COMMAND.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def instructions() -> dict[str, list[str]]:
    """Of the image for one machine, by their names."""
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile.serve").read_text().replace("\\\n", " "), flags=re.M)
    result: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, _, value = line.partition(" ")
        result.setdefault(name, []).append(value)
    return result


def test_the_image_runs_any_command_without_rights_and_can_be_reached() -> None:
    given = instructions()
    assert given["ENTRYPOINT"] == ['["isobatch"]']
    understood(yaml.safe_load(given["CMD"][0]))
    assert given["USER"] == ["1000"]
    (name, value) = given["ENV"][0].split("=")
    host = next(each for each in COMMAND.commands["serve"].params if each.name == "host")  # type: ignore[attr-defined]
    assert (host.envvar, value) == (name, '"0.0.0.0"')


def test_compose_names_what_it_has_and_watches_what_it_serves() -> None:
    compose: dict[str, Any] = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
    services = compose["services"]
    places = {each.split(":")[1] for each in services["isobatch"]["volumes"]}
    assert places <= set(instructions()["RUN"][0].split()), "Docker would give them to root"
    understood(services["isobatch"]["command"])
    assert (CLUSTER.parent / services["isobatch"]["build"]["dockerfile"]).is_file()
    for service in services.values():
        assert {each["source"] for each in service.get("configs", ())} <= set(compose["configs"])
        named = {each.partition(":")[0] for each in service.get("volumes", ())}
        assert {name for name in named if "/" not in name} <= set(compose["volumes"])
        ignored = (CLUSTER.parent / ".dockerignore").read_text().splitlines()
        assert {name.removeprefix("../") for name in named if "/" in name} <= set(ignored), "the image would copy them"
    prometheus = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"isobatch:{services['isobatch']['command'][-1]}"
    assert {Path(path).name for path in prometheus["rule_files"]} <= {file.name for file in DASHBOARDS.iterdir()}


def test_the_unit_runs_a_command_that_there_is(tmp_path: Path) -> None:
    unit = CLUSTER / "isobatch.service"
    parser = ConfigParser(strict=False, interpolation=None)
    parser.read(unit)
    program, *words = parser["Service"]["ExecStart"].split()
    assert Path(program).name == "isobatch"
    understood(words)
    assert parser["Service"]["StateDirectoryMode"] == "0700", "its home, where the token that runs code lies"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd")
    there = unit.read_text().replace(program, shutil.which("true") or program).replace("User=isobatch", "User=root")
    (tmp_path / unit.name).write_text(there)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / unit.name], capture_output=True, text=True)
    assert "isobatch.service" not in done.stderr, done.stderr
