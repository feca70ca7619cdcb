"""Reads the state of Ray and its nodes. Nearly all uses of Ray's internals, which may change, are in this file
(docs/upstream.md has the others).

Each such use is one small function; tests/unit/deployments/test_ray_facts.py names those that a new version of Ray has
broken. Ray is imported inside the functions: its first import reads the environment, which must be set before, and
commands that need no Ray start faster without it.
"""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.deployments.cluster_checks import ClusterState
from isobatch.deployments.config import ServedConfig
from isobatch.deployments.named import ports_in
from isobatch.deployments.resources import KIND, Resources, by_label, requested_amounts
from isobatch.deployments.transport.wire import ANY_PORT, Certificates, Wire, tls_contexts

_NAMESPACE = "isobatch"
_NODE_ANSWERS_WITHIN_S = 120.0  # the node may have to start a process first
_REPLICA_ANSWERS_WITHIN_S = 5.0  # less than HAProxy waits for an answer about the server
_AUTOSCALER_ANSWERS_WITHIN_S = 5.0
_REQUESTED = "asked:"  # followed by an application's name: the key of its request to the autoscaler
_FLEET = re.compile(r"(?P<front>.+)\.[0-9a-f]{6}\.(?P<kind>.+)")  # the name of an application of replicas


# Nodes


def nodes() -> list[Resources]:
    """All resources of each node that is alive, used or not."""
    return [*nodes_by_id().values()]


def nodes_by_id() -> dict[str, Resources]:
    """The same by the id of the node."""
    return {str(node["NodeID"]): by_label(node["Resources"], node) for node in _alive()}


def free_resources() -> list[Resources]:
    """The unused resources of each node. Ray's documented function has only their sum over all nodes."""
    from ray._private.state import available_resources_per_node

    alive = {node["NodeID"]: node for node in _alive()}
    free = available_resources_per_node()
    return [by_label(free[node], alive[node]) for node in free if node in alive]


def nodes_beside_others(*applications: str) -> list[Resources]:
    """The resources of each node, used or not, without those that replicas of other applications than these hold.

    From these an application that has lost a device plans for fewer, and not for a device of another application.
    """
    by_node = {node["NodeID"]: by_label(node["Resources"], node) for node in _alive()}
    others = [other for name, other in _applications().items() if front_of(name) not in applications]
    for deployment in (each for other in others for each in other["deployments"].values()):
        held = requested_amounts(deployment["deployment_config"].get("ray_actor_options") or {})
        for node in (replica.get("node_id") for replica in deployment["replicas"]):
            if node in by_node:
                by_node[node] = {name: has - held.get(name, 0.0) for name, has in by_node[node].items()}
    return list(by_node.values())


def labelled() -> bool:
    """Whether nodes have a label for their kind of device. Replicas are then placed by the labels."""
    return any(KIND in node.get("Labels", {}) for node in _alive())


def _alive() -> list[dict[str, Any]]:
    """The nodes that stay. A node that is being drained, for instance before a spot reclaim, will soon be gone."""
    import ray
    from ray._private.state import state

    alive = [node for node in ray.nodes() if node["Alive"]]
    leaving = state.get_draining_nodes()
    return [node for node in alive if node["NodeID"] not in leaving]


def each_node(function: Callable[[Any], Any], argument: Any) -> list[tuple[str, Any]]:
    """Call the function on every node; returns each node's address with the result, or with the error."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    tasks = []
    for node in _alive():
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(function).options(num_cpus=0, scheduling_strategy=on_node, max_retries=0)
        tasks.append((str(node["NodeManagerAddress"]), task.remote(argument)))
    results: list[tuple[str, Any]] = []
    for address, task in tasks:
        try:
            results.append((address, ray.get(task, timeout=_NODE_ANSWERS_WITHIN_S)))
        except Exception as error:
            results.append((address, error))
    return results


def cluster_state() -> ClusterState:
    http = http_options()
    addresses = [str(node["NodeManagerAddress"]) for node in _alive()]
    return ClusterState(str(http.host), bool(http.ssl_keyfile or http.ssl_certfile), addresses)


def http_options() -> Any:
    """The http_options that the running Serve was started with: it ignores those of later Serve files."""
    import ray

    return ray.get(serve_client()._controller.get_http_config.remote())


def node_address() -> str:
    """The address, according to Ray, at which other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def wire_of(config: ServedConfig) -> Wire:
    """How this process reaches others of its application: with TLS if Ray uses TLS, and the same certificates."""
    ports = ports_in(config.ports) if config.ports else ANY_PORT
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):  # as Ray itself reads the variable
        return Wire(node_address(), ports)
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return Wire(node_address(), ports, *tls_contexts(Certificates(*(os.environ.get(name, "") for name in names))))


