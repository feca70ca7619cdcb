"""A Ray of our own on this machine: its settings, its start, and a stop that leaves nothing behind."""

import atexit
import contextlib
import fcntl
import io
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

import isobatch
from isobatch.cluster.serving.capacity import gpu_label
from isobatch.cluster.serving.haproxy import MAX_CONNECTIONS, short_temporary, stopping, write_script
from isobatch.cluster.serving.ports import check_port, held_ports
from isobatch.deployments.config import checked
from isobatch.deployments.front.proxy import allowed_connections
from isobatch.deployments.named import NodeKind
from isobatch.deployments.processes import (
    adopt_orphans,
    bound_to_us,
    end_descendants,
    end_guards,
    is_running,
    reap,
    running_below,
)
from isobatch.deployments.ray_facts import (
    RAYLET,
    address_file,
    hide_worker_errors,
    minimal_processes,
    nodes,
    own_sigterm_handler,
    ray_folder,
    start_timeout,
)
from isobatch.deployments.ray_settings import NODE_SETTINGS, SETTINGS, haproxy_settings, hide_token, import_serve
from isobatch.deployments.resources import Resources
from isobatch.profiles.errors import UserError

STORE_BYTES = 80 << 20  # of Ray's object store, which isobatch does not use
LEAST_FREE_BYTES = 10 << 20  # where Ray writes
_LOOK_EVERY_S = 0.2  # how often to count the nodes that have started


class LocalNode(BaseModel):
    """An entry of `nodes:` in a Serve file: a node that `isobatch serve` starts in addition to the first one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: dict[NodeKind, PositiveInt] = Field(
        min_length=1, description="The node's virtual devices, as KIND: COUNT."
    )
    cpus: int = Field(0, ge=0, description="CPUs that Ray may use there; with 0, fronts stay on the first node.")


def local_nodes(content: dict[str, Any]) -> list[LocalNode]:
    """The nodes under `nodes:` in a Serve file; raises UserError if they are wrong."""
    if not isinstance(wanted := content.get("nodes") or [], list):
        raise UserError(f"nodes = {wanted!r}: this must be a list, as in [{{devices: {{t4: 2}}}}]")
    return [checked(LocalNode, node, f"nodes.{number}") for number, node in enumerate(wanted)]


def join(wanted: Sequence[LocalNode], folder: Path, within_s: float) -> None:
    """Start the nodes; returns when Ray knows all of them. Each has its own folder below `folder`.

    In its default folder, `ray start` would record that this machine has a cluster, and other programs would use it.
    """
    import ray

    gcs_address, quiet = ray.get_runtime_context().gcs_address, subprocess.DEVNULL
    commands = [_command(node, gcs_address, folder / f"node-{number}") for number, node in enumerate(wanted)]
    # In sessions of their own: a signal of the terminal must not end a node before waiting requests are answered.
    started = [
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        for command in commands
    ]
    until_s = time.monotonic() + within_s
    while len(nodes()) <= len(started):
        if any(process.poll() is not None for process in started) or time.monotonic() > until_s:
            raise UserError(f"of {len(started)} more nodes, {len(nodes()) - 1} started: is there enough memory?")
        time.sleep(_LOOK_EVERY_S)


def _command(node: LocalNode, gcs_address: str, folder: Path) -> list[str]:
    return [
        *(*RAY_START, "--disable-usage-stats"),
        *("--address", gcs_address, "--node-ip-address", gcs_address.rpartition(":")[0]),
        *("--num-cpus", str(node.cpus), "--num-gpus", "0", "--resources", json.dumps(node.devices)),
        *("--object-store-memory", str(STORE_BYTES), "--min-worker-port", "0", "--max-worker-port", "0"),
        *("--include-log-monitor", "false", "--temp-dir", str(folder)),
    ]


RAY_WITHIN_S = 120.0  # for Ray's processes to start
RAY_START = (sys.executable, "-c", f"from {__name__} import start_node; start_node()", "start", "--block")
RAY_ATTEMPTS = 4
REACHED_WITHIN_S = 5.0  # for a connection to a cluster
_HOST_AND_PORT = re.compile(r"[^/:\[\]]+:\d+")  # neither `auto` nor ray://...
PORTS = 3  # for HAProxy's statistics, its metrics, and Serve's own proxy
HAPROXY = "haproxy"  # the name of its processes
_STOP_CHECK_S = 0.1  # how often to check whether Ray has stopped
RAY_STOPS_S = 30.0  # how long Ray's own stop may take: if its GCS is gone, it ends this process after a minute
RAY_ENDS_S = 5.0  # how long Ray may take to end after its GCS, its central process
ROOT = Path(isobatch.__file__).parents[1]  # the folder from which isobatch is imported


def start_node() -> None:
    """Run `ray start` in this process, but wait as long for the node as for the first one."""
    from ray.scripts.scripts import main

    with start_timeout(RAY_WITHIN_S, starts=lambda: bool(running_below(RAYLET))):
        main()


def logs() -> Path:
    """The folder of the logs of the latest Ray."""
    return address_file().with_name("session_latest") / "logs"


def running_cluster() -> str | None:
    """The address of a Ray cluster that `ray start` left running here, or that RAY_ADDRESS names."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    with contextlib.suppress(OSError):
        address = address_file().read_text().strip()
        return address if _listens(address) else None
    return None


