"""What we know of Ray: its nodes, and every call into it that Ray does not promise to keep.

Each such call is one small function, and tests/unit/deployments/test_ray_facts.py says which of them another version of
Ray has broken. Ray is imported inside the functions, as it reads the environment when it is first imported, and the
command line must answer without it.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deployments.cluster_checks import ClusterState
from deployments.config import AppConfig, ports_in
from deployments.resources import KIND, Resources, asked_for, by_label, less
from deployments.transport.wire import ANY_PORT, Certificates, Wire, contexts

_NAMESPACE = "isobatch"
_ANSWER_WITHIN_S = 120.0  # a node, which may have to start a process for it
_REPLICA_ANSWERS_WITHIN_S = 10.0
_ASKED = "asked:"  # and the name of an application: the key of what it asked the autoscaler for
_FLEET = re.compile(r"(?P<front>.+)\.[0-9a-f]{6}\.[^.]+")  # the name of an application of replicas

# Its nodes


def nodes() -> list[Resources]:
    """All resources of each node that is alive, taken or not."""
    return [by_label(node["Resources"], node) for node in _alive()]


def free_resources() -> list[Resources]:
    """What each node has left, by a function without a documented twin: the documented one sums over all nodes."""
    from ray._private.state import available_resources_per_node

    alive = {node["NodeID"]: node for node in _alive()}
    free = available_resources_per_node()
    return [by_label(free[node], alive[node]) for node in free if node in alive]


def nodes_beside_others(application: str) -> list[Resources]:
    """What each node has for this application, taken or not: all but what replicas of other applications hold.

    So an application that has lost a device plans for fewer, and never for one on which another's replica runs.
    """
    found = {node["NodeID"]: by_label(node["Resources"], node) for node in _alive()}
    for name, other in _applications().items():
        if front_of(name) != application:
            for node, held in _held(other):
                found |= {node: less(found[node], held)} if node in found else {}
    return list(found.values())


def _held(application: dict[str, Any]) -> Iterator[tuple[str, Resources]]:
    """The node of each replica that has one, and what it holds there."""
    for deployment in application["deployments"].values():
        held = asked_for(deployment["deployment_config"].get("ray_actor_options") or {})
        yield from ((each["node_id"], held) for each in deployment["replicas"] if each.get("node_id"))


def labelled() -> bool:
    """Whether the owner of this cluster says by labels what its devices are; then replicas are placed by them."""
    return any(KIND in node.get("Labels", {}) for node in _alive())


def _alive() -> list[dict[str, Any]]:
    """Those that stay: a node that is being drained, as before a spot reclaim, is about to go."""
    import ray
    from ray._private.state import state

    alive = [node for node in ray.nodes() if node["Alive"]]
    leaving = state.get_draining_nodes()
    return [node for node in alive if node["NodeID"] not in leaving]


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


def cluster_state() -> ClusterState:
    import ray

    http = ray.get(serve_client()._controller.get_http_config.remote())
    addresses = [str(node["NodeManagerAddress"]) for node in _alive()]
    return ClusterState(str(http.host), bool(http.ssl_keyfile or http.ssl_certfile), addresses)


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


# Its start


def address_file() -> Path:
    """Where `ray start` writes the address of the cluster that it leaves running; no documented call tells it."""
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"


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

    with _replaced(services, "get_node", often):
        yield


@contextmanager
def spare_start(dashboard: bool) -> Iterator[None]:
    """Let `ray.init` start what we need of a node only, in groups of their own, which signals to our group pass by.

    Nobody reads the log lines that would be sent to this process, and of an autoscaler only the dashboard shows
    anything.
    """
    from ray._private import services
    from ray._private.node import Node

    with ExitStack() as replaced:
        replaced.enter_context(_replaced(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)))
        for name in ("start_log_monitor",) if dashboard else ("start_log_monitor", "start_monitor"):
            replaced.enter_context(_replaced(Node, name, _start_nothing))
        yield


def _start_nothing(_: Any) -> None: ...


@contextmanager
def _replaced(place: Any, name: str, other: Any) -> Iterator[None]:
    """Something else is there while the block runs."""
    once = getattr(place, name)
    setattr(place, name, other)
    try:
        yield
    finally:
        setattr(place, name, once)


# What Serve calls this process


def replica_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def inside_replica() -> bool:
    """Whether Serve has started this process for a replica."""
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
    """Whether Serve has this deployment no more, or is about to end it for good: no restart comes after that."""
    from ray import serve

    found = serve.status().applications.get(application)
    return found is None or found.status.value == "DELETING" or deployment not in found.deployments


# What Serve's controller is asked


def serve_client() -> Any:
    """Serve's own client, or None before there is a Serve: what the documentation has instead blocks, or starts one."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def front_of(name: str) -> str:
    """The application that an application belongs to: one of replicas to its front application, others to themselves.

    >>> front_of("shop.3f9a01.v100"), front_of("shop.de"), front_of("shop.de.3f9a01.v100")
    ('shop', 'shop.de', 'shop.de')
    """
    fleet = _FLEET.fullmatch(name)
    return fleet["front"] if fleet else name


