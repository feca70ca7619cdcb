"""What ray_facts takes for granted, checked against the Ray that is installed: each failure names what to mend.

The second half is about what fits where, which needs no Ray.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import deployments
from deployments import ray_facts
from deployments.config import AppConfig
from deployments.ray_facts import Resources, first_fit

RAY = Path(importlib.util.find_spec("ray").origin).parent  # type: ignore[union-attr, arg-type]  # imported in tests only
ROOT = Path(deployments.__file__).parents[1]


def has(module: str, path: str, *parameters: str, used_by: str) -> None:
    """A name that is there, and takes these parameters."""
    found = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"Ray has no {module}.{path} any more: mend {used_by}"
        found = getattr(found, name)
    takes = inspect.signature(found).parameters if parameters else ()
    missing = [name for name in parameters if name not in takes]
    assert not missing, f"{module}.{path} takes no {', '.join(missing)} any more: mend {used_by}"


@pytest.mark.parametrize(
    ("module", "path", "parameters", "used_by"),
    [
        ("ray._private.state", "available_resources_per_node", (), "ray_facts.free_resources"),
        ("ray._private.services", "get_node", ("gcs_address", "node_id"), "ray_facts.patient_start"),
        ("ray.util", "get_node_ip_address", (), "ray_facts.node_address"),
        ("ray.serve.context", "_get_global_client", ("raise_if_no_controller_running",), "ray_facts.serve_client"),
        ("ray.serve._private.client", "ServeControllerClient.deploy_apps", (), "cluster.serving.deploy"),
        (
            "ray.serve._private.client",
            "ServeControllerClient.wait_for_proxies_serving",
            ("wait_for_applications_running",),
            "cluster.serving.deploy",
        ),
        ("ray.serve._private.common", "DeploymentID", ("name", "app_name"), "ray_facts.scale"),
        (
            "ray.serve._private.controller",
            "ServeController.update_deployment_replicas",
            ("deployment_id", "target_num_replicas"),
            "ray_facts.scale",
        ),
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
        ("ray.serve.request_router", "RequestRouter.choose_replicas", (), "front.router"),
        ("ray.serve.request_router", "RequestRouter.update_replicas", (), "front.router"),
        ("ray.serve.request_router", "RequestRouter.on_replica_actor_died", (), "front.router"),
        ("ray.serve.request_router", "RequestRouter.curr_replicas", (), "front.router"),
    ],
)
def test_what_is_called_is_still_there(module: str, path: str, parameters: Sequence[str], used_by: str) -> None:
    has(module, path, *parameters, used_by=used_by)


@pytest.mark.parametrize(
    ("file", "text", "used_by"),
    [
        ("serve/_private/replica.py", '"__serve_build_asgi_app__"', "the method of that name of app.Front"),
        ("serve/_private/replica.py", "self._callable.__del__", "ServeReplica, which Serve is to await before its end"),
        ("serve/_private/config.py", 'self.ray_actor_options["num_cpus"] = 1', "ray_facts.DEFAULT_CPUS"),
        ("_private/node.py", "ray._private.services.get_node(", "ray_facts.patient_start"),
        ("_common/utils.py", '"ray_current_cluster"', "ray_facts.address_file"),
    ],
)
def test_what_is_relied_on_is_still_done(file: str, text: str, used_by: str) -> None:
    assert text in (RAY / file).read_text(), f"Ray's {file} does not say {text} any more: look at {used_by}"


def test_the_raylet_has_the_name_that_is_looked_for() -> None:
    assert [*(RAY / "core").rglob(ray_facts.RAYLET)], "mend ray_facts.patient_start"


def test_every_setting_is_still_read() -> None:
    names = {*ray_facts.SETTINGS, *ray_facts.WITHOUT_PROXY["env_vars"]}
    names |= set(ray_facts.haproxy_settings("folder", "program", 1, "1", "2", "3"))
    words = {word for path in RAY.rglob("*.py") for word in re.findall(r"\bRAY_\w+", path.read_text())}
    unread = {name for name in names - words if not _is_in_the_core(name)}
    assert not unread, f"Ray reads no {', '.join(sorted(unread))} any more: mend ray_facts.SETTINGS"


def _is_in_the_core(name: str) -> bool:
    """Settings of Ray's core are read as RAY_ and the name that they have there."""
    return name.removeprefix("RAY_").encode() in (RAY / "_raylet.so").read_bytes()


