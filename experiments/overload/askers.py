"""Who asks: open loop over HTTP, by the project's load generator, or over gRPC; both leave the same record."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from cluster.load.connection import BROKEN
from cluster.load.generator import Floats, LoadGenerator, LoadRecord
from deployments.front.open_inference.messages import SERVICE, message

CONNECTIONS = 1024
CHANNELS = 4
PATIENCE_S = 5.0
_STATUS = {
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Asker(Protocol):
    async def at(self, due_s: Floats) -> LoadRecord:
        """Ask at each of these times."""
        ...


class HttpAsker:
    def __init__(self, url: str, inputs: Sequence[NDArray[Any]], slo_ms: float) -> None:
        bodies = [json.dumps({"inputs": [one.round(1).tolist() for one in each]}).encode() for each in inputs]
        self._url, self._bodies, self._headers = url, bodies, f"X-Deadline-Ms: {slo_ms:g}\r\n"

    async def at(self, due_s: Floats) -> LoadRecord:
        return await LoadGenerator(self._url, self._bodies, CONNECTIONS, self._headers).at(due_s, PATIENCE_S)


class GrpcAsker:
    """Every request has the SLO as its deadline, as gRPC tells it."""

    def __init__(self, target: str, model: str, inputs: Sequence[NDArray[Any]], slo_ms: float) -> None:
        self._target, self._timeout_s = target, slo_ms / 1e3
        request = message("ModelInferRequest")
        self._requests = [
            request(
                model_name=model,
                inputs=[{"name": "inputs", "datatype": "FP32", "shape": each.shape}],
                raw_input_contents=[each.astype("<f4").tobytes()],
            ).SerializeToString()
            for each in inputs
        ]

    async def at(self, due_s: Floats) -> LoadRecord:
        times = [np.full(len(due_s), np.nan) for _ in range(3)]
        self._reached_s, self._sent_s, self._ended_s = times
        self._status = np.full(len(due_s), BROKEN)
        async with AsyncExitStack() as stack:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.aio.insecure_channel(self._target, options) for _ in range(CHANNELS)]
            for channel in channels:
                await stack.enter_async_context(channel)
            calls = [each.unary_unary(f"/{SERVICE}/ModelInfer") for each in channels]
            await asyncio.gather(*(each.channel_ready() for each in channels))
            self._started_s = perf_counter()
            asked = set[asyncio.Task[None]]()
            for index, due in enumerate(due_s):
                if (wait_s := due - self._now_s()) > 0:
                    await asyncio.sleep(wait_s)
                elif not index % 16:
                    await asyncio.sleep(0)  # answers are read even where it cannot keep up
                task = asyncio.create_task(self._ask(calls[index % CHANNELS], index))
                asked.add(task)
                task.add_done_callback(asked.discard)
            if asked:
                await asyncio.wait(asked, timeout=PATIENCE_S)
        return LoadRecord(np.asarray(due_s), self._reached_s, self._sent_s, self._ended_s, self._status)

    def _now_s(self) -> float:
        return perf_counter() - self._started_s

    async def _ask(self, call: Any, index: int) -> None:
        self._reached_s[index] = self._sent_s[index] = self._now_s()
        status = 200
        try:
            await call(self._requests[index % len(self._requests)], timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            status = _STATUS.get(error.code(), 500)
        self._ended_s[index], self._status[index] = self._now_s(), status
