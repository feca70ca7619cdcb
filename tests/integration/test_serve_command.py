"""`isobatch serve` as its user meets it: a process that is started, asked, and stopped by a signal."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from experiments.shared.machine import free_port
from tests.helpers import toy_model
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.serving import END_S, left_in, marked, serving, temporary
from tests.helpers.toy_graph import application, cut_at

# A user's own network, in a folder with the name of one of ours. Each launch waits as long as there is a file HELD.
OWN_NETWORK = """
import pathlib, time

import isobatch.optimizer, optimizer


class Held(optimizer.Toy):
    def run(self, *told):
        while pathlib.Path(HELD).exists():
            time.sleep(0.05)
        return super().run(*told)


def load(directory, device, dtype):
    assert optimizer is not isobatch.optimizer
    return Held()
"""

# A user's own network, which takes long to load.
SLOW_NETWORK = """
import pathlib, time


def load(directory, device, dtype):
    (pathlib.Path(directory) / "loading").touch()
    time.sleep(600)
"""

# Starts a Ray of its own, and waits for a signal. On one core Serve is still starting when the signal comes.
STARTS = """
import os, signal, sys, time

from isobatch.cluster.serving.local import local_ray

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
with local_ray({"host": "127.0.0.1", "port": int(sys.argv[1])}):
    print("started", flush=True)
    while not signals:
        time.sleep(0.05)
"""


def serve_file(folder: Path, application: dict[str, Any]) -> Path:
    file = folder / "serve.yaml"
    file.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
    return file


def to_the_group(number: int, process: subprocess.Popen[str]) -> None:
    """As a terminal does it, which tells everybody, Ray's processes too."""
    os.killpg(process.pid, number)


def launches(base: str) -> int:
    return sum(split["launches"] for split in ask(base, "GET", "/stats")[1]["splits"])


def is_not_ready(base: str) -> bool:
    """Whether it has begun to stop."""
    with suppress(OSError, HTTPException):
        return ask(base, "GET", "/readyz")[0] == 503
    return False


def statuses_until_the_end(base: str, process: subprocess.Popen[str], held: Path) -> set[int]:
    """Of requests one after the other, none of which waits for another; every answer is JSON.

    The first 503 lets the network go on.
    """
    pending, until_s = [], time.monotonic() + END_S

    def statuses() -> set[int]:
        ended = [each for each in pending if each.done()]
        return {each.result()[0] for each in ended if not isinstance(each.exception(), OSError | HTTPException)}

    with ThreadPoolExecutor(64) as pool:
        while process.poll() is None and time.monotonic() < until_s:
            pending.append(pool.submit(ask, base, "POST", "/predict", {"inputs": [[0, 3]]}))
            time.sleep(0.1)
            if 503 in statuses():
                held.unlink(missing_ok=True)
        held.unlink(missing_ok=True)
    return statuses()


def test_signals_to_its_group_end_what_was_admitted_and_leave_no_process(tmp_path: Path) -> None:
    """Meanwhile whoever asks is told 503: what was admitted waits for that.

    SIGTERM as `timeout` sends it, SIGHUP as a terminal that closes. None of them ends a process of Ray, and two that
    come together are one. The network is of the user's working directory, which comes before all packages on the path
    of the front and of every replica, and may have folders with the names of ours.
    """
    held = tmp_path / "held"
    with ZipFile(tmp_path / "mine.zip", "w") as packed:
        packed.writestr("mine/optimizer/__init__.py", inspect.getsource(toy_model))
        packed.writestr("mine/optimizer/network.py", OWN_NETWORK.replace("HELD", repr(str(held))))
    theirs = application(tmp_path, cut_at(2), "optimizer.network:load", model=str(tmp_path), slo_ms=60_000)
    theirs["runtime_env"] = {"working_dir": (tmp_path / "mine.zip").as_uri()}
    with (
        serving(tmp_path, serve_file(tmp_path, theirs), at=tmp_path) as (process, base, mark),
        ThreadPoolExecutor(1) as pool,
    ):
        assert [split["blocks"] for split in ask(base, "GET", "/stats")[1]["splits"]] == [[0, 2], [2, 4]]
        assert any("haproxy" in line for line in marked(mark))
        held.touch()
        slow = pool.submit(predict, base, [[4, 7], [0, 3]])
        assert eventually(lambda: launches(base))
        to_the_group(signal.SIGHUP, process)
        to_the_group(signal.SIGTERM, process)
        statuses = statuses_until_the_end(base, process, held)
        assert [output["label"] for output in slow.result()] == [7, 3]
        assert {503} <= statuses <= {200, 503, 504}  # 200 or 504: those that came in before the front was gone
        assert process.wait(END_S) == 0
        assert marked(mark) == []
        assert left_in(tmp_path) == []


@pytest.mark.long
def test_a_started_ray_ends_by_our_handler_also_while_serve_starts(tmp_path: Path) -> None:
    """Ray sets handlers of its own, one of which would abort the process, and Serve would start another Ray."""
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", STARTS, str(free_port())], stdout=file)
    assert eventually(lambda: "started" in output.read_text())
    process.terminate()
    assert process.wait(END_S) == 0


@pytest.mark.long
def test_a_signal_during_the_start_ends_it_soon_and_leaves_no_process(tmp_path: Path) -> None:
    """Serve would give a front that still loads its network all of its drain_s."""
    (tmp_path / "slow.py").write_text(SLOW_NETWORK)
    slow = {"model": str(tmp_path), "loader": "slow:load"}
    file = serve_file(tmp_path, {"name": "isobatch", "import_path": "isobatch.deployments.app:build", "args": slow})
    with serving(tmp_path, file, at=tmp_path, until_ready=False) as (process, _, mark):
        assert eventually((tmp_path / "loading").exists)
        to_the_group(signal.SIGINT, process)
        assert process.wait(20.0) == 130
        assert marked(mark) == []
        assert left_in(tmp_path) == []


@pytest.mark.long
def test_two_signals_end_it_at_once_and_leave_no_folder(tmp_path: Path) -> None:
    endless = {
        "model": str(tmp_path),
        "loader": "tests.helpers.toy_model:load_endless",
        "drain_s": 10 * END_S,
        "slo_ms": 60_000,  # HAProxy ends a request soon after its deadline
    }
    file = serve_file(tmp_path, {"name": "isobatch", "import_path": "isobatch.deployments.app:build", "args": endless})
    with serving(tmp_path, file) as (process, base, mark), ThreadPoolExecutor(1) as pool:
        assert left_in(tmp_path)
        slow = pool.submit(predict, base, [[4, 7]])
        assert eventually(lambda: launches(base))
        to_the_group(signal.SIGINT, process)
        assert eventually(lambda: is_not_ready(base))
        time.sleep(1.0)  # two that come together are one
        assert not slow.done()
        process.terminate()
        assert process.wait(END_S) == 130  # it would have waited for ten times as long
        assert slow.exception()
        assert marked(mark) == []
        assert list(temporary(tmp_path).iterdir()) == []