def declared_applications() -> list[dict[str, Any]]:
    """What Serve was told by files: the applications that run, as their files had them."""
    return [each["deployed_app_config"] for each in _applications().values() if each.get("deployed_app_config")]


def _applications() -> dict[str, Any]:
    """All that Serve tells of its applications, by name."""
    found: dict[str, Any] = serve_client().get_serve_details()["applications"] if serve_client() else {}
    return found


def scale(application: str, deployment: str, replicas: int) -> None:
    """What Serve's endpoint for external scalers does; that endpoint needs the dashboard, which may be off."""
    import ray
    from ray.serve._private.common import DeploymentID

    controller = serve_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, application), replicas))


async def ask_all(handle: Any, method: str) -> list[Any]:
    """What every replica of a deployment answers, of those that answer: one that just ends does not. Serve calls its
    way to ask all of them alpha."""
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        answers = await handle.broadcast(method).results_async(
            timeout_s=_REPLICA_ANSWERS_WITHIN_S, return_exceptions=True
        )
    except DeploymentUnavailableError:  # there is none at this moment
        return []
    return [each for each in answers if not isinstance(each, BaseException)]


def delete_soon(application: str) -> None:
    """Begin to delete an application; the documented way would wait until it is gone, which may take a drain."""
    from ray import serve

    serve.delete(application, _blocking=False)


# What Ray's autoscaler is asked


def ask_autoscaler(application: str, rooms: Sequence[tuple[Resources, Mapping[str, str]]]) -> None:
    """Have nodes with room for all of these, as resources and labels; nodes that nobody asks for go when they are idle.

    Ray knows only one request, so this one has what other applications asked for beside it. It holds until the next.
    """
    from ray.autoscaler.sdk import request_resources
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    if any(labels for _, labels in rooms) and not is_autoscaler_v2():
        raise RuntimeError("Ray's autoscaler heeds no labels here: start Ray behind  export RAY_enable_autoscaler_v2=1")
    key = f"{_ASKED}{application}"
    remember(key, json.dumps(rooms)) if rooms else forget(key)
    asked = [room for known in _keys(_ASKED) for room in json.loads(recall(known) or "[]")]
    request_resources(bundles=[needs for needs, _ in asked], bundle_label_selectors=[labels for _, labels in asked])


# What outlives a process: texts in the store where Serve keeps its own state


def remember(key: str, text: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key, text, overwrite=True, namespace=_NAMESPACE)


def recall(key: str) -> str | None:
    from ray.experimental import internal_kv

    kept = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return bytes(kept).decode() if kept else None


def _keys(prefix: str) -> list[str]:
    from ray.experimental import internal_kv

    return [bytes(key).decode() for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)]


def forget(key: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


@dataclass(frozen=True)
class Remembered:
    """What who leads an application needs to know when it is restarted, kept as a text where Serve keeps its state.

    `fleet` is the prefix of the applications that hold the replicas, if they have some of their own. `origin` is the
    part of the user's file that decides the plan; if it has changed since this was written, the remembered plan no
    longer holds.
    """

    fleet: str
    origin: str
    version: int
    plan: str  # as JSON: a later version of this code may read it
    ended: bool = False  # the deployer that wrote it has ended, with all its fronts

    def keep(self, application: str) -> None:
        remember(application, json.dumps(asdict(self)))


def remembered(application: str) -> Remembered | None:
    """The plan that an application was led to."""
    kept = recall(application)
    return Remembered(**json.loads(kept)) if kept else None
