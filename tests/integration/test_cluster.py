"""Several nodes on this machine: played by `isobatch serve`, and a cluster that others started with `ray start`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.serving.local import free_port
from cluster.serving.processes import descendants
from cluster.serving.serve_file import serve_file
from tests.helpers.asking import ask, eventually
from tests.helpers.serving import ROOT, marked, serving

pytestmark = pytest.mark.cluster
LOCAL = ROOT / "cluster" / "local.yaml"
HEAD, OTHER = "127.0.0.2", "127.0.0.3"


def kinds(base: str) -> set[str]:
    """The kinds of devices that have run anything."""
    splits = ask(base, "GET", "/stats")[1]["splits"]
    return {split["group"].rpartition("-")[0] for split in splits if split["launches"]}


def test_four_nodes_of_four_kinds_answer_and_leave_no_process(tmp_path: Path) -> None:
    with serving(tmp_path, LOCAL) as (process, base, mark), ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: ask(base, "POST", "/predict", {"inputs": [{}] * 8}), range(60)))
        assert 200 in {status for status, _ in replies} <= {200, 503, 504}  # a busy machine cannot keep 200 ms
        assert len(kinds(base)) >= 3
        assert sum("raylet" in line for line in marked(mark)) == 5
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 0
        assert marked(mark) == []


class Cluster:
    """What `ray start` starts on two machines, here at two addresses. Everything ends with the block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[subprocess.Popen[bytes]]()
        self.port, self.http_port, self.dashboard_port = (free_port(0) for _ in range(3))
        self.plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
        self.plain |= {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(folder / "ray")}
        # The usual ports may be another's on this machine.
        ports = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
        self.prepared = self.plain | self._environment() | {name: str(free_port(0)) for name in ports}

    def _environment(self) -> dict[str, str]:
        script = f'eval "$({sys.executable} -m cluster.cli environment --folder {self._folder}/node)"; env -0'
        said = subprocess.check_output(["sh", "-c", script], cwd=ROOT, env=self.plain)
        return dict(line.split("=", 1) for line in said.decode().split("\0") if "=" in line)

    def start(self, address: str, devices: Mapping[str, int], cpus: int, environment: Mapping[str, str]) -> None:
        where = ["--address", f"{HEAD}:{self.port}"]
        if address == HEAD:
            where = ["--head", "--port", str(self.port), "--dashboard-host", HEAD, "--dashboard-port"]
            where += [str(self.dashboard_port), "--ray-client-server-port", str(free_port(0))]
        words = ["--block", "--node-ip-address", address, "--num-cpus", str(cpus), "--resources", json.dumps(devices)]
        words += ["--object-store-memory", str(80 << 20), "--min-worker-port", "0", "--max-worker-port", "0"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._started.append(
            subprocess.Popen(command, cwd=ROOT, env=dict(environment), start_new_session=True, **quiet)  # type: ignore[call-overload]
        )

    def end(self) -> None:
        while self._started:
            self.end_last()

    def end_last(self) -> None:
        """At once, with all that runs there: a node that is asked to end takes its time."""
        process = self._started.pop()
        for each in (*descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait(60)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of ours on the head."""
        command = [sys.executable, "-m", "cluster.cli", *words]
        return subprocess.run(command, cwd=ROOT, env=self.prepared, capture_output=True, text=True, timeout=600)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ib", dir="/tmp"))  # short, as the paths of sockets must be
    (folder / "ray").mkdir()
    found = Cluster(folder)
    try:
        found.start(HEAD, {"v100": 1, "p100": 1}, 0, found.prepared)
        yield found
    finally:
        found.end()
        shutil.rmtree(folder, ignore_errors=True)


def file_of(folder: Path, cluster: Cluster, host: str) -> str:
    """A part of the local fleet, in a file for this cluster."""
    told = serve_file(LOCAL, {"devices": {"v100": 1, "k80": 2}, "slo_ms": 20_000, "ports": "24500-24599"})
    told = {name: value for name, value in told.items() if name != "nodes"}
    told["applications"] = told["applications"][:1]
    told["http_options"] = {"host": host, "port": cluster.http_port, "location": "HeadOnly"}
    path = folder / f"{host}.yaml"
    path.write_text(json.dumps(told))  # JSON is YAML
    return str(path)


def test_a_running_cluster_is_looked_at_and_deployed_onto(cluster: Cluster, tmp_path: Path) -> None:
    loopback, everywhere = (file_of(tmp_path, cluster, host) for host in ("127.0.0.1", "0.0.0.0"))
    address = ("--address", f"{HEAD}:{cluster.port}")

    def said(file: str) -> str:
        return cluster.run("deploy", file, "--check", *address).stderr

    cluster.start(OTHER, {"k80": 2}, 2, cluster.plain)
    assert eventually(lambda: f"node {OTHER}: RAY_SERVE_" in said(everywhere))
    cluster.end_last()
    cluster.start(OTHER, {"k80": 2}, 2, cluster.prepared)
    assert eventually(lambda: "fronts on other nodes could not be reached" in said(loopback))
    done = cluster.run("deploy", everywhere, *address)
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    base = f"http://127.0.0.1:{cluster.http_port}"
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: ask(base, "POST", "/predict", {"inputs": [{}] * 8}), range(40)))
    assert {status for status, _ in replies} == {200}
    assert kinds(base) == {"v100", "k80"}
