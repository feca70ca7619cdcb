"""Several nodes on this machine: played by `isobatch serve`, and a cluster that others started with `ray start`."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from isobatch.cluster.load.generator import BROKEN, WRONG
from isobatch.cluster.serving.serve_file import serve_file
from isobatch.profiles.files import load
from tests.helpers import growing
from tests.helpers.asking import ask, eventually
from tests.helpers.ray_cluster import HEAD, OTHER, Started, started
from tests.helpers.serving import END_S, ROOT, marked, serving

pytestmark = pytest.mark.cluster
LOCAL = ROOT / "cluster" / "local.yaml"


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
        assert process.wait(END_S) == 0
        assert marked(mark) == []


@pytest.fixture
def cluster() -> Iterator[Started]:
    with started({"v100": 1, "p100": 1}) as result:
        yield result


def file_of(folder: Path, cluster: Started, host: str) -> str:
    """A part of the local fleet, in a file for this cluster."""
    config = serve_file(LOCAL, {"devices": {"v100": 1, "k80": 2}, "slo_ms": 60_000, "ports": "24500-24599"})
    config = {name: value for name, value in config.items() if name != "nodes"}
    config["applications"] = config["applications"][:1]
    config["http_options"] = {"host": host, "port": cluster.http_port, "location": "HeadOnly"}
    path = folder / f"{host}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


def test_a_running_cluster_is_looked_at_and_deployed_onto(cluster: Started, tmp_path: Path) -> None:
    loopback, everywhere = (file_of(tmp_path, cluster, host) for host in ("127.0.0.1", "0.0.0.0"))
    address = ("--address", cluster.address)

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


def test_links_between_nodes_are_measured_and_kept_in_a_profile(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    with started({}, cpus=1) as cluster:
        cluster.start(OTHER, {}, 1, cluster.prepared)
        words = ("profile", "demo", "--out", str(profile), "--device", "cpu")
        assert cluster.run(*words, "--timing-s", "1").returncode == 0

        def links() -> set[bool]:
            done = cluster.run(*words, "--links")
            assert done.returncode == 0, done.stderr
            return {link.one_machine for link in load(profile).links}

        assert eventually(lambda: links() == {True, False}), "the other node takes its time to join"
    assert all(0 < link.transfer_s(2**20) < 1.0 for link in load(profile).links)


def test_serves_own_commands_deploy_every_file_from_another_folder(tmp_path: Path) -> None:
    """Relative paths, which Ray cannot resolve, are refused; `isobatch serve --out` writes absolute ones."""
    at_once = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
    with started({"v100": 2, "p100": 1, "k80": 4, "t4": 1}, cpus=4, settings=at_once) as cluster:
        dashboard = ("--address", f"http://{HEAD}:{cluster.dashboard_port}")

        def serve(*words: str) -> str:
            done = cluster.python("-m", "ray.serve.scripts", *words, *dashboard, folder=tmp_path)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def states() -> set[str]:
            return {each["status"] for each in yaml.safe_load(serve("status"))["applications"].values()}

        def answers(path: str, value: object) -> bool:
            base = f"http://127.0.0.1:{cluster.http_port}"
            return ask(base, "POST", path, {"inputs": [value]})[0] == 200

        for file, path, value in (
            ("serve.yaml", "/predict", [[0] * 8] * 8),
            ("demo.yaml", "/predict", [[0] * 8] * 8),
            ("local.yaml", "/predict", {}),
            ("two-apps.yaml", "/queries/predict", {}),
        ):
            words = ("--out", file, "--port", str(cluster.http_port), "--grpc-port", "0")
            assert cluster.run("serve", str(ROOT / "cluster" / file), *words, folder=tmp_path).returncode == 0
            serve("deploy", file)
            assert eventually(lambda: states() == {"RUNNING"})
            assert eventually(partial(answers, path, value)), file
            serve("shutdown", "-y")
            assert eventually(lambda: not states())
        serve("deploy", str(ROOT / "cluster" / "demo.yaml"))
        assert eventually(lambda: "DEPLOY_FAILED" in states())
        assert "plan = 'demo/plan.json' must be an absolute path" in serve("status")


def test_nodes_come_as_more_is_asked_are_replaced_when_reclaimed_and_go_again() -> None:
    """The first kind that is requested never comes; waiting for it would raise an error."""
    statuses = growing.grown_and_shrunk()
    assert not np.isin(statuses, (BROKEN, WRONG, 500)).any()
    alone = len(statuses) / growing.MANY  # what the device that is always there would answer at the highest rate
    assert (statuses == 200).sum() > 0.8 * alone, "how long the others are missing is up to this machine"