def without_cluster() -> str:
    """What to do so that no cluster is in the way: 'ray stop' changes nothing in the environment."""
    return "unset RAY_ADDRESS, which names it" if os.environ.get("RAY_ADDRESS") else "stop it with 'ray stop'"


def _runs(address: str, raylet: int) -> bool:
    """Whether a Ray runs whose GCS has this address; `raylet`: the main process of its node here, 0 if not ours."""
    return _listens(address) and (not raylet or is_running(raylet))


def _listens(address: str, within_s: float = 1.0) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=within_s):
            return True
    except (OSError, ValueError):
        return False


def check_place(host: str, port: int) -> None:
    """Raise UserError if a Ray of our own cannot be started here, or if HTTP cannot use this address."""
    if address := running_cluster():
        raise UserError(
            f"a Ray cluster is already running at {address}, and 'isobatch serve' starts its own: "
            f"{without_cluster()}, or deploy onto it with 'isobatch deploy FILE.yaml'"
        )
    if host == "::1":
        never = "HAProxy reaches fronts at the address of Ray's node, which is never ::1"
        raise UserError(f"host ::1: {never}: listen on 127.0.0.1")
    place = ray_folder()
    if place.is_dir() and shutil.disk_usage(place).free < LEAST_FREE_BYTES:  # Ray would wait for minutes
        raise UserError(f"{place}, where Ray writes, is full: free some of it, or name another folder: RAY_TMPDIR=DIR")
    check_port(host, port, "--port")


