"""What is attacked beyond this process: a real `isobatch serve`, HAProxy before its front and replicas behind it."""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from experiments.shared.machine import free_port
from isobatch.deployments.processes import bound_to_us, descendants
from tests.fuzz.attack import rss_mib
from tests.fuzz.clients import Honest, post
from tests.fuzz.served import MOST_BYTES
from tests.helpers.toy_graph import application, cut_at

ROOT = Path(__file__).parents[2]
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


@dataclass
class Live:
    process: int
    http_port: int
    grpc_port: int
    honest: Honest = field(default_factory=Honest)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Attack beside a client that means well."""

        async def beside() -> Any:
            means_well = partial(post, self.http_port, "/predict", {})
            client = asyncio.create_task(self.honest.ask_for_ever(means_well))
            try:
                return await work
            finally:
                client.cancel()
                with suppress(asyncio.CancelledError):
                    await client

        return asyncio.run(beside())

    def memory_mib(self) -> dict[int, float]:
        """Of the command and of each process below it."""
        result = {}
        for process in [self.process, *descendants(self.process)]:
            with suppress(OSError):
                result[process] = rss_mib(process)
        return result

    def replica_ports(self) -> list[tuple[str, int]]:
        """Whatever replicas listen on: their ports for orders and survivors, and Ray's own."""
        replicas = [each for each in descendants(self.process) if ":split" in command(each)]
        return sorted({port for replica in replicas for port in listening(replica)})


def command(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80].strip()


def listening(process: int) -> set[tuple[str, int]]:
    """The addresses of TCP, version 4, at which it listens."""
    sockets = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(handle.readlink()))
    lines = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    ours = [line for line in lines if line[3] == _LISTENS and f"socket:[{line[9]}]" in sockets]
    return {_address(line[1]) for line in ours}


def _address(told: str) -> tuple[str, int]:
    """0100007F:1F90 is 127.0.0.1, port 8000."""
    host, _, port = told.partition(":")
    return socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)


@contextmanager
def live_server(folder: Path) -> Iterator[Live]:
    """The toy network as a graph of two splits, on a Ray of its own; nothing is left of it."""
    port, grpc_port = free_port(), free_port()
    served = application(
        folder, cut_at(2), "tests.fuzz.served:load", model=str(folder), name="toy", max_body_bytes=MOST_BYTES
    )
    (folder / "serve.yaml").write_text(json.dumps({"applications": [served]}))  # JSON is YAML
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    environment |= bound_to_us(folder)
    line = [sys.executable, "-m", "isobatch.cluster.cli", "serve", str(folder / "serve.yaml")]
    with subprocess.Popen(
        [*line, "--port", str(port), "--grpc-port", str(grpc_port)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout
            assert "ready at" in process.stdout.readline()
            yield Live(process.pid, port, grpc_port)
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
