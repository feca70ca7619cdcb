"""A client of the Open Inference Protocol over gRPC, beside a service of the toy network or of another protocol."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import uvloop

from experiments.shared.machine import free_port
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.open_inference.messages import SERVICE, message
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.service import Service
from isobatch.deployments.named import LOADER


class Client:
    def __init__(self, channel: grpc.aio.Channel, service: Service) -> None:
        self._channel, self.service = channel, service

    async def ask(self, method: str, _timeout_s: float | None = None, _metadata: Any = (), **fields: Any) -> Any:
        request, response = message(f"{method}Request"), message(f"{method}Response")
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return await call(request(**fields), timeout=_timeout_s, metadata=_metadata)

    async def say(self, method: str, sent: bytes, compression: grpc.Compression | None = None) -> Any:
        """Whatever bytes."""
        return await self._channel.unary_unary(f"/{SERVICE}/{method}")(sent, compression=compression)

    async def stream(self, *requests: Any) -> list[Any]:
        """Messages, or whatever bytes."""
        return [reply async for reply in self.open_stream(iter(requests))]

    def open_stream(self, requests: Any = None) -> Any:
        return self._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=message("ModelStreamInferResponse").FromString,
        )(requests)


@asynccontextmanager
async def asked(**config: Any) -> AsyncIterator[Client]:
    """A client, beside a service of its own."""
    port = free_port()
    fields = {"model": "/models/toy", "loader": "tests.helpers.toy_model:load", "grpc_port": port} | config
    service = Service(AppConfig.model_validate(fields), time.perf_counter)
    await service.open()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with serving(service), channel, asyncio.timeout(60):
        yield Client(channel, service)
    await service.close()


def inferred(
    folder: Path, shape: list[int], values: list[bytes], **request: Any
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A network's output tensors for these texts or pictures, without and with their values, by name."""
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": shape, "contents": {"bytes_contents": values}}
    config = {"model": str(folder), "loader": LOADER, "name": "toy", "device": "cpu", "slo_ms": 60_000}

    async def ask() -> Any:
        async with asked(**config) as client:
            return await client.ask("ModelInfer", model_name="toy", inputs=[tensor], **request)

    reply = uvloop.run(ask())  # as Serve does
    names = [each.name for each in reply.outputs]
    outputs, raw = reply.outputs, reply.raw_output_contents
    return dict(zip(names, outputs, strict=True)), dict(zip(names, raw, strict=True))


SETTINGS = (
    b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x7f\xff\xff\xff\x00\x04\x00\x40\x00\x00\x00\x06\x00\x00\x20\x00"
)


@contextmanager
def grpc_port() -> Iterator[str]:
    """The URL of a server that begins as each of gRPC does, whatever it is asked."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(65_536)
                client.sendall(SETTINGS)

    Thread(target=answer, daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
