"""Claim: fetching survivors over our own connections costs less than over gRPC or ZeroMQ, encrypted and not.

Processor time of one process that is both ends, for each fetch: a question of some bytes there, arrays back. ZeroMQ is
left out where `pyzmq` is not installed; its encryption is CURVE, that of the others TLS with certificates on both ends.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from deployments.transport.exchange import Exchange
from deployments.transport.holdings import Holdings, Share
from deployments.transport.packed import pack
from deployments.transport.wire import Certificates, Wire, contexts
from profiles.model import Batch

HOST, ROWS, FETCHES, WARM = "127.0.0.1", 16, 300, 20
SIZES = {"4_kib": 2**12, "64_kib": 2**16, "1_mib": 2**20}
ASKED = b"x" * 200  # as long as a question of ours
MOST = [("grpc.max_receive_message_length", 1 << 26), ("grpc.max_send_message_length", 1 << 26)]
Fetch = Callable[[], Awaitable[Any]]
Way = Callable[[int, Certificates | None], Any]  # opens a way to fetch so many bytes


def measure() -> dict[str, float]:
    import uvloop  # the loop of Ray's replicas; grpc.aio has one of its own

    loops: dict[str, Any] = {
        "ours": uvloop.new_event_loop,
        "zmq": asyncio.new_event_loop,
        "grpc": asyncio.new_event_loop,
    }
    figures = {}
    with TemporaryDirectory() as folder:
        files = _certificates(Path(folder))
        for name, way in WAYS.items():
            for how, secured in (("plain", None), ("encrypted", files)):
                for size, length in SIZES.items():
                    with contextlib.suppress(ModuleNotFoundError), asyncio.Runner(loop_factory=loops[name]) as runner:
                        figures[f"{name}_{how}_{size}_ms"] = runner.run(_cost_ms(way, length, secured))
    return figures


async def _cost_ms(way: Way, length: int, files: Certificates | None) -> float:
    async with way(length, files) as fetch:
        for _ in range(WARM):
            await fetch()
        began_s = time.process_time()
        for _ in range(FETCHES):
            await fetch()
        return 1e3 * (time.process_time() - began_s) / FETCHES


@asynccontextmanager
async def _ours(length: int, files: Certificates | None) -> AsyncIterator[Fetch]:
    wire = Wire(HOST, (0,), *contexts(files)) if files else Wire(HOST)
    holdings = Holdings()
    here, there = Exchange(Holdings()), Exchange(holdings)
    await here.open(wire)
    await there.open(wire)
    hidden = np.zeros((ROWS, length // ROWS // 4), np.float32)
    held = holdings.hold(pack(Batch(2, {"hidden": hidden}, np.zeros((ROWS, 0), np.float32))), 600.0)
    yield lambda: here.gather([Share(held, np.arange(ROWS))])
    here.close()
    there.close()


@asynccontextmanager
async def _zmq(length: int, files: Certificates | None) -> AsyncIterator[Fetch]:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    holder, asker = context.socket(zmq.REP), context.socket(zmq.REQ)
    if files:
        public, holder.curve_secretkey = zmq.curve_keypair()
        holder.curve_publickey = asker.curve_serverkey = public
        holder.curve_server = True
        asker.curve_publickey, asker.curve_secretkey = zmq.curve_keypair()
    asker.connect(f"tcp://{HOST}:{holder.bind_to_random_port(f'tcp://{HOST}')}")
    content = np.zeros(length, np.uint8)

    async def answer() -> None:
        while True:
            await holder.recv()
            await holder.send(content, copy=False)

    async def fetch() -> Any:
        await asker.send(ASKED)
        return np.frombuffer((await asker.recv(copy=False)).buffer, np.uint8)

    answering = asyncio.create_task(answer())
    yield fetch
    answering.cancel()
    context.destroy(linger=0)


@asynccontextmanager
async def _grpc(length: int, files: Certificates | None) -> AsyncIterator[Fetch]:
    import grpc

    content = bytes(length)

    async def answer(_: bytes, __: Any) -> bytes:
        return content

    server = grpc.aio.server(options=MOST)
    methods = {"fetch": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("holder", methods),))
    if files:
        certificate, key, authority = (Path(each).read_bytes() for each in files)
        port = server.add_secure_port(f"{HOST}:0", grpc.ssl_server_credentials([(key, certificate)], authority, True))
        secured = grpc.ssl_channel_credentials(authority, key, certificate)
        channel = grpc.aio.secure_channel(f"{HOST}:{port}", secured, options=MOST)
    else:
        channel = grpc.aio.insecure_channel(f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}", options=MOST)
    await server.start()
    call = channel.unary_unary("/holder/fetch")

    async def fetch() -> Any:
        return np.frombuffer(await call(ASKED), np.uint8)

    yield fetch
    await channel.close()
    await server.stop(0)


WAYS: dict[str, Way] = {"ours": _ours, "zmq": _zmq, "grpc": _grpc}


def _certificates(folder: Path) -> Certificates:
    """A certificate that signs itself, for everybody, as Ray makes them for its own tests."""
    from ray._common.tls_utils import generate_self_signed_tls_certs

    certificate, key = generate_self_signed_tls_certs()
    (folder / "certificate.pem").write_text(certificate)
    (folder / "key.pem").write_text(key)
    return Certificates(*(str(folder / each) for each in ("certificate.pem", "key.pem", "certificate.pem")))
