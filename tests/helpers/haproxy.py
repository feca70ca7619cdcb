"""HAProxy as our script starts it, before fronts of a test."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.shared.machine import free_port
from isobatch.cluster.serving import haproxy as haproxy_module
from isobatch.cluster.serving.haproxy import ready, write_script
from isobatch.cluster.serving.ports import is_free
from isobatch.deployments.deployer.steps import FRONT
from isobatch.deployments.front.proxy import QUESTIONS_MS, QUEUED, QUEUED_MS, REQUEST_S

CONFIGURATION = """global
    log 127.0.0.1:{log} local0 info
    stats socket {folder}/node/admin.sock level admin
    maxconn {connections}
defaults
    mode http
    log global
    option httplog
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    errorfile 503 /nowhere/500.http
    balance first
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 503 content-type text/plain string "Service Unavailable" if {{ path /-/healthz }}
    # for static use_backend selection below
    acl is_app path_beg {prefix}
{uses}
    default_backend default_backend
backend app
    http-reuse always
{servers}
    server fallback 127.0.0.1:{fallback} check backup
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found."
"""
CHECKS = "    option httpchk GET /healthz\n    default-server fastinter 250ms downinter 250ms fall 1 rise 1 inter 500ms"


@contextmanager
def haproxy(
    folder: Path, uses: str = "    use_backend app if is_app", within_s: float | None = None,
    front: int | None = None, queued_ms: int = QUEUED_MS, queued: int = QUEUED, starts: bool = False,
    questions_ms: int = QUESTIONS_MS,
    fronts: Sequence[int] = (), prefix: str = "/app/", connections: int = haproxy_module.MAX_CONNECTIONS,
    log: int = 514, far: Sequence[str] = (), deployment: str = FRONT,
) -> Iterator[int]:  # fmt: skip
    """HAProxy itself, with a configuration like Ray's; how long it waits, and where many wait, can be told.

    `fronts`: the ports of several fronts of `deployment`, whose health is checked. `log`: the port to which logs go.
    `far`: the addresses of further fronts, at the port of the first, which are listed before it.
    """
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        waits = {"QUEUED_MS": queued_ms, "QUESTIONS_MS": questions_ms, "REQUEST_S": within_s or REQUEST_S}
        for name, value in {**waits, "QUEUED": queued}.items():
            patch.setattr(haproxy_module, name, value)
        script = write_script(folder, (), connections)
    if not starts:
        ready(folder)
    front = front or free_port()
    lines = [f"    server app-{deployment}-{each} 127.0.0.1:{each} check" for each in fronts]
    distant = [f"    server far-{number} {address}:{front}" for number, address in enumerate(far)]
    servers = "\n".join([CHECKS, *distant, *lines] if fronts else [*distant, f"    server front 127.0.0.1:{front}"])
    config = folder / "node" / "haproxy.cfg"  # as Ray has it: a folder for each node
    config.parent.mkdir(exist_ok=True)
    places = {"port": port, "log": log, "servers": servers, "fallback": free_port() if fronts else front}
    config.write_text(CONFIGURATION.format(**places, uses=uses, folder=folder, prefix=prefix, connections=connections))
    subprocess.run([script, "-c", "-f", config], check=True, capture_output=True)  # as Ray does, before it starts it
    with subprocess.Popen([script, "-db", "-f", config], stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 60
            while is_free("127.0.0.1", port) or not (folder / "node" / "admin.sock").exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            yield port
        finally:
            process.kill()
