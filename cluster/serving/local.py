"""A Ray of our own on this machine: its fast settings, its start, and a stop that leaves nothing behind."""

import atexit
import contextlib
import io
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.serving.haproxy import MAX_CONNECTIONS, guarded, stopping
from cluster.serving.nodes import LocalNode, join
from cluster.serving.ports import check_port, held_ports
from cluster.serving.processes import adopt_orphans, end_descendants, end_guards, end_with_us, runs_below
from deployments.ray_facts import RAYLET, address_file, nodes, patient_start, spare_start
from deployments.ray_settings import NODE_SETTINGS, SETTINGS, haproxy_settings, import_serve
from deployments.resources import Resources
from profiles.errors import UserError

# Characters of a folder for temporary files. HAProxy's sockets have 97, of which Ray and we need 86 below it; Ray's own
# have 107, of which Ray needs 72.
SHORT, SHORT_FOR_RAY = 11, 35
RAY_WITHIN_S = 120.0  # for its processes to start, while they are starting
RAY_ATTEMPTS = 4
REACHED_WITHIN_S = 5.0  # the Ray of others
_PLACE = re.compile(r"[^/:\[\]]+:\d+")  # not `auto`, nor ray://...
PORTS = 3  # of HAProxy's statistics and metrics, and of the proxy of Serve that it falls back on
LOOK_EVERY_S, RAY_ENDS_S = 0.1, 5.0  # while Ray stops; after it has ended its GCS
ROOT = Path(__file__).resolve().parents[2]  # the folder from which isobatch's packages are imported


def running_cluster() -> str | None:
    """The address of a Ray cluster that `ray start` left running here, or that RAY_ADDRESS names."""
    if told := os.environ.get("RAY_ADDRESS"):
        return told
    with contextlib.suppress(OSError):
        address = address_file().read_text().strip()
        return address if _listens(address) else None
    return None


def _listens(address: str, within_s: float = 1.0) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=within_s):
            return True
    except (OSError, ValueError):
        return False


def check_place(host: str, port: int) -> None:
    """Raise UserError if a Ray of our own cannot be started here, or HTTP cannot be served at this address."""
    if address := running_cluster():
        raise UserError(
            f"a Ray cluster is already running at {address}, and 'isobatch serve' starts its own: "
            "stop it with 'ray stop', or deploy onto it with 'isobatch deploy FILE.yaml'"
        )
    check_port(host, port, "--port")


def _settings(folder: str, ports: Sequence[int]) -> dict[str, str]:
    """Environment variables for Ray and HAProxy. No port or path is fixed, so that two servers can run side by side."""
    stats, metrics, fallback = map(str, ports)
    program = guarded(Path(folder), (stats, metrics))
    return SETTINGS | haproxy_settings(folder, program, MAX_CONNECTIONS, stats, metrics, fallback)


def short_temporary() -> str:
    """The folder for temporary files, or /tmp where its path is too long for sockets; Ray is told so, if need be."""
    ours, rays = tempfile.gettempdir(), os.environ.get("RAY_TMPDIR", "")
    if len(rays) > SHORT_FOR_RAY:
        raise UserError(f"RAY_TMPDIR is {rays!r}: sockets need one of at most {SHORT_FOR_RAY} characters")
    if not rays and len(ours) > SHORT_FOR_RAY:
        os.environ["RAY_TMPDIR"] = "/tmp"
    return ours if len(ours) <= SHORT else "/tmp"


def prepare_environment(folder: str, ports: Sequence[int]) -> None:
    """Set the environment before the first import of ray.serve, which reads it. What the user has set stays."""
    for name, value in _settings(folder, ports).items():
        os.environ.setdefault(name, value)
    paths = [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


@dataclass(frozen=True)
class LocalRay:
    """A Ray that is running, and a Serve that is starting on it."""

    address: str
    folder: Path  # for small files; deleted when Ray stops
    serving: Future[None]  # done when HTTP can be reached

    def alive(self) -> bool:
        return _listens(self.address)


@contextmanager
def local_ray(
    http: dict[str, Any],
    dashboard: bool = False,
    more: Sequence[LocalNode] = (),
    metrics_port: int | None = None,
    check: Callable[[Sequence[Resources]], None] = lambda nodes: None,
) -> Iterator[LocalRay]:
    """Ray and Serve on this machine, until the block ends.

    `http`: Serve's http_options; `more`: further nodes; `metrics_port`: where Prometheus asks; None: a free one.
    `check` raises an error if Ray's nodes have too little. It is asked before Serve starts, because a Serve that is
    still starting while Ray stops begins another Ray, and waits for it.
    """
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="isobatch-", dir=short_temporary()))
    _folders.add(folder)
    end_with_us(folder)
    with held_ports(PORTS) as ports:
        try:
            prepare_environment(str(folder), ports)
            with _handler_kept():
                _start_ray(dashboard, metrics_port)
            ray = _start(http, folder, more, check)
            yield ray
        finally:
            try:
                stopping(folder)
                _stop()
            finally:
                leave_nothing()