# Start


def ray_folder() -> Path:
    """The folder in which Ray creates all its files."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")))


def address_file() -> Path:
    """The file to which `ray start` writes the cluster's address. No documented function returns it."""
    return ray_folder() / "ray" / "ray_current_cluster"


RAYLET = "raylet"  # the name of the main process of a node, which starts its other processes
NODE_CHECK_S = 0.1  # how often a starting node is looked up


@contextmanager
def start_timeout(patience_s: float, starts: Callable[[], bool]) -> Iterator[None]:
    """Let `ray.init` or `ray start` wait for its node for `patience_s`, while `starts()`: Ray's own limit is 30 s."""
    from unittest.mock import patch

    from ray._private import services

    get_node = services.get_node

    def get_node_patiently(gcs_address: str, node_id: str) -> Any:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as unknown:  # the node has not registered yet
                if not starts():
                    raise ConnectionError("the node ended while it was starting") from unknown
                if time.monotonic() > until_s:
                    raise
            time.sleep(NODE_CHECK_S)

    with patch.object(services, "get_node", get_node_patiently):
        yield


@contextmanager
def minimal_processes(dashboard: bool) -> Iterator[None]:
    """Let `ray.init` start only the necessary processes of a node, in their own process groups.

    Signals to our process group then do not reach them. The log monitor is left out because nobody reads its lines in
    this process, and the autoscaler's monitor because only the dashboard shows its state.
    """
    from unittest.mock import patch

    from ray._private import services
    from ray._private.node import Node

    with ExitStack() as replaced:
        replaced.enter_context(patch.object(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)))
        for name in ("start_log_monitor",) if dashboard else ("start_log_monitor", "start_monitor"):
            replaced.enter_context(patch.object(Node, name, lambda _: None))
        yield


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Let this process keep its handler for SIGTERM in `ray.init`: one of Ray's, in C++, prints a stack and aborts."""
    from unittest.mock import patch

    from ray import _raylet
    from ray._private import utils

    handler, core_worker = signal.getsignal(signal.SIGTERM), _raylet.CoreWorker  # type: ignore[attr-defined]

    def core_worker_without_handler(*arguments: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return core_worker(*arguments)
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    with ExitStack() as replaced:
        if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
            replaced.enter_context(patch.object(_raylet, "CoreWorker", core_worker_without_handler))
            replaced.enter_context(patch.object(utils, "set_sigterm_handler", lambda _: None))
        yield


def hide_worker_errors() -> None:
    """Keep Ray from printing other processes' tracebacks: commands say in one sentence what failed."""
    from ray._private import worker

    worker._worker_logs_enabled = False


# This process in Serve


def replica_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def node_cpus() -> float:
    """The CPUs of this process's node, as Ray counts them."""
    import ray

    own = node_id()
    return next((float(node["Resources"].get("CPU", 0.0)) for node in ray.nodes() if node["NodeID"] == own), 0.0)


def inside_replica() -> bool:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def application_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().app_name)


def is_gone(application: str, deployment: str) -> bool:
    """Whether Serve no longer has this deployment, or is deleting it, so that it will not be restarted.

    While Serve builds a changed application, and after that has failed, it lists no deployments: all of them stay.
    """
    from ray import serve

    status = serve.status().applications.get(application)
    if status is None or status.status.value == "DELETING":
        return True
    return bool(status.deployments) and deployment not in status.deployments


# Calls to Serve's controller


def drained_s(drain_s: float) -> float:
    """The time until fronts that begin to drain now have ended, and `drain_s` more. Serve gives load balancers time to
    remove a front, however short `drain_s` is."""
    from ray.serve._private import constants as by_ray

    reachable_s: float = by_ray.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
    closing_s: float = by_ray.RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S
    return max(drain_s, reachable_s + closing_s) + drain_s


def serve_client() -> Any:
    """Serve's internal client; None: Serve is not running. The documented ways would block, or start Serve."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def front_of(name: str) -> str:
    """The front application of an application of replicas; for any other application, its own name.

    >>> front_of("shop.3f9a01.v100"), front_of("shop.de"), front_of("shop.de.3f9a01.v100")
    ('shop', 'shop.de', 'shop.de')
    """
    fleet = _FLEET.fullmatch(name)
    return fleet["front"] if fleet else name


def kind_in(name: str) -> str:
    """The kind of device of an application of replicas.

    >>> kind_in("shop.de.3f9a01.a100-1g.10gb")
    'a100-1g.10gb'
    """
    return _FLEET.sub(r"\g<kind>", name)


def declared_applications() -> list[dict[str, Any]]:
    """The running applications that come from Serve files, as in their files."""
    details = _applications().values()
    return [application["deployed_app_config"] for application in details if application.get("deployed_app_config")]


def undeclared_applications() -> list[str]:
    """The names of the running applications that come from no Serve file, as those of replicas."""
    return [name for name, each in _applications().items() if not each.get("deployed_app_config")]


def _applications() -> dict[str, Any]:
    details: dict[str, Any] = serve_client().get_serve_details()["applications"] if serve_client() else {}
    return details


def scale(application: str, deployment: str, replicas: int) -> None:
    """As Serve's endpoint for external scalers, which is not used because it needs the dashboard."""
    import ray
    from ray.serve._private.common import DeploymentID

    controller = serve_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, application), replicas))


