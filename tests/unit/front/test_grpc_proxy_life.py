"""The start, the restart and the end of the HAProxy before a front's gRPC server, and its limit."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc

from isobatch.deployments.front import grpc_proxy
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.proxy import MOST, Burden, haproxy_reply
from tests.helpers.asking import until
from tests.helpers.grpc_proxy import INFER, LIVE, REQUEST, proxy, refusal, toy


async def test_admitted_calls_are_answered_when_the_server_ends(held: threading.Event, free_port: int) -> None:
    service = toy(free_port)
    await service.open()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        async with serving(service):
            call = channel.unary_unary(INFER)(REQUEST)
            await until(lambda: service.burden().inside)
            threading.Timer(0.3, held.set).start()
        assert await call
    await service.close()


async def test_haproxy_gets_the_limit_repeatedly(free_port: int) -> None:
    """One that was started again, because it was killed, knows nothing of what the one before it was told."""
    refused = iter(range(0, 10_000_000, 100))
    with proxy(free_port, lambda: Burden(10, next(refused), 0)) as it:
        await until(lambda: places(it) < MOST)
        assert it._process
        first = it._process
        first.kill()
        await until(lambda: it._process is not first and it._listens())
        await until(lambda: places(it) < MOST)
        assert "is started again" not in str(it._error_text())


def places(it: GrpcProxy) -> int:
    """As many inferences as the front may have at once."""
    head, *rows = (line.split(",") for line in haproxy_reply(it._admin, "show stat").splitlines() if line)
    (row,) = (row for row in rows if row[:2] == grpc_proxy._SERVERS[0].split("/"))
    return int(row[head.index("slim")])


async def test_calls_without_a_front_are_refused_with_a_sentence(free_port: int) -> None:
    with proxy(free_port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            for method in (INFER, LIVE):
                refused = await refusal(channel.unary_unary(method)(REQUEST))
                assert (refused.code().name, refused.details()) == ("UNAVAILABLE", grpc_proxy._GONE)


def test_the_port_is_free_at_once_and_shared_meanwhile(free_port: int) -> None:
    with proxy(free_port), proxy(free_port) as second:
        folder = second._folder
    assert not folder.exists()
    with proxy(free_port):
        pass


FRONT = """
import sys, time
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.proxy import Burden
from isobatch.deployments.ray_settings import haproxy_program
it = GrpcProxy(haproxy_program(), "127.0.0.1", int(sys.argv[1]), 1.0, lambda: Burden(0, 0, 0))
it.open()
print(it._process.pid, flush=True)
time.sleep(60)
"""


async def test_it_does_not_outlive_a_front_that_is_killed(free_port: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FRONT, str(free_port)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout
        child = int(front.stdout.readline())
        assert lives(child)
        front.send_signal(signal.SIGKILL)
    await until(lambda: not lives(child))


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
