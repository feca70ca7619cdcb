"""A Ray cluster of `ray start` processes at several addresses of this machine; Ray may rent more nodes."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from experiments.shared.commands import COMMAND
from experiments.shared.live import kill_node
from experiments.shared.machine import ROOT, free_port
from isobatch.deployments.processes import bound_to_us, descendants

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
STORE_BYTES = 80 << 20
WITHIN_S, ATTEMPTS = 120.0, 3
IDLE_S = 6.0  # after which Ray gives a rented node back
# Ray's own provider for tests starts nodes as processes of this machine. With its short name, Ray would read an example
# that is not in the wheel.
FAKE = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_ID = "f" * 51 + "00000"  # the name of the head in that provider


class Started:
    """The processes of a cluster. `kinds`: by kind, how many nodes with one device Ray's autoscaler may rent."""

    def __init__(self, folder: Path, kinds: Mapping[str, int] | None = None) -> None:
        self._folder, self._started = folder, list[subprocess.Popen[bytes]]()
        self.port, self.http_port, self.dashboard_port = (free_port() for _ in range(3))
        self.address = f"{HEAD}:{self.port}"
        self.plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
        self.plain |= bound_to_us(folder) | {"RAY_TMPDIR": str(folder / "ray")}
        self.plain |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        # Another cluster on this machine may hold the usual ports.
        ports = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
        self.prepared = self.plain | self._environment() | {name: str(free_port()) for name in ports}
        self._rents = ["--autoscaling-config", str(self._cloud(kinds))] if kinds else []

    def _environment(self) -> dict[str, str]:
        script = f'eval "$({sys.executable} -m isobatch.cluster.cli environment --folder {self._folder}/node)"; env -0'
        output = subprocess.check_output(["sh", "-c", script], cwd=ROOT, env=self.plain)
        return dict(line.split("=", 1) for line in output.decode().split("\0") if "=" in line)

    def _cloud(self, kinds: Mapping[str, int]) -> Path:
        """The file by which Ray rents nodes, and the settings of its fake provider."""
        self.prepared |= {
            "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        }  # fmt: skip
        provider: dict[str, Any] = {
            "type": "external",
            "module": FAKE,
            "gcs_address": self.address,
            "head_node_id": HEAD_ID,
        }
        provider |= {"launch_multiple": True, "disable_node_updaters": True, "disable_launch_config_check": True}
        groups: dict[str, Any] = {
            kind: {"resources": {"CPU": 0, kind: 1, "object_store_memory": STORE_BYTES}, "max_workers": most}
            for kind, most in kinds.items()
        }
        groups["ray.head.default"] = {"resources": {"CPU": 1}, "max_workers": 0}
        path = self._folder / "cloud.json"
        content = {
            "cluster_name": "fake", "provider": provider, "max_workers": sum(kinds.values()),
            "idle_timeout_minutes": IDLE_S / 60, "head_node_type": "ray.head.default",
            "available_node_types": {name: {**each, "node_config": {}} for name, each in groups.items()},
        }  # fmt: skip
        empty = ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray", "worker_start_ray")
        path.write_text(
            json.dumps(
                content | {f"{name}_commands": [] for name in empty} | {"file_mounts": {}, "cluster_synced_files": []}
            )
        )
        return path

    def start(self, address: str, devices: Mapping[str, int], cpus: int, environment: Mapping[str, str]) -> None:
        where = ["--address", self.address]
        if address == HEAD:
            where = ["--head", "--port", str(self.port), "--dashboard-host", HEAD, "--dashboard-port"]
            where += [str(self.dashboard_port), "--ray-client-server-port", str(free_port()), *self._rents]
        words = ["--block", "--node-ip-address", address, "--num-cpus", str(cpus), "--resources", json.dumps(devices)]
        words += ["--object-store-memory", str(STORE_BYTES), "--min-worker-port", "0", "--max-worker-port", "0"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._started.append(
            subprocess.Popen(command, cwd=ROOT, env=dict(environment), start_new_session=True, **quiet)  # type: ignore[call-overload]
        )

    def is_up(self) -> bool:
        """Whether the latest node starts in time; `ray start` then writes the head's address to a file."""
        provider, until_s = self._folder / "ray" / "ray" / "ray_current_cluster", monotonic() + WITHIN_S
        while monotonic() < until_s and self._started[-1].poll() is None:
            if provider.exists():
                return True
            sleep(0.1)
        return False

    def end(self) -> None:
        while self._started:
            self.end_last()

    def end_last(self) -> None:
        """Kill the latest node with all its processes at once, since a node ends slowly by itself."""
        process = self._started.pop()
        kill_node(process.pid)
        process.wait(60)

    def processes(self) -> list[int]:
        return [each for process in self._started for each in descendants(process.pid)]

    def run(self, *words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """A command of ours on the head."""
        return self.python(*COMMAND[1:], *words, folder=folder)

    def python(self, *words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=folder, env=self.prepared, capture_output=True, text=True, timeout=600)


@contextmanager
def started(
    devices: Mapping[str, int],
    cpus: int = 0,
    kinds: Mapping[str, int] | None = None,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Started]:
    """A head with these devices. All processes end with the block, and with this process if it is killed."""
    folder = Path(tempfile.mkdtemp(prefix="ib", dir="/tmp"))  # short, as the paths of sockets must be
    (folder / "ray").mkdir()
    result = Started(folder, kinds)
    result.prepared |= settings or {}
    try:
        for _ in range(ATTEMPTS):  # on a busy machine, Ray's processes may give up on each other at the start
            result.start(HEAD, devices, cpus, result.prepared)
            if result.is_up():
                break
            result.end()
        yield result
    finally:
        result.end()
        shutil.rmtree(folder, ignore_errors=True)