def prepare_environment(folder: str, ports: Sequence[int]) -> None:
    """Set the environment before the first import of ray.serve, which reads it. The user's own variables stay.

    No port or path is fixed, so several servers can run side by side.
    """
    hide_token()
    stats, metrics, fallback = map(str, ports)
    connections = allowed_connections(MAX_CONNECTIONS)
    program = write_script(Path(folder), (stats, metrics), connections)
    settings = SETTINGS | haproxy_settings(folder, program, connections, stats, metrics, fallback)
    os.environ |= settings | os.environ
    paths = [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


@dataclass(frozen=True)
class LocalRay:
    """A Ray that is running, and a Serve that is starting on it."""

    address: str
    folder: Path  # for small files; deleted when Ray stops
    serving: Future[None]  # done when HTTP can be reached
    raylet: int = 0  # the main process of this node; 0: it is not ours

    def settle(self) -> None:
        """Wait until Serve has started or failed: if Ray stopped before that, Serve would start another Ray."""
        with contextlib.suppress(Exception):
            self.serving.result()

    def alive(self) -> bool:
        """Whether Ray runs. Zombies of HAProxy, whose parents have ended, are removed on the way."""
        reap(HAPROXY)
        return _runs(self.address, self.raylet)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Keep systemd from deleting old files below this folder until the block ends: it leaves locked ones (tmpfiles.d).

    Where it empties /tmp, HAProxy could otherwise not be started again after some days.
    """
    with ExitStack() as held:
        with contextlib.suppress(OSError):  # there may be no such folder, or no locks on its disk
            lock = os.open(folder, os.O_RDONLY)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def local_ray(
    http: dict[str, Any],
    dashboard: bool = False,
    more: Sequence[LocalNode] = (),
    metrics_port: int | None = None,
    check: Callable[[Sequence[Resources]], None] = lambda nodes: None,
) -> Iterator[LocalRay]:
    """Ray and Serve on this machine, until the block ends.

    `http`: Serve's http_options; `more`: further nodes; `metrics_port`: the port that Prometheus reads; None: any free
    one. `check` raises an error if Ray's nodes have too few resources. It is called before Serve starts, because a
    stop waits until Serve has started.
    """
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="isobatch-", dir=short_temporary()))
    _folders.add(folder)
    os.environ |= bound_to_us(folder)
    raylet, started = 0, None
    with held_ports(PORTS) as ports, kept(folder), ExitStack() as until_end:
        try:
            prepare_environment(str(folder), ports)
            with own_sigterm_handler():
                raylet = _start_ray(dashboard, metrics_port)
            until_end.enter_context(kept(address_file().parent))  # of Ray's own files
            if more:  # all nodes share this machine's ports, so there can be only one proxy
                join(more, folder, RAY_WITHIN_S)
                http = http | {"location": "HeadOnly"}
            check(nodes())
            started = _serving(http, folder, raylet)
            yield started
        finally:
            try:
                with contextlib.suppress(OSError):  # the folder may be gone, or its disk full
                    stopping(folder)
                _stop(raylet, started)
            finally:
                leave_nothing()


_folders: set[Path] = set()  # created by this process, deleted when it stops


def leave_nothing(patience_s: float = 3.0) -> None:
    """End all descendants of this process, and delete the folders that it has created."""
    end_descendants(patience_s)
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
    end_guards()


def _serving(http: dict[str, Any], folder: Path, raylet: int = 0) -> LocalRay:
    import_serve()
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Starting the proxies takes seconds, as does loading a network: both happen at the same time.
    logs = {"log_level": "WARNING", "enable_access_log": False}
    serving = ThreadPoolExecutor(1).submit(serve.start, http_options=http, logging_config=logs)
    return LocalRay(ray.get_runtime_context().gcs_address, folder, serving, raylet)


@contextmanager
def while_serving(address: str) -> Iterator[None]:
    """Raise UserError if Serve ends in this block, as when its `isobatch serve` is stopped."""
    from ray.exceptions import RayActorError

    try:
        yield
    except RayActorError as error:
        raise UserError(f"Serve ended on the cluster at {address}: if nobody stopped it, try again") from error


def end_with_ray(gcs_address: str, address: str) -> threading.Event:
    """End this process with a sentence if Ray ends before the event is set: calls to Ray would hang for a minute."""
    is_left = threading.Event()

    def watch() -> None:
        ran_s = inf  # until it was reached from here
        while not is_left.wait(_STOP_CHECK_S):
            if _listens(gcs_address):
                ran_s = time.monotonic()
            elif time.monotonic() - ran_s > REACHED_WITHIN_S:
                cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # shows it again
                why = f"Ray ended on the cluster at {address}: if nobody stopped it, try again"
                print(f"{cursor}error: {why}", file=sys.stderr, flush=True)
                os._exit(2)

    threading.Thread(target=watch, daemon=True).start()
    return is_left


@contextmanager
def attached(address: str) -> Iterator[Callable[[dict[str, Any]], LocalRay]]:
    """Connect to a running Ray cluster. The function that is yielded starts Serve there, if it does not run yet."""
    if _HOST_AND_PORT.fullmatch(address) and not _listens(address, REACHED_WITHIN_S):  # Ray would try for minutes
        raise UserError(f"no Ray can be reached at {address} (nobody listens there): is it the address of its head?")
    # Ray makes this many attempts, a second apart; the setting of nodes is for a head that is still starting.
    os.environ |= NODE_SETTINGS | os.environ | {"RAY_gcs_server_port_wait_time_s": f"{REACHED_WITHIN_S:.0f}"}
    import ray

    hide_worker_errors()
    try:
        with own_sigterm_handler():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no Ray can be reached at {address} ({reason}): run this on one of its nodes, with its token in ~/.ray"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    is_left = end_with_ray(ray.get_runtime_context().gcs_address, address)
    started: list[LocalRay] = []

    def serving(http: dict[str, Any]) -> LocalRay:
        started.append(_serving(http, Path(folder)))
        return started[-1]

    try:
        with tempfile.TemporaryDirectory() as folder:  # contains no files of the cluster's HAProxy
            yield serving
    finally:
        try:
            for each in started:
                each.settle()
        finally:
            ray.shutdown()
            is_left.set()


def _start_ray(dashboard: bool, metrics_port: int | None) -> int:
    """Start Ray, with several attempts: on a busy machine its processes may give up waiting for each other.

    Returns the number of its main process.
    """
    import ray

    hide_worker_errors()
    for attempt in reversed(range(RAY_ATTEMPTS)):
        try:
            with start_timeout(RAY_WITHIN_S, starts=lambda: bool(running_below(RAYLET))), minimal_processes(dashboard):
                ray.init(
                    address="local",
                    include_dashboard=dashboard,
                    dashboard_host="127.0.0.1",
                    _metrics_export_port=metrics_port,
                    log_to_driver=False,
                    logging_level="ERROR",
                    labels=gpu_label(),
                )
            return next(iter(running_below(RAYLET)), 0)
        except Exception as error:
            end_descendants()
            if not attempt:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise UserError(f"Ray did not start on this machine ({reason}); its logs are in {logs()}") from error
    raise AssertionError("This is a bug: the last attempt returns or raises.")


def _stop(raylet: int, started: LocalRay | None) -> None:
    """Let applications answer what they admitted, then stop Serve and Ray. Ray's output meanwhile is discarded.

    A call to a dead Ray hangs for a minute and then ends this process, so no call may take that long.
    """
    import ray

    if not ray.is_initialized():
        return
    address, shutting_down = ray.get_runtime_context().gcs_address, threading.Event()
    ending = threading.Thread(target=_stop_serve_and_ray, args=(started, shutting_down), daemon=True)
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        if _runs(address, raylet):
            ending.start()
            while ending.is_alive() and _runs(address, raylet):
                ending.join(_STOP_CHECK_S)
            # The GCS has ended, by Ray's own stop, which waits for each of its processes, or otherwise.
            ending.join(RAY_STOPS_S if shutting_down.is_set() else RAY_ENDS_S)
    if ending.is_alive() or not ending.ident:
        # These run before Ray's own exit handler, which would hang: the last one registered runs first.
        atexit.register(os._exit, 1)
        atexit.register(sys.stdout.flush)


def _stop_serve_and_ray(started: LocalRay | None, shutting_down: threading.Event) -> None:
    import ray
    from ray import serve

    # Importing it, which may happen only now, resets the level.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if started:
        started.settle()
    with contextlib.suppress(Exception):  # Serve fails here if the event loop of a handle is closed
        for name in sorted(serve.status().applications):  # a front comes before its splits, which end with it
            if name in serve.status().applications:
                serve.delete(name)
        serve.shutdown()
    shutting_down.set()
    with contextlib.suppress(Exception):
        ray.shutdown()
