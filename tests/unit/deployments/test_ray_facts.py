"""The Ray internals that ray_facts uses, checked in the installed Ray: each failure names the function to mend."""

import asyncio
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch import deployments
from isobatch.deployments import ray_facts
from isobatch.deployments.resources import by_label, gpu_options
from isobatch.profiles.devices import kind_of

RAY = Path(importlib.util.find_spec("ray").origin).parent  # type: ignore[union-attr, arg-type]  # imported in tests only
ROOT = Path(deployments.__file__).parents[1]


def has(module: str, path: str, *parameters: str, used_by: str) -> None:
    """Check that a name exists and has these parameters."""
    result = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(result, name), f"Ray has no {module}.{path} any more: mend {used_by}"
        result = getattr(result, name)
    takes = inspect.signature(result).parameters if parameters else ()
    missing = [name for name in parameters if name not in takes]
    assert not missing, f"{module}.{path} takes no {', '.join(missing)} any more: mend {used_by}"


INTERNALS: list[tuple[str, str, tuple[str, ...], str]] = [
    ("ray._private.state", "available_resources_per_node", (), "ray_facts.free_resources"),
    ("ray._private.services", "get_node", ("gcs_address", "node_id"), "ray_facts.start_timeout"),
    ("ray._private.services", "ConsolePopen", (), "ray_facts.minimal_processes"),
    ("ray._private.node", "Node.start_monitor", (), "ray_facts.minimal_processes"),
    ("ray._private.node", "Node.start_log_monitor", (), "ray_facts.minimal_processes"),
    ("ray._raylet", "CoreWorker", (), "ray_facts.own_sigterm_handler"),
    ("ray._private.utils", "set_sigterm_handler", (), "ray_facts.own_sigterm_handler"),
    ("ray.util", "get_node_ip_address", (), "ray_facts.node_address"),
    ("ray.serve.context", "_get_global_client", ("raise_if_no_controller_running",), "ray_facts.serve_client"),
    ("ray.serve._private.client", "ServeControllerClient.deploy_apps", (), "isobatch.cluster.serving.applications"),
    (
        "ray.serve._private.client",
        "ServeControllerClient.wait_for_proxies_serving",
        ("wait_for_applications_running",),
        "isobatch.cluster.serving.applications",
    ),
    ("ray.serve._private.client", "ServeControllerClient.get_serve_details", (), "ray_facts.nodes_beside_others"),
    ("ray.serve._private.common", "DeploymentID", ("name", "app_name"), "ray_facts.scale"),
    (
        "ray.serve._private.controller",
        "ServeController.update_deployment_replicas",
        ("deployment_id", "target_num_replicas"),
        "ray_facts.scale",
    ),
    (
        "ray.serve._private.constants",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
        (),
        "ray_facts.drained_s",
    ),
    ("ray.serve._private.constants", "RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S", (), "ray_facts.drained_s"),
    ("ray.serve.handle", "DeploymentHandle.broadcast", ("method_name",), "ray_facts.ask_all"),
    (
        "ray.serve.handle",
        "DeploymentBroadcastResponse._fetch_replica_results_async",
        (),
        "ray_facts.ask_all",
    ),
    ("ray.serve._private.replica_result", "ReplicaResult.get_async", (), "ray_facts.ask_all"),
    ("ray.serve.exceptions", "DeploymentUnavailableError", (), "ray_facts.ask_all"),
    ("ray.serve", "delete", ("name", "_blocking"), "ray_facts.delete_soon"),
    ("ray.serve", "RunTarget", ("route_prefix", "external_scaler_enabled"), "deployer.fleet.ServeFleet.want"),
    ("ray.serve", "run_many", ("wait_for_applications_running",), "deployer.fleet.ServeFleet.want"),
    (
        "ray.experimental.internal_kv",
        "_internal_kv_put",
        ("key", "value", "overwrite", "namespace"),
        "ray_facts.remember",
    ),
    ("ray.experimental.internal_kv", "_internal_kv_get", ("key", "namespace"), "ray_facts.recall"),
    ("ray.experimental.internal_kv", "_internal_kv_del", ("key", "namespace"), "ray_facts.forget"),
    ("ray.experimental.internal_kv", "_internal_kv_list", ("prefix", "namespace"), "ray_facts.ask_autoscaler"),
    ("ray._private.state", "GlobalState.get_draining_nodes", (), "ray_facts.nodes"),
    ("ray.autoscaler.sdk", "request_resources", ("bundles", "bundle_label_selectors"), "ray_facts.ask_autoscaler"),
    ("ray.autoscaler.v2.utils", "is_autoscaler_v2", (), "ray_facts.ask_autoscaler"),
    ("ray.serve.request_router", "RequestRouter.choose_replicas", (), "front.router"),
    ("ray.serve.request_router", "RequestRouter.update_replicas", (), "front.router"),
    ("ray.serve.request_router", "RequestRouter.on_replica_actor_died", (), "front.router"),
    ("ray.serve.request_router", "RequestRouter.curr_replicas", (), "front.router"),
]


