"""Starts the servers to be measured, each as a program of its own, and ends them."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO
from uuid import uuid4

from experiments.serve.fleet import serve_file
from experiments.shared.commands import COMMAND
from experiments.shared.machine import free_port
from isobatch.cluster.serving.local import ROOT
from isobatch.deployments.ray_settings import SETTINGS
from isobatch.optimizer.plan import Plan
from isobatch.profiles.files import Profile

PATIENCE_S = 600.0  # a busy machine starts slowly
MARK = "ISOBATCH_BENCH_SERVER"  # in the environment of a server and of all that it starts
SHOWN = 2000  # characters at the end of the log of a server that does not start


@contextmanager
def isobatch(serve_file: Path, grpc_port: int = 0) -> Iterator[str]:
    """`isobatch serve FILE`, until the block ends; yields its address. Port 0: no gRPC."""
    port = free_port()
    command = [*COMMAND, "serve", str(serve_file), "--port", str(port)]
    command += ["--grpc-port", str(grpc_port)]
    with running(command, "ready at"):
        yield f"http://127.0.0.1:{port}/predict"


@contextmanager
def demo(
    settings: Mapping[str, object], steering: Mapping[str, object] | None = None, grpc_port: int = 0
) -> Iterator[str]:
    """The demo as it is shipped, with further settings; yields its address.

    `steering`: the settings of a controller beside it, whose memory begins empty; None: no controller.
    """
    files = {name: str(ROOT / f"cluster/demo/{name}.json") for name in ("plan", "profile")}
    args = {"cpus_per_replica": 0, "replan": steering is not None, **files, **settings}
    with TemporaryDirectory() as folder:
        applications: list[dict[str, object]] = [
            {"name": "isobatch", "import_path": "isobatch.deployments.app:build", "route_prefix": "/", "args": args}
        ]
        if steering is not None:
            applications.append(
                {
                    "name": "controller",
                    "import_path": "isobatch.cluster.controller.app:build",
                    "route_prefix": "/controller",
                    "args": {"memory": folder, **steering},
                }
            )
        file = Path(folder) / "serve.yaml"
        file.write_text(json.dumps({"applications": applications}))  # JSON is YAML
        with isobatch(file, grpc_port) as url:
            yield url.removesuffix("/predict")


@contextmanager
def served(chosen: Plan, facts: Profile, slo_ms: float, **settings: object) -> Iterator[str]:
    """Serve this plan on virtual devices, with further settings of the configuration."""
    with (
        TemporaryDirectory() as folder,
        isobatch(serve_file(Path(folder), chosen, facts, slo_ms, **settings)) as url,
    ):
        yield url


@contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[None]:
    """Run the program until the block ends, then end it and all processes that it started."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    mark = uuid4().hex
    ours = {"RAY_worker_niceness": SETTINGS["RAY_worker_niceness"], MARK: mark}
    with TemporaryFile("a+") as log:  # the program appends to it while it is read here
        process = subprocess.Popen(
            command, env=inherited | ours, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            _await(process, log, ready)
            yield
        finally:
            _end(process, mark)


def _await(process: subprocess.Popen[str], log: IO[str], ready: str) -> None:
    """Wait until the program is ready; if it never is, raise an error with the end of its log."""
    until_s = time.monotonic() + PATIENCE_S
    while ready not in _text_of(log):
        if (ended := process.poll() is not None) or time.monotonic() > until_s:
            why = f"ended with {process.returncode}" if ended else f"was not ready within {PATIENCE_S:g} s"
            raise RuntimeError(f"{process.args!r} {why}; its last output:\n{_text_of(log)[-SHOWN:] or '(nothing)'}")
        time.sleep(0.1)


def _text_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """End the program, then kill the processes with its mark that it has not ended itself."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for each in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> Iterator[int]:
    """Processes with this mark, on Linux: the program started them, perhaps as other sessions."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)
