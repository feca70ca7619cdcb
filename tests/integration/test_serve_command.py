"""`isobatch serve` as its user meets it: a process that is started, asked, and stopped by a signal."""

import inspect
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from zipfile import ZipFile

from isobatch.deployments.processes import descendants
from tests.helpers import toy_model
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.serving import marked, serving, temporary
from tests.helpers.toy_graph import application, cut_at

END_S = 60.0  # how long the end may take that a signal asks for, on however busy a machine


@contextmanager
def served(folder: Path, loader: str, **told: object) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command at work on a toy network."""
    application = {"name": "isobatch", "import_path": "isobatch.deployments.app:build"}
    application |= {"args": {"model": str(folder), "loader": loader, "slo_ms": 60_000, **told}}
    file = folder / "serve.yaml"
    file.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
    with serving(folder, file) as found:
        yield found


def to_the_group(number: int, process: subprocess.Popen[str]) -> None:
    """As a terminal does it, which tells everybody, Ray's processes too."""
    os.killpg(process.pid, number)


def launches(base: str) -> int:
    return sum(split["launches"] for split in ask(base, "GET", "/stats")[1]["splits"])


def statuses_until_the_end(base: str, process: subprocess.Popen[str]) -> set[int]:
    """Of requests one after the other, none of which waits for another; every answer is JSON."""
    found, until_s = [], time.monotonic() + END_S
    with ThreadPoolExecutor(64) as pool:
        while process.poll() is None and time.monotonic() < until_s:
            found.append(pool.submit(ask, base, "POST", "/predict", {"inputs": [[0, 3]]}))
            time.sleep(0.1)
    replies = [each.result() for each in found if not isinstance(each.exception(), OSError | HTTPException)]
    return {status for status, _ in replies}


def test_signals_to_its_group_end_what_was_admitted_and_leave_no_process(tmp_path: Path) -> None:
    """Meanwhile whoever asks is told 503.

    SIGTERM as `timeout` sends it, SIGHUP as a terminal that closes. None of them ends a process of Ray, and two that
    come together are one.
    """
    with served(tmp_path, "tests.helpers.toy_model:load_slow") as (process, base, mark), ThreadPoolExecutor(1) as pool:
        assert any("haproxy" in line for line in marked(mark))
        slow = pool.submit(predict, base, [[4, 7], [0, 3]])  # four blocks of half a second
        assert eventually(lambda: launches(base))
        to_the_group(signal.SIGHUP, process)
        to_the_group(signal.SIGTERM, process)
        statuses = statuses_until_the_end(base, process)
        assert [output["label"] for output in slow.result()] == [7, 3]
        assert {503} <= statuses <= {200, 503, 504}  # 200 or 504: those that came in before the front was gone
        assert process.wait(END_S) == 0
        assert marked(mark) == []
        assert ours(tmp_path) == []


def ours(folder: Path) -> list[Path]:
    """What the command has left in the folder for temporary files."""
    return list(temporary(folder).iterdir())


def test_two_signals_end_it_at_once_and_leave_no_folder(tmp_path: Path) -> None:
    with (
        served(tmp_path, "tests.helpers.toy_model:load_endless", drain_s=10 * END_S) as (process, base, mark),
        ThreadPoolExecutor(1) as pool,
    ):
        assert ours(tmp_path)
        slow = pool.submit(predict, base, [[4, 7]])
        assert eventually(lambda: launches(base))
        to_the_group(signal.SIGINT, process)
        time.sleep(3.0)  # two that come together are one
        assert not slow.done()
        process.terminate()
        assert process.wait(END_S) == 130  # it would have waited for ten times as long
        assert slow.exception()
        assert marked(mark) == []
        assert ours(tmp_path) == []


def test_when_rays_agent_is_killed_it_ends_with_a_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    """Ray's main process ends with its agent. Its GCS runs on, but nothing is served: a supervisor must see that."""
    with served(tmp_path, "tests.helpers.toy_model:load") as (process, _, mark):
        (agent,) = [each for each in descendants(process.pid) if "ray::DashboardAgent".startswith(name_of(each))]
        os.kill(agent, signal.SIGKILL)
        output, _ = process.communicate(timeout=END_S)
        assert process.returncode == 1
        assert "Ray ended unexpectedly" in output
        assert marked(mark) == []
        assert ours(tmp_path) == []


def name_of(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()


def test_a_users_working_directory_may_have_folders_with_the_names_of_ours(tmp_path: Path) -> None:
    """It comes before all packages on the path of the front and of every replica."""
    with ZipFile(tmp_path / "mine.zip", "w") as packed:
        packed.writestr("mine/optimizer/__init__.py", inspect.getsource(toy_model))
        packed.writestr(
            "mine/optimizer/network.py",
            "import isobatch.optimizer, optimizer\n\ndef load(directory, device, dtype):\n"
            "    assert optimizer is not isobatch.optimizer\n    return optimizer.Toy()\n",
        )
    theirs = application(tmp_path, cut_at(2), "optimizer.network:load", model=str(tmp_path))
    theirs["runtime_env"] = {"working_dir": (tmp_path / "mine.zip").as_uri()}
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({"applications": [theirs]}))
    with serving(tmp_path, file, at=tmp_path) as (_, base, _):
        assert [output["label"] for output in predict(base, [[3, 7], [0, 3]])] == [7, 3]
        assert [split["blocks"] for split in ask(base, "GET", "/stats")[1]["splits"]] == [[0, 2], [2, 4]]
