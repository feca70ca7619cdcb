"""A front's gRPC behind a HAProxy of its own, and what a client says to it, byte by byte where it must."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.open_inference.messages import SERVICE, message
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.proxy import Burden
from isobatch.deployments.front.service import Service
from isobatch.deployments.ray_settings import haproxy_program

INFER, LIVE, STATISTICS, STREAM = (
    f"/{SERVICE}/{method}" for method in ("ModelInfer", "ServerLive", "ModelStatistics", "ModelStreamInfer")
)
REQUEST = message("ModelInferRequest")(
    model_name="toy",
    inputs=[{"name": "inputs", "datatype": "INT64", "shape": (1, 2), "contents": {"int64_contents": [4, 7]}}],
).SerializeToString()


def calm() -> Burden:
    return Burden(0, 0, 0)


@contextmanager
def proxy(
    port: int, burden: Callable[[], Burden] = calm, slo_ms: float | None = None, front: socket.socket | None = None
) -> Iterator[GrpcProxy]:
    """HAProxy before a front that listens on this socket, and answers nothing yet; None: without a front."""
    program = haproxy_program()
    assert program
    it = GrpcProxy(program, "127.0.0.1", port, 1.0, burden, slo_ms)
    if front:
        front.bind(str(it.socket))
        front.listen()
    try:
        it.open()
        yield it
    finally:
        it.drain()
        it.close()


def toy(port: int) -> Service:
    config = {"model": "/models/toy", "loader": "tests.helpers.toy_model:load", "slo_ms": 20_000, "drain_s": 5}
    return Service(AppConfig(grpc_port=port, **config), time.perf_counter)


@asynccontextmanager
async def front_at(port: int) -> AsyncIterator[tuple[grpc.aio.Channel, Service]]:
    """A front of the toy behind its HAProxy, and a channel to it."""
    service = toy(port)
    await service.open()
    async with serving(service), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
        yield channel, service
    await service.close()


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def everything(stream: Any) -> list[Any]:
    return [reply async for reply in stream]


def frame(kind: int, flags: int, content: bytes, stream: int = 1) -> bytes:
    """Of HTTP/2."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def literal(name: str, value: str) -> bytes:
    """A header as HPACK writes it in full."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def headers(path: str, method: str = "POST") -> bytes:
    fields = {":method": method, ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(literal(*each) for each in fields.items())