async def ask_all(handle: Any, method: str) -> list[Any]:
    """The results of a method on all replicas of a deployment; replicas that end meanwhile, or hang, are left out.
    Serve's `broadcast` is an alpha feature. Its documented way to get results fails if one replica hangs."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        async with asyncio.timeout(_REPLICA_ANSWERS_WITHIN_S):
            replies = await handle.broadcast(method)._fetch_replica_results_async()
    except (DeploymentUnavailableError, TimeoutError):  # there is no replica at this moment
        return []
    answers = [asyncio.ensure_future(each.get_async()) for each in replies]
    if answers:
        await asyncio.wait(answers, timeout=_REPLICA_ANSWERS_WITHIN_S)
    for late in (each for each in answers if not each.done()):
        late.cancel()
    return [each.result() for each in answers if each.done() and not each.cancelled() and not each.exception()]


def delete_soon(application: str) -> None:
    """Begin to delete an application. The documented call waits until it is gone, which may take as long as a drain."""
    from ray import serve

    serve.delete(application, _blocking=False)


# Requests to Ray's autoscaler


def ask_autoscaler(application: str, rooms: Sequence[tuple[Resources, Mapping[str, str]]]) -> None:
    """Request nodes with room for all of these (resources and labels). Idle nodes that are not requested are removed.

    Ray has a single request, which the next one replaces. So each contains the requests of the other applications too.
    """
    from ray.autoscaler.sdk import request_resources
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental import internal_kv

    if any(labels for _, labels in rooms) and not is_autoscaler_v2():
        raise RuntimeError("Ray's autoscaler ignores labels here: set RAY_enable_autoscaler_v2=1 before Ray starts")
    key = f"{_REQUESTED}{application}"
    remember(key, json.dumps(rooms)) if rooms else forget(key)
    known = [bytes(each).decode() for each in internal_kv._internal_kv_list(_REQUESTED, namespace=_NAMESPACE)]
    if application in (running := _applications()):  # else Serve may be starting, and know no application yet
        for gone in (each for each in known if each.removeprefix(_REQUESTED) not in running):
            forget(gone)  # its controller was killed
    requested = [room for each in known for room in json.loads(recall(each) or "[]")]
    request_resources(
        bundles=[needs for needs, _ in requested], bundle_label_selectors=[labels for _, labels in requested]
    )


def autoscaler_refuses() -> bool:
    """Whether the autoscaler has found that it can never have all requested nodes. Until then it rents none of them."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    status = GetClusterStatusReply.FromString(gcs.get_cluster_status(timeout_s=_AUTOSCALER_ANSWERS_WITHIN_S))
    requested = list(status.cluster_resource_state.cluster_resource_constraints)
    return requested != [] and list(status.autoscaling_state.infeasible_cluster_resource_constraints) == requested


# Texts that outlive a process, in the store where Serve keeps its own state


def remember(key: str, text: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key, text, overwrite=True, namespace=_NAMESPACE)


def recall(key: str) -> str | None:
    from ray.experimental import internal_kv

    value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return bytes(value).decode() if value else None


def forget(key: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


@dataclass(frozen=True)
class StoredPlan:
    """The running plan, stored where Serve keeps its state, for a restart of the process that leads the application.

    `fleet` is the prefix of the applications that hold the replicas, if there are any. `origin` is a hash of the part
    of the user's file that decides the plan; if it has changed since, the stored plan is no longer valid.
    """

    fleet: str
    origin: str
    version: int
    plan: str  # as JSON: a later version of this code may read it
    ended: bool = False  # the deployer that wrote it has ended, with all its fronts
    device_ids: Sequence[str] | None = None  # where replicas stand by: the devices that are used
    wakes_in_s: float | None = None  # of a parked application: from its next input until its replicas run
    benched: Mapping[str, str] = field(default_factory=dict)  # slow replicas beside those of the plan

    def store(self, application: str) -> None:
        remember(application, json.dumps(asdict(self)))


def stored_plan(application: str) -> StoredPlan | None:
    text = recall(application)
    return StoredPlan(**json.loads(text)) if text else None
