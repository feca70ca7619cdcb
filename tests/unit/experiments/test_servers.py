"""Servers that the benches start: what does not start is told with its last words, and leaves nothing behind."""

import sys
import time
from pathlib import Path

import pytest

from experiments.serve.servers import running

# A server with a child in a session of its own, as Ray's processes are.
CHILD = "import subprocess, sys; child = subprocess.Popen(['sleep', '600'], start_new_session=True)"
TELL = "open(sys.argv[1], 'w').write(str(child.pid))"


def server(then: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", f"{CHILD}; {TELL}; {then}", str(folder / "child")]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_gone(process: int) -> bool:
    until_s = time.monotonic() + 60
    while is_running(process) and time.monotonic() < until_s:
        time.sleep(0.05)
    return not is_running(process)


def test_a_server_that_is_not_ready_in_time_is_ended_with_its_children(tmp_path: Path) -> None:
    command = server("print('cannot bind', flush=True); import time; time.sleep(600)", tmp_path)
    with (
        pytest.raises(RuntimeError, match=r"(?s)was not ready within 5 s.*cannot bind"),
        running(command, "ready", 5.0),
    ):
        pass
    assert is_gone(int((tmp_path / "child").read_text()))


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such device')"]
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1.*no such device"), running(command, "ready"):
        pass


def test_a_server_that_is_ready_runs_until_it_is_not_needed(tmp_path: Path) -> None:
    command = server("print('ready', flush=True); import time; time.sleep(600)", tmp_path)
    with running(command, "ready"):
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
    assert is_gone(child)
