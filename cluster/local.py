"""A Ray of our own on this machine: its fast settings, its start, and a stop that leaves nothing behind."""

import contextlib
import io
import logging
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cluster.haproxy import local_statistics
from cluster.processes import adopt_orphans, end_descendants
from profiles.errors import UserError

ROOT = Path(__file__).resolve().parent.parent  # where our packages are imported from
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
    # HAProxy is started again after it failed three of these in a row.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # How long a stopping replica stays reachable: HAProxy, on this machine, forgets it in a fraction of a second.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
    # Ray makes its workers yield to every other program (niceness 15): meant for batch jobs, fatal for latencies.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own ports accept code to run: whoever calls them must show the token in ~/.ray.
    "RAY_AUTH_MODE": "token",
}


# Between Ray's own ports and those that outgoing connections take, which one of them might do before we listen.
OTHER_PORTS = range(20_000, 32_000)


def free_port(preferred: int, host: str = "127.0.0.1") -> int:
    """This port if nobody listens there, or any free one."""
    return preferred if preferred and is_free(host, preferred) else next(_free_ports(host))


def is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def _free_ports(host: str) -> Iterator[int]:
    return (port for port in random.sample(OTHER_PORTS, len(OTHER_PORTS)) if is_free(host, port))


def _bind(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def running_cluster() -> str | None:
    """The address of a Ray cluster that `ray start` left running here, or that RAY_ADDRESS names."""
    if told := os.environ.get("RAY_ADDRESS"):
        return told
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError):
        address = note.read_text().strip()
        return address if _listens(address) else None
    return None


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except (OSError, ValueError):
        return False


def check_place(host: str, port: int) -> None:
    """One sentence when a Ray of our own cannot be started here, or HTTP not be served there."""
    if address := running_cluster():
        raise UserError(
            f"a Ray cluster is already running at {address}, and 'isobatch serve' starts its own: "
            "stop it with 'ray stop', or deploy onto it with 'serve deploy FILE.yaml'"
        )
    check_port(host, port, "--port")


def check_port(host: str, port: int, option: str) -> None:
    try:
        _bind(host, port)
    except OSError as error:
        reason = f"port {port} of {host} cannot be used ({error.strerror})"
        raise UserError(f"{reason}: stop what listens there, or take another with {option}") from error


def _settings(folder: str) -> dict[str, str]:
    """For this process and all that Ray starts. Two of us may start side by side: nothing is at a fixed place."""
    stats, metrics, fallback = map(str, islice(_free_ports("127.0.0.1"), 3))
    return SETTINGS | {
        "RAY_SERVE_HAPROXY_BINARY_PATH": local_statistics(Path(folder), (stats, metrics)),
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


def prepare_environment(folder: str) -> None:
    """Must come before the first import of ray.serve, which reads it. What the user has set stays."""
    for name, value in _settings(folder).items():
        os.environ.setdefault(name, value)
    paths = [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


@dataclass(frozen=True)
class LocalRay:
    """A Ray that runs, and a Serve that starts."""

    address: str
    folder: Path  # for small files; gone when it stops
    serving: Future[None]  # done when HTTP is open

    def resources(self) -> dict[str, float]:
        import ray

        found: dict[str, float] = ray.cluster_resources()
        return found

    def alive(self) -> bool:
        return _listens(self.address)


@contextmanager
def local_ray(http: dict[str, Any], dashboard: bool = False) -> Iterator[LocalRay]:
    """Ray and Serve on this machine, until the block ends; `http` are Serve's http_options."""
    adopt_orphans()
    folder = tempfile.mkdtemp(prefix="isobatch-")
    try:
        prepare_environment(folder)
        yield _start(http, dashboard, Path(folder))
    finally:
        try:
            _stop()
        finally:
            end_descendants()
            shutil.rmtree(folder, ignore_errors=True)


def _start(http: dict[str, Any], dashboard: bool, folder: Path) -> LocalRay:
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        address="local",
        include_dashboard=dashboard,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level="ERROR",
    )
    # The proxies take seconds to start, and a network to load: neither needs to wait for the other.
    logs = {"log_level": "WARNING", "enable_access_log": False}
    serving = ThreadPoolExecutor(1).submit(serve.start, http_options=http, logging_config=logs)
    return LocalRay(ray.get_runtime_context().gcs_address, folder, serving)


def _stop() -> None:
    """Applications end what was admitted, then Serve ends, then Ray. What Ray prints meanwhile helps nobody."""
    import ray
    from ray import serve

    if not ray.is_initialized() or not _listens(ray.get_runtime_context().gcs_address):
        return  # half started, or dead: nothing was admitted, and no call would return
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), contextlib.suppress(Exception):
        for name in sorted(serve.status().applications):  # a front before its splits, which it takes along
            if name in serve.status().applications:
                serve.delete(name)
        serve.shutdown()
        ray.shutdown()
