"""What serves: an application in a thread, or `isobatch serve` as a process whose descendants bear a mark."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from experiments.shared.machine import free_port
from isobatch.deployments.processes import bound_to_us

ROOT = Path(__file__).parents[2]
END_S = 120.0  # how long the end may take that a signal asks for, on however busy a machine
SERVE = [sys.executable, "-m", "isobatch.cluster.cli", "serve"]


@contextmanager
def in_a_thread(api: Any) -> Iterator[str]:
    """The address of an application behind uvicorn."""
    server = uvicorn.Server(uvicorn.Config(api, "127.0.0.1", 0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def temporary(folder: Path) -> Path:
    """A folder of the command's own; its path is short, as those of sockets must be."""
    return Path(tempfile.gettempdir()) / f"{abs(hash(folder)) % 10**5}"


def marked(mark: str) -> list[str]:
    """The processes that were started with this mark in their environment, whoever is their parent now."""
    result = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                result.append(environment.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:
            continue
    return result


def left_in(folder: Path) -> list[str]:
    """The folders that the command has left for itself. The one by which all Rays divide the cores stays."""
    names = {path.name for path in temporary(folder).glob("isobatch-*")}
    return sorted(names - {f"isobatch-cores-{os.getuid()}"})


@contextmanager
def serving(
    folder: Path, file: Path, *options: str, at: Path = ROOT, until_ready: bool = True
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command at work on a Serve file: its process, its address, and the mark that all its processes bear.

    It ends with whoever runs the tests, even if that is killed.
    """
    mark, port = f"ISOBATCH_TEST={uuid.uuid4().hex}", free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    environment |= dict([mark.split("=")]) | {"TMPDIR": str(temporary(folder)), "RAY_TMPDIR": "/tmp"}
    temporary(folder).mkdir()
    environment |= bound_to_us(temporary(folder)) | {"http_proxy": "http://127.0.0.1:1"}  # which nothing here may use
    with subprocess.Popen(
        [*SERVE, str(file), "--port", str(port), "--grpc-port", "0", *options],
        cwd=at,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heeds_signals,
    ) as process:
        try:
            assert not until_ready or "ready at" in process.stdout.readline()
            yield process, f"http://127.0.0.1:{port}", mark
        finally:
            process.kill()
            shutil.rmtree(temporary(folder), ignore_errors=True)


def _heeds_signals() -> None:
    """Whatever those who run the tests ignore: nohup ignores SIGHUP, and a shell's background jobs SIGINT."""
    for each in (signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