@pytest.mark.parametrize(("module", "path", "parameters", "used_by"), INTERNALS)
def test_rays_internals_still_exist(module: str, path: str, parameters: Sequence[str], used_by: str) -> None:
    has(module, path, *parameters, used_by=used_by)


@pytest.mark.parametrize(
    ("file", "text", "used_by"),
    [
        ("serve/_private/replica.py", '"__serve_build_asgi_app__"', "the method of that name of app.Front"),
        ("serve/_private/replica.py", "self._callable.__del__", "ServeReplica, which Serve is to await before its end"),
        ("serve/_private/config.py", 'self.ray_actor_options["num_cpus"] = 1', "resources.DEFAULT_CPUS"),
        ("_private/node.py", "ray._private.services.get_node(", "ray_facts.start_timeout"),
        ("_private/node.py", "self.start_monitor()", "ray_facts.minimal_processes"),
        ("_private/node.py", "self.start_log_monitor()", "ray_facts.minimal_processes"),
        ("_private/services.py", "process = ConsolePopen(", "ray_facts.minimal_processes"),
        ("_private/worker.py", "if not _worker_logs_enabled:", "ray_facts.hide_worker_errors"),
        ("_private/serialization.py", "serialization_addons.apply(self)", "ray_settings.import_serve"),
        ("_common/utils.py", '"ray_current_cluster"', "ray_facts.address_file"),
    ],
)
def test_rays_internals_are_still_used_in_the_same_way(file: str, text: str, used_by: str) -> None:
    assert text in (RAY / file).read_text(), f"Ray's {file} does not say {text} any more: look at {used_by}"


def test_the_page_on_rays_internals_names_each() -> None:
    """By itself, or its class or module."""
    page = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text()
    for module, path, _, _ in INTERNALS:
        assert any(re.search(rf"\b{name}\b", page) for name in (module.removeprefix("ray."), *path.split("."))), path


@pytest.mark.parametrize("dashboard", [False, True])
def test_the_autoscaler_starts_only_with_a_dashboard_and_processes_get_no_signals(dashboard: bool) -> None:
    from ray._private import node, services

    usual = node.Node.start_monitor, node.Node.start_log_monitor, services.ConsolePopen
    with ray_facts.minimal_processes(dashboard):
        assert (node.Node.start_monitor is usual[0]) == dashboard
        assert node.Node.start_log_monitor is not usual[1]
        with services.ConsolePopen(["sleep", "60"]) as process:
            assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
            process.kill()
    assert (node.Node.start_monitor, node.Node.start_log_monitor, services.ConsolePopen) == usual


def test_the_raylet_has_its_name() -> None:
    assert [*(RAY / "core").rglob(ray_facts.RAYLET)], "mend ray_facts.start_timeout"


def test_states_of_replicas_still_have_their_names() -> None:
    from ray.serve._private.common import ReplicaState
    from ray.serve.schema import ApplicationStatus

    from isobatch.deployments.deployer.fleet import NONE_STARTED

    for name in ("RUNNING", "STOPPING"):
        assert ReplicaState[name].value == name, "mend deployer.fleet"
    for name in ("DEPLOY_FAILED", "UNHEALTHY", "NOT_STARTED", "DELETING", "RUNNING"):
        assert ApplicationStatus[name].value == name, "mend deployer.fleet and isobatch.cluster.serving.applications"
    source = (RAY / "serve" / "_private" / "deployment_state.py").read_text()
    assert NONE_STARTED in source, "mend deployer.fleet"


PRIVATE = re.compile(r"\bray\._|serve\._private|serve\.context|_internal_kv|_get_global_client|\b_blocking")


def test_no_other_module_uses_rays_internals() -> None:
    files = [path for folder in ("deployments", "cluster") for path in (ROOT / folder).rglob("*.py")]
    result = [path.name for path in files if PRIVATE.search(path.read_text()) and path.name != "ray_facts.py"]
    assert not result, "such a call belongs into deployments/ray_facts.py, with a test of its own here"


async def test_a_replica_that_hangs_or_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_facts, "_REPLICA_ANSWERS_WITHIN_S", 0.1)

    async def fail() -> None:
        raise ConnectionError

    async def results() -> list[Any]:
        calls = partial(asyncio.sleep, 0, 7), asyncio.Event().wait, fail, partial(asyncio.sleep, 0, 8)
        return [SimpleNamespace(get_async=each) for each in calls]

    async def hang() -> list[Any]:
        return [await asyncio.Event().wait()]

    result = [
        await ray_facts.ask_all(
            SimpleNamespace(broadcast=lambda _, each=each: SimpleNamespace(_fetch_replica_results_async=each)), "state"
        )
        for each in (results, hang)
    ]
    assert result == [[7, 8], []]