_folders: set[Path] = set()  # created by this process, deleted when it stops


def leave_nothing(patience_s: float = 3.0) -> None:
    """End every process below this one, and delete the folders that it made."""
    end_descendants(patience_s)
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
    end_guards()


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Ray has a handler of its own for SIGTERM; what the caller has installed is put back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _start(
    http: dict[str, Any], folder: Path, more: Sequence[LocalNode], check: Callable[[Sequence[Resources]], None]
) -> LocalRay:
    import ray

    if more:  # they share this machine's ports, so one proxy serves them all
        join(more, ray.get_runtime_context().gcs_address, folder, RAY_WITHIN_S)
        http = http | {"location": "HeadOnly"}
    check(nodes())
    return _serving(http, folder)


def _serving(http: dict[str, Any], folder: Path) -> LocalRay:
    import_serve()
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Starting the proxies takes seconds, and so does loading a network: they run at the same time.
    logs = {"log_level": "WARNING", "enable_access_log": False}
    serving = ThreadPoolExecutor(1).submit(serve.start, http_options=http, logging_config=logs)
    return LocalRay(ray.get_runtime_context().gcs_address, folder, serving)


@contextmanager
def attached(address: str) -> Iterator[Callable[[dict[str, Any]], LocalRay]]:
    """Connect to a Ray that others have started. What is yielded starts Serve there, if it does not run yet."""
    if _PLACE.fullmatch(address) and not _listens(address, REACHED_WITHIN_S):  # Ray itself would try for minutes
        raise UserError(f"no Ray can be reached at {address} (nobody listens there): is it the address of its head?")
    os.environ.update({name: os.environ.get(name, value) for name, value in NODE_SETTINGS.items()})
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no Ray can be reached at {address} ({reason}): run this on one of its nodes, with its token in ~/.ray"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder:  # nothing of another's HAProxy is below it
            yield partial(_serving, folder=Path(folder))
    finally:
        ray.shutdown()


def _start_ray(dashboard: bool, metrics_port: int | None = None) -> None:
    """Start Ray, several times if need be: on a busy machine its processes may give up waiting for each other."""
    import ray

    for attempt in reversed(range(RAY_ATTEMPTS)):
        try:
            with patient_start(RAY_WITHIN_S, starts=partial(runs_below, RAYLET)), spare_start(dashboard):
                ray.init(
                    address="local",
                    include_dashboard=dashboard,
                    dashboard_host="127.0.0.1",
                    _metrics_export_port=metrics_port,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            return
        except Exception as error:
            end_descendants()
            if not attempt:
                where = address_file().with_name("session_latest") / "logs"
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise UserError(f"Ray did not start on this machine ({reason}); its logs are in {where}") from error


def _stop() -> None:
    """Let applications finish what they admitted, then stop Serve and Ray; what Ray prints meanwhile is discarded.

    A call to a Ray that has died, or dies meanwhile, hangs for a minute and then ends this process: none is waited for.
    """
    import ray

    if not ray.is_initialized():
        return
    address, ending = ray.get_runtime_context().gcs_address, threading.Thread(target=_stop_serve_and_ray, daemon=True)
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        if _listens(address):
            ending.start()
            while ending.is_alive() and _listens(address):
                ending.join(LOOK_EVERY_S)
            ending.join(RAY_ENDS_S)  # Ray has ended its GCS itself, or this is dead
    if ending.is_alive() or not ending.ident:
        atexit.register(_leave)  # before Ray's own way out, which would hang


def _leave() -> None:
    """End this process as one whose Ray has died."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _stop_serve_and_ray() -> None:
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its import, perhaps only now, makes it say more
    with contextlib.suppress(Exception):
        for name in sorted(serve.status().applications):  # a front comes before its splits, which end with it
            if name in serve.status().applications:
                serve.delete(name)
        serve.shutdown()
        ray.shutdown()
