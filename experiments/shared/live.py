"""Runs a live application on a Ray of this process, with nodes that can be added and killed."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from experiments.shared.machine import end_as_by_ctrl_c, free_port
from isobatch.cluster.client import json_at
from isobatch.cluster.serving.applications import deploy
from isobatch.cluster.serving.local import RAY_START, LocalRay, local_ray
from isobatch.deployments.processes import descendants
from isobatch.deployments.ray_facts import serve_client
from isobatch.deployments.replica.virtual import FAULTS
from isobatch.optimizer.plan import Plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, save

NAME = "live"
NODE_WITHIN_S, NODE_ATTEMPTS = 120.0, 3
T = TypeVar("T")
answer_at = partial(json_at, headers={}, patience_s=30.0)  # the JSON at an address of a server


@dataclass(frozen=True)
class Live:
    """One application, and its processes, which may be killed."""

    ray: LocalRay
    base: str
    faults: Path

    @property
    def url(self) -> str:
        return f"{self.base}/predict"

    def deploy(self, *applications: dict[str, Any], patience_s: float = 180.0) -> None:
        """Deploy these applications in place of the present ones."""
        deploy(self.ray, {"applications": list(applications)}, patience_s)

    def processes(self, deployment: str) -> dict[str, int]:
        """The process of each running replica of this deployment, in the application and its controller."""
        result: dict[str, int] = {}
        for name, application in serve_client().get_serve_details()["applications"].items():
            if name.partition(".")[0] not in (NAME, "controller"):
                continue
            for each in application["deployments"].get(deployment, {}).get("replicas", ()):
                if each["state"] == "RUNNING":
                    result[each["replica_id"]] = each["pid"]
        return result

    def slow_down(self, process: int, times: float) -> None:
        """Make launches of this device take `times` as long, from the next one on."""
        (self.faults / str(process)).write_text(str(times))


def in_own_process(measure: Callable[[], T]) -> T:
    """Call this in a new process, since a client of Ray ends its process a minute after that Ray has ended."""
    before = set(active_children())
    with get_context("spawn").Pool(1, end_as_by_ctrl_c) as fresh:
        (process,) = set(active_children()) - before
        result = fresh.apply_async(measure)
        while not result.ready():
            if not process.is_alive():  # the pool starts another process, without the measurement
                raise UserError("the process that measures was killed: has this machine enough memory?")
            result.wait(1.0)
        fresh.close()
        fresh.join()
    return result.get()


@contextmanager
def bare(host: str = "127.0.0.1") -> Iterator[Live]:
    """A Ray and a Serve without applications; `host` must be 0.0.0.0 if nodes have other addresses."""
    before, port = dict(os.environ), free_port()
    os.environ.pop("RAY_ADDRESS", None)
    with TemporaryDirectory() as faults:
        os.environ[FAULTS] = faults
        # Only one proxy, since proxies of several nodes of one machine would need the same port.
        try:
            with local_ray({"host": host, "port": port, "location": "HeadOnly"}) as ray:
                yield Live(ray, f"http://127.0.0.1:{port}", Path(faults))
                logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # handles log the end of their event loop
        finally:
            sys.excepthook = sys.__excepthook__  # Ray's own hook waits for the Ray that has ended, and hides errors
    os.environ.clear()
    os.environ.update(before)


def application(plan: Plan, facts: Profile, folder: Path, **fields: Any) -> dict[str, Any]:
    """The application's entry in a Serve file; its plan and its profile are written into the folder."""
    (folder / "plan.json").write_text(plan.to_json())
    save(facts, folder / "profile.json")
    arguments = {
        "model": str(folder),  # virtual devices read nothing from there
        "backend": "virtual",
        "plan": str(folder / "plan.json"),
        "replan": True,
        "profile": str(folder / "profile.json"),
        "drain_s": 10.0,
        **fields,
    }
    return {"name": NAME, "import_path": "isobatch.deployments.app:build", "args": arguments}


def controller(folder: Path, **fields: Any) -> dict[str, Any]:
    """The controller's entry in a Serve file; its memory is in the folder."""
    arguments = {"application": NAME, "memory": str(folder / "memory"), **fields}
    path = "isobatch.cluster.controller.app:build"
    return {"name": "controller", "import_path": path, "route_prefix": "/controller", "args": arguments}


@contextmanager
def node(address: str, resources: Mapping[str, float], cpus: float = 3.0, host: str | None = None) -> Iterator[int]:
    """One more node of a running Ray, as of a second machine; yields its process, which may be killed.

    `host`: one of this machine's addresses, for this node alone.
    """
    before = _alive()
    # The node has its own folder, since `ray start` writes the cluster's address there, which other programs would use.
    with TemporaryDirectory(prefix="node-", ignore_cleanup_errors=True) as folder:
        command = [*RAY_START, f"--address={address}", f"--temp-dir={folder}", f"--num-cpus={cpus:g}", "--num-gpus=0"]
        command += [f"--resources={json.dumps(dict(resources))}"]
        command += [f"--node-ip-address={host}", "--min-worker-port=0", "--max-worker-port=0"] if host else []
        process = _joined(command, before, Path(folder, "start.log"))
        try:
            yield process.pid
        finally:
            kill_node(process.pid)
            process.wait()


def _joined(command: list[str], before: set[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the node; try again if it ends, since on a busy machine Ray's processes may give up on each other."""
    for _ in range(NODE_ATTEMPTS):
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        until_s = time.monotonic() + NODE_WITHIN_S
        while process.poll() is None and time.monotonic() < until_s:
            if _alive() - before:
                return process
            time.sleep(0.1)
        kill_node(process.pid)
        process.wait()
    raise RuntimeError(f"no node joined in {NODE_ATTEMPTS} attempts; the last one printed: {log.read_text()[-2000:]}")


def kill_node(process: int) -> None:
    """Kill a node with all its processes at once."""
    for each in (*descendants(process), process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def named(what: str) -> list[int]:
    """The processes below this one whose command line contains this."""
    result = []
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if what in Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                result.append(process)
    return result


def _alive() -> set[str]:
    """The nodes that Ray believes alive, some of which may have just died."""
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}
