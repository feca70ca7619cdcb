"""Servers to be measured: each is a program of its own, started before and ended after."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from cluster.local import SETTINGS, free_port
from experiments.serve.fleet import serve_file
from experiments.serve.ray_default import READY
from optimizer.plan import Plan
from profiles.files import Profile

PATIENCE_S = 180.0


@contextmanager
def isobatch(serve_file: Path) -> Iterator[str]:
    """`isobatch serve FILE`, until the block ends; yields its address."""
    port = free_port(0)
    command = [sys.executable, "-m", "cluster.cli", "serve", str(serve_file), "--port", str(port), "--grpc-port", "0"]
    with _running(command, "ready at"):
        yield f"http://127.0.0.1:{port}/predict"


@contextmanager
def served(chosen: Plan, facts: Profile, slo_ms: float, **told: object) -> Iterator[str]:
    """The same with this plan on virtual devices, and what else the configuration is told."""
    with TemporaryDirectory() as folder, isobatch(serve_file(Path(folder), chosen, facts, slo_ms, **told)) as url:
        yield url


@contextmanager
def ray_default() -> Iterator[str]:
    """Plain Ray Serve with `@serve.batch`, with none of our settings but the fair share of the processor."""
    port = free_port(0)
    with _running([sys.executable, "-m", "experiments.serve.ray_default", str(port)], READY):
        yield f"http://127.0.0.1:{port}/predict"


def litserve_python() -> str | None:
    """The Python that has LitServe, which is no dependency of ours."""
    return os.environ.get("ISOBATCH_LITSERVE")


@contextmanager
def litserve(python: str) -> Iterator[str]:
    port = free_port(0)
    stage = Path(__file__).with_name("litserve_stage.py")
    with _running([python, str(stage), str(port)], READY):
        yield f"http://127.0.0.1:{port}/predict"


@contextmanager
def _running(command: Sequence[str], ready: str) -> Iterator[None]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    environment["RAY_worker_niceness"] = SETTINGS["RAY_worker_niceness"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        killer = threading.Timer(PATIENCE_S, process.kill)
        killer.start()
        assert process.stdout
        said = _until(ready, process.stdout)
        killer.cancel()
        # Whatever it says later must not fill the pipe.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        if ready not in said:
            raise RuntimeError(f"{' '.join(command)} did not start: {said}")
        try:
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what outlives it


def _until(ready: str, lines: IO[str]) -> str:
    said = ""
    for line in lines:
        said += line
        if ready in line:
            break
    return said