@pytest.mark.parametrize(
    ("state", "deployments", "gone"),
    [
        ("RUNNING", ["front", "deployer"], False),
        ("RUNNING", ["front"], True),
        ("DEPLOYING", [], False),  # a changed application is being built, while the one before it runs
        ("DEPLOY_FAILED", [], False),
        ("DELETING", ["front", "deployer"], True),
        (None, [], True),
    ],
)
def test_a_deployment_is_gone_only_once_serve_has_built_an_application_without_it(
    monkeypatch: pytest.MonkeyPatch, state: str | None, deployments: list[str], gone: bool
) -> None:
    status = SimpleNamespace(status=SimpleNamespace(value=state), deployments=dict.fromkeys(deployments))
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"shop": status} if state else {}))
    assert ray_facts.is_gone("shop", "deployer") is gone


def test_an_application_of_a_serve_file_is_no_fleet_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.deployments.deployer.fleet import fleets_of  # imports Ray

    fleet = "shop.3f9a01.v100"
    details = {name: {"deployed_app_config": {"name": name}} for name in ("shop", "shop.240601.canary")}
    client = SimpleNamespace(get_serve_details=lambda: {"applications": details | {fleet: {}}})
    monkeypatch.setattr(ray_facts, "serve_client", lambda: client)
    assert fleets_of("shop") == [fleet]


def test_devices_of_other_applications_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def application(options: dict[str, object] | None, *nodes: str | None) -> dict[str, object]:
        fields = {"ray_actor_options": options} if options else {}
        replicas = [{"node_id": node} if node else {} for node in nodes]  # none: it waits for room
        return {"deployments": {"split": {"deployment_config": fields, "replicas": replicas}}}

    def node(name: str, **has: float) -> dict[str, object]:
        return {"NodeID": name, "Alive": True, "Labels": {}, "Resources": has}

    gpu = {"num_cpus": 0.5, "num_gpus": 1, "resources": {"k80": 1.0}}
    running = {"a.0123ab.k80": application(gpu, "x"), "a.b.0123ab.k80": application(gpu, "x", "y", "gone", None)}
    running |= {"a.b": application(None, "y"), "a": application(None, "x")}
    monkeypatch.setattr(
        ray_facts, "_alive", lambda: [node("x", CPU=4.0, GPU=2.0, k80=4.0), node("y", CPU=4.0, GPU=2.0)]
    )
    monkeypatch.setattr(ray_facts, "_applications", lambda: running)
    of_others = [{"CPU": 3.5, "GPU": 1.0, "k80": 3.0}, {"CPU": 2.5, "GPU": 1.0}]
    assert ray_facts.nodes_beside_others("a") == of_others
    assert ray_facts.nodes_beside_others("a", "c") == of_others
    assert ray_facts.nodes_beside_others("a", "a.b") == [{"CPU": 4.0, "GPU": 2.0, "k80": 4.0}, {"CPU": 4.0, "GPU": 2.0}]
    assert ray_facts.nodes_beside_others("a.b") == [{"CPU": 2.5, "GPU": 1.0, "k80": 3.0}, {"CPU": 4.0, "GPU": 2.0}]


@pytest.mark.parametrize(
    ("driver", "kind"),
    [
        ("Tesla K80", "k80"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_replicas_request_gpus_by_the_names_that_ray_gives_them(driver: str, kind: str) -> None:
    """All kinds of the catalogue but the small A100, which Ray calls as it calls the large one: it needs a label."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    by_ray = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(driver)
    assert gpu_options(kind, labelled=False)["accelerator_type"] == by_ray
    assert by_label({"GPU": 1.0, f"accelerator_type:{by_ray}": 1.0}, {}).keys() == {
        "GPU",
        f"accelerator_type:{kind.upper()}",
    }
    assert kind_of(driver) == kind


def test_what_an_application_requested_of_the_autoscaler_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its controller was killed: its nodes would be rented for ever."""
    store, requests, running = dict[str, bytes](), list[object](), {"shop": {}, "news": {}}
    fakes = {
        "_internal_kv_put": lambda key, value, **_: store.update({key: value.encode()}),
        "_internal_kv_get": lambda key, **_: store.get(key),
        "_internal_kv_del": lambda key, **_: store.pop(key, None),
        "_internal_kv_list": lambda prefix, **_: [key.encode() for key in store if key.startswith(prefix)],
    }
    for name, function in fakes.items():
        monkeypatch.setattr(f"ray.experimental.internal_kv.{name}", function)
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda bundles, **_: requests.append(bundles))
    client = SimpleNamespace(get_serve_details=lambda: {"applications": running})
    monkeypatch.setattr(ray_facts, "serve_client", lambda: client)
    shop, news = {"v100": 1.0}, {"k80": 1.0}
    ray_facts.ask_autoscaler("shop", [(shop, {})])
    ray_facts.ask_autoscaler("news", [(news, {})])
    assert requests[-1] == [shop, news]
    running.clear()
    ray_facts.ask_autoscaler("news", [(news, {})])
    assert requests[-1] == [shop, news], "Serve is starting again"
    running["news"] = {}
    ray_facts.ask_autoscaler("news", [(news, {})])
    assert requests[-1] == [news]
