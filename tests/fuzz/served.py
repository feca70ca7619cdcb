"""What is attacked: everything that listens, on a loop of its own, beside a client that means well."""

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from deployments.config import AppConfig
from deployments.front.http import create_api
from deployments.front.open_inference.messages import SERVICE, message
from deployments.front.service import Service
from deployments.transport.exchange import Exchange
from deployments.transport.holdings import Holdings
from deployments.transport.replica_connection import OrderServer
from profiles.errors import UserError
from profiles.model import Batch
from tests.helpers.toy_model import Toy

HOST = "127.0.0.1"
EVERY_S = 0.02
MOST_BYTES = 2**20
Reply = tuple[int, dict[bytes, bytes], bytes]


def rss_mib() -> float:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def free_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        return int(taken.getsockname()[1])


class Unbreakable(Toy):
    """A label that there is not is wrong with the input: nothing that is sent makes the network fail."""

    def encode(self, inputs: Sequence[Any]) -> Batch:
        batch = super().encode(inputs)
        labels = batch.arrays["label"]
        if labels.dtype.kind not in "iu" or ((labels < 0) | (labels >= self.num_labels)).any():
            raise UserError("a label is one of ten")
        return batch


def load(directory: str | Path, device: str, dtype: str) -> Toy:
    return Unbreakable()


class Served:
    """Ask it from any thread."""

    def __init__(self) -> None:
        self.honest = self.wrong = 0
        self.worst_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._live(),))
        self._thread.start()
        assert self._ready.wait(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def run(self, work: Awaitable[Any], within_s: float) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, within_s)

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result(10 * within_s)

    async def _live(self) -> None:
        port = free_port()
        config = AppConfig(
            model="/models/toy", loader="tests.fuzz.served:load", grpc_port=port, max_body_bytes=MOST_BYTES
        )
        service = Service(config, time.perf_counter)
        self.api = create_api(service)
        async with AsyncExitStack() as stack:
            server = uvicorn.Server(uvicorn.Config(self.api, HOST, 0, log_level="critical"))
            running = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            self.http_port = server.servers[0].sockets[0].getsockname()[1]
            self.channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{port}"))
            self.desk = OrderServer(self._run, lambda after_s: None)
            self.desk_port = int((await self.desk.open(HOST)).rpartition(":")[2])
            self.exchange, holdings = None, Holdings()
            self.exchange = Exchange(holdings)
            await self.exchange.open(HOST)
            self.exchange_port = int(holdings.address.rpartition(":")[2])
            client = asyncio.create_task(self._mean_well())
            self._ready.set()
            await self._end.wait()
            client.cancel()
            self.exchange.close()
            self.desk.close()
            server.should_exit = True
            await running

    async def _run(self, order: Any) -> Any:
        raise AssertionError("nobody has the key")
        yield

    async def _mean_well(self) -> None:
        body = b'{"inputs": [[4, 7], [0, 3]]}'
        while True:
            began_s = time.perf_counter()
            status, _, reply = await self.ask("POST", "/predict", {}, body)
            right = status == 200 and [each["label"] for each in json.loads(reply)["outputs"]] == [7, 3]
            self.honest, self.wrong = self.honest + 1, self.wrong + (not right)
            self.worst_s = max(self.worst_s, time.perf_counter() - began_s)
            await asyncio.sleep(EVERY_S)

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """Without a socket: as uvicorn would call it."""
        told = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
        scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "headers": told, "root_path": "", "scheme": "http", "server": (HOST, 80)}
        said: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        await self.api(scope, receive, send)
        content = b"".join(each.get("body", b"") for each in said[1:])
        return said[0]["status"], dict(said[0]["headers"]), content

    async def raw(self, port: int, sent: bytes) -> bytes:
        """Whatever comes back until the other end has nothing to say for a moment, or hangs up."""
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(sent)
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.05):
                    return await reader.read(2**20)
            return b""
        finally:
            writer.close()

    async def unary(self, method: str, sent: bytes) -> tuple[str, str]:
        """Status and details."""
        try:
            await self.channel.unary_unary(f"/{SERVICE}/{method}")(sent)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    async def stream(self, sent: list[bytes]) -> list[Any]:
        """One reply for each."""
        call = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", response_deserializer=message("ModelStreamInferResponse").FromString
        )
        return [reply async for reply in call(iter(sent))]


Attack = Callable[[Any], str]  # a case; what came of it
