"""What is attacked in this process: everything that listens, on a loop of its own, beside a client that means well."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from experiments.shared.machine import free_port
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.service import Service
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings
from isobatch.deployments.transport.replica_connection import OrderServer
from isobatch.deployments.transport.wire import Wire
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch
from tests.fuzz.cases import Headers
from tests.fuzz.clients import HOST, Grpc, Honest, Reply, without_socket
from tests.helpers.toy_model import Toy

MOST_BYTES = 2**20


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
    """Ask it from any thread, with `run`."""

    def __init__(self) -> None:
        self.honest = Honest()
        self._loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._live(),))
        self._thread.start()
        assert self._ready.wait(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _live(self) -> None:
        port = free_port()
        fields = {"model": "/models/toy", "loader": "tests.fuzz.served:load", "slo_ms": 60_000}
        config = AppConfig.model_validate(fields | {"grpc_port": port, "max_body_bytes": MOST_BYTES})
        self.api = create_api(Service(config, time.perf_counter))
        async with AsyncExitStack() as stack:
            server = uvicorn.Server(uvicorn.Config(self.api, HOST, 0, log_level="critical"))
            running = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            self.http_port = server.servers[0].sockets[0].getsockname()[1]
            self.grpc = Grpc(await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{port}")))
            holdings = Holdings()
            self.orders = OrderServer(self._run, self._warm_up, lambda after_s: None, holdings)
            self.orders_port = int((await self.orders.open(Wire(HOST))).rpartition(":")[2])
            exchange = Exchange(holdings)
            await exchange.open(Wire(HOST))
            self.exchange_port = int(holdings.address.rpartition(":")[2])
            client = asyncio.create_task(self.honest.ask_for_ever(partial(self.ask, "/predict", {})))
            self._ready.set()
            await self._end.wait()
            client.cancel()
            exchange.close()
            self.orders.close()
            server.should_exit = True
            await running

    async def _run(self, order: Any) -> Any:
        raise AssertionError("nobody has the key")
        yield

    async def _warm_up(self, plan: str) -> None:
        raise AssertionError("nobody has the key")

    async def ask(self, path: str, headers: Headers, body: bytes) -> Reply:
        return await without_socket(self.api, path, headers, body)