def test_states_of_replicas_have_the_names_that_are_counted() -> None:
    from ray.serve._private.common import ReplicaState
    from ray.serve.schema import ApplicationStatus

    for name in ("RUNNING", "STOPPING"):
        assert ReplicaState[name].value == name, "mend deployer.fleet"
    for name in ("DEPLOY_FAILED", "UNHEALTHY", "NOT_STARTED", "DELETING", "RUNNING"):
        assert ApplicationStatus[name].value == name, "mend deployer.fleet and cluster.serving.deploy"


PRIVATE = re.compile(r"\bray\._|serve\._private|serve\.context|_internal_kv|_get_global_client|\b_blocking")


def test_no_other_module_calls_what_ray_does_not_promise() -> None:
    files = [path for folder in ("deployments", "cluster") for path in (ROOT / folder).rglob("*.py")]
    found = [path.name for path in files if PRIVATE.search(path.read_text()) and path.name != "ray_facts.py"]
    assert not found, "such a call belongs into deployments/ray_facts.py, with a test of its own here"


# What fits where


amounts = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
some_resources = st.dictionaries(st.sampled_from(["CPU", "GPU"]), amounts, max_size=2)
some_nodes = st.lists(some_resources, max_size=3)


def places(needs: Sequence[Resources], nodes: Sequence[Resources]) -> Iterator[Sequence[int | None]]:
    """By brute force: every way to give each need a node, or none (None), that takes nothing that is not there."""
    for chosen in product([None, *range(len(nodes))], repeat=len(needs)):
        taken = [
            {
                name: sum(need.get(name, 0.0) for need, at in zip(needs, chosen, strict=True) if at == n)
                for name in names
            }
            for n, names in enumerate([{"CPU", "GPU"}] * len(nodes))
        ]
        if all(taken[n][name] <= node.get(name, 0.0) for n, node in enumerate(nodes) for name in taken[n]):
            yield chosen


@given(st.lists(some_resources, max_size=4), some_nodes)
@example([{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 2.0}, {"CPU": 1.0}])
def test_nobody_gets_room_that_is_not_there(needs: list[Resources], nodes: list[Resources]) -> None:
    found = first_fit(needs, nodes)
    assert any([at is not None for at in chosen] == found for chosen in places(needs, nodes))


@given(some_resources, st.integers(0, 4), some_nodes)
def test_of_one_kind_as_many_fit_as_can(need: Resources, count: int, nodes: list[Resources]) -> None:
    most = max(sum(at is not None for at in chosen) for chosen in places([need] * count, nodes))
    assert sum(first_fit([need] * count, nodes)) == most


@given(st.integers(0, 2), st.integers(0, 2), some_nodes)
def test_of_kinds_that_share_nothing_as_many_fit_as_can(cpus: int, gpus: int, nodes: list[Resources]) -> None:
    needs: list[Resources] = [{"CPU": 1.0}] * cpus + [{"GPU": 1.0}] * gpus
    most = max(sum(at is not None for at in chosen) for chosen in places(needs, nodes))
    assert sum(first_fit(needs, nodes)) == most


def test_a_replica_asks_for_what_its_kind_has() -> None:
    assert ray_facts.replica_needs(AppConfig(cpus_per_replica=2), "cpu") == {"CPU": 2.0, "GPU": 0.0}
    assert ray_facts.replica_needs(AppConfig(), "a100") == {"CPU": 1.0, "GPU": 1, "accelerator_type:A100": 0.001}
    assert ray_facts.replica_options(AppConfig(), "a100", labelled=True) == {
        "num_gpus": 1,
        "label_selector": {"isobatch.io/kind": "a100"},
    }
    virtual = AppConfig(backend="virtual", profile="it.json")
    assert ray_facts.replica_needs(virtual, "a100") == {"CPU": 0.01, "GPU": 0.0}
