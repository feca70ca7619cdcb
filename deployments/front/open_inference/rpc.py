"""The protocol's gRPC methods for inference on a network that classifies."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from math import ceil
from typing import Any

from numpy.typing import NDArray

from isobatch.deployments.front import grpc_server
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_DIMENSIONS, MOST_NAMED, validated
from isobatch.deployments.front.calls import Call
from isobatch.deployments.front.headers import CLIENT
from isobatch.deployments.front.incoming import Content
from isobatch.deployments.front.open_inference import protocol
from isobatch.deployments.front.open_inference.messages import message
from isobatch.deployments.front.open_inference.schemas import InputTensor
from isobatch.deployments.front.open_inference.tensors import MOST_TEXTS, from_bytes, from_contents, rows, timeout_s
from isobatch.deployments.front.service import Service

MOST_RUNNING = 64  # requests of one stream that run at once
PUSH_BACK_S = 0.05  # a refused request keeps its place for this time, since refusing is work, too
LOAD = 0.8  # the share of the SLO that requests take at full load, as in plans
# The same while many requests are refused.
LOAD_WHILE_REFUSING = 0.4
MANY_REFUSED = 0.05  # refused requests count as many above this share of the answered ones
LEAST_PACED = 8  # the least number of places, however few requests were answered recently


def serving(service: Service) -> AbstractAsyncContextManager[None]:
    """Serve this network over gRPC during the context."""
    slo_ms = service.config.slo_ms
    return grpc_server.serve(service, lambda most_of_streams: _Inferences(service, most_of_streams).methods(), slo_ms)


class _Inferences:
    """The methods of one service. `most_of_streams`: the most requests of streams that run at once."""

    def __init__(self, service: Service, most_of_streams: Callable[[], int]) -> None:
        self._service, self._model = service, protocol.model_of(service)
        # Each text is a field, and an input has at most two; other fields are few.
        self._most_fields = MOST_TEXTS * service.config.most_inputs + 8 * MOST_NAMED
        self._places = Places(most_of_streams, service.config.slo_ms / 1e3, time.monotonic)
        self._whole, self._streamed = message("ModelInferResponse"), message("ModelStreamInferResponse")

    def methods(self) -> grpc_server.Methods:
        return {
            **grpc_server.question_methods(
                self._service, self._model, self._most_fields, ModelStatistics=self._statistics
            ),
            "ModelInfer": self._infer,
            "ModelStreamInfer": self._stream,
        }

    async def _statistics(self, request: Any) -> grpc_server.Fields:
        """A request without a name asks for all models; there is only one."""
        protocol.check(self._model, request.name or self._model.name, request.version)
        return await protocol.statistics(self._service)

    async def _infer(self, call: Call) -> bytes:
        with self._service.counted("grpc", call.headers):
            began_s = time.monotonic()
            sent = await call.request()
            body_s = time.monotonic() - began_s
            incoming = self._service.register("grpc", len(sent), call.headers, call.left_s, body_s=body_s)
            answer = await self._service.answer(incoming, lambda: self._content(self._read(sent)))
            return grpc_server.serialized(answer)

    async def _stream(self, call: Call) -> None:
        """Requests of one stream run together; replies keep their order."""
        client = call.headers[CLIENT]  # its address, as HAProxy says
        begun: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(MOST_RUNNING)

        async def begin() -> None:
            try:
                while (sent := await call.message()) is not None:
                    await self._places.take(client)
                    task = asyncio.create_task(self._answer_in_stream(sent, call))
                    task.add_done_callback(lambda done: self._places.leave(client, _is_answer(done)))
                    try:
                        await begun.put(task)
                    except asyncio.CancelledError:  # the client has gone while the queue was full
                        task.cancel()
                        raise
            finally:
                await begun.put(None)

        reading = asyncio.create_task(begin())
        try:
            while reply := await begun.get():
                await call.send(grpc_server.serialized(await reply))
            await reading
        finally:  # if the client has gone, the other replies are not needed
            reading.cancel()
            while not begun.empty():
                if reply := begun.get_nowait():
                    reply.cancel()

    async def _answer_in_stream(self, sent: bytes, call: Call) -> Any:
        """The reply to one request of a stream. A refusal is a reply, too, and the stream continues."""
        request_id = ""
        try:
            with self._service.counted("grpc", call.headers):
                incoming = self._service.register("grpc", len(sent), call.headers, call.left_s)
                request = self._read(sent)
                request_id = request.id[:LONGEST_NAME]
                answer = await self._service.answer(incoming, lambda: self._content(request))
                return self._streamed(infer_response=answer)
        except RefusedError as refused:
            if refused.status in (503, 504):
                await asyncio.sleep(PUSH_BACK_S)
            return self._streamed(error_message=refused.sentence, infer_response={"id": request_id})

    def _read(self, sent: bytes) -> Any:
        return grpc_server.read_message("ModelInferRequest", sent, self._most_fields)

    def _content(self, request: Any) -> Content[Any]:
        service, model = self._service, self._model
        grpc_server.check_infer(model, request)
        names, best = grpc_server.outputs_of(model, request), grpc_server.best_of(request)

        def written(answers: list[Answer]) -> Any:
            tensors = protocol.columns(service, answers, names, best)
            return self._whole(**grpc_server.infer_fields(model, request, tensors))

        timeout_us = grpc_server.integer_in(request.parameters, "timeout", "in microseconds")
        values = self._values(request)
        protocol.check_scores(service, names, len(values))
        return Content(service.encoded_each(values), written, timeout_s(timeout_us))

    def _values(self, request: Any) -> Any:
        if len(request.inputs) != 1 or len(request.raw_input_contents) > 1:
            raise RefusedError(400, "'inputs' must be one tensor, whose first dimension is the number of inputs")
        (sent,), raw = request.inputs, request.raw_input_contents
        shape = list(sent.shape[: MOST_DIMENSIONS + 1])
        tensor = validated(InputTensor, {"name": sent.name, "datatype": sent.datatype, "shape": shape})
        texts = not self._service.reads_pictures

        def load(kind: str, count: int) -> NDArray[Any]:
            return from_bytes(raw[0], kind, count, texts) if raw else from_contents(sent.contents, kind, count, texts)

        return rows(tensor, self._service.sizes, load)


def _is_answer(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and not done.exception() and not done.result().error_message


class Places:
    """The number of requests of all streams together that run at once. Further requests are not read from the network.

    gRPC's flow control keeps those at the client. There are as many places as requests were recently answered in most
    of `slo_s`, so a request takes about that time. There are fewer places while requests are refused, and at most
    `limit`. Each stream waits for one place. The next place goes to the client with the fewest places, however many
    streams it has; of several such clients, or streams of one client, to the one that has waited longest.
    """

    def __init__(self, limit: Callable[[], int], slo_s: float, clock: Callable[[], float]) -> None:
        self._limit, self._slo_s, self._clock = limit, slo_s, clock
        self._paced = LEAST_PACED
        self._begin_window()
        self._taken = Counter[bytes]()  # by client
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}  # by client; the one served last is last

    @property
    def most(self) -> int:
        return min(self._paced, self._limit())

    async def take(self, client: bytes) -> None:
        if not self._taken:  # time without any request says nothing about how many are answered
            self._begin_window()
        if not self._waiting and self._taken.total() < self.most:
            self._taken[client] += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given in this turn of the event loop
                self.leave(client, answered=False)
            raise

    def leave(self, client: bytes, answered: bool) -> None:
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._answered += answered
        self._refused += not answered
        if (took_s := self._clock() - self._began_s) >= self._slo_s:
            self._pace(took_s)
        while self._waiting and self._taken.total() < self.most:
            self._give()

    def _pace(self, took_s: float) -> None:
        if self._waiting:  # otherwise more requests might have been answered
            share = LOAD_WHILE_REFUSING if self._refused > MANY_REFUSED * self._answered else LOAD
            self._paced = max(LEAST_PACED, ceil(share * self._answered * self._slo_s / took_s))
        self._begin_window()

    def _begin_window(self) -> None:
        self._began_s, self._answered, self._refused = self._clock(), 0, 0  # the window, and its requests

    def _give(self) -> None:
        client = min(self._waiting, key=lambda waiting: self._taken[waiting])
        streams = self._waiting.pop(client)
        longest = streams.popleft()
        if streams:
            self._waiting[client] = streams
        if not longest.done():  # its stream has not ended
            self._taken[client] += 1
            longest.set_result(None)
