"""Clients with right and wrong requests, which check each answer before the next request."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import grpc

from experiments.replan.suite import BLOCKS
from experiments.shared.live import NAME
from isobatch.cluster.load.generator import BROKEN, HttpConnection
from isobatch.deployments.front.open_inference.messages import SERVICE, message

AGAIN_S = 10.0  # for which a client repeats a request without an answer
PAUSE_S = 0.1  # before a repetition, and after a refusal
DEADLINE_MS = 2000.0
MANY = 16  # inputs of one request, at most
EASY, HARD = (0, 1), (BLOCKS - 1,)  # the blocks after which inputs are sure

OUTCOMES = (
    "answered",
    "refused_as_wrong",  # a wrong request was refused as expected
    "refused",  # before it was admitted
    "expired",  # admitted, then answered with 504
    "failed",  # another 5xx
    "wrong",  # an unexpected answer
    "lost",  # no answer, also after repetitions
)


@dataclass(frozen=True)
class SoakRequest:
    """A request and its expected answer."""

    kind: str
    what: bytes  # an HTTP request, or a gRPC message
    expected: int = 200
    right: Callable[[Any], bool] = lambda answer: True

    def outcome(self, status: int, answer: Any) -> str:
        if status == self.expected and self.right(answer):
            return "answered" if status == 200 else "refused_as_wrong"
        named = {503: "refused", 504: "expired", 500: "failed", BROKEN: "lost"}
        return named.get(status, "wrong")


class Traffic:
    """The clients of one server; `hard_share()` is the share of hard inputs.

    Together they send at most `most_per_s`, which leaves the machine time for other programs.
    """

    def __init__(
        self, http: tuple[str, int], grpc_port: int, hard_share: Callable[[], float], most_per_s: float = inf
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.resent = 0
        self.surprises: list[str] = []  # the first wrong, failed and lost requests
        self._place, self._hard_share = http, hard_share
        self._grpc, self._most_per_s = f"{http[0]}:{grpc_port}", most_per_s
        self._going = True

    @property
    def requests(self) -> int:
        return self.outcomes.total()

    def stop(self) -> None:
        self._going = False

    async def run(self, clients: int) -> None:
        """Run the clients until `stop`, and until each has its last answer."""
        every_s = clients / self._most_per_s
        await asyncio.gather(*(self._client(random.Random(number), every_s) for number in range(clients)))

    async def _client(self, chance: random.Random, every_s: float) -> None:
        http, loop = _Http(self._place), asyncio.get_running_loop()
        # Each client has its own connection, since gRPC would share one connection, and so one front.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._grpc, options) as channel:
            while self._going:
                again_s = loop.time() + every_s * 2 * chance.random()
                drawn = self._next(chance)
                ask = partial(_call, channel) if drawn.kind.startswith("grpc") else http.ask
                status, answer = await self._until_answered(ask, drawn.what)
                outcome = drawn.outcome(status, answer)
                self.outcomes[outcome] += 1
                if outcome in ("wrong", "failed", "lost") and len(self.surprises) < 20:
                    self.surprises.append(f"{outcome}, {drawn.kind}: {status} {answer!r:.200}")
                pause_s = max(again_s - loop.time(), PAUSE_S if outcome == "refused" else 0.0)
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
        http.close()

    async def _until_answered(self, ask: Callable[[bytes], Any], what: bytes) -> tuple[int, Any]:
        """Repeat the request if its connection breaks, as HTTP clients do, since a dead process cannot answer."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + AGAIN_S
        while True:
            status, answer = await ask(what)
            if status not in (BROKEN, 502) or loop.time() > until_s:
                return status, answer
            self.resent += 1
            await asyncio.sleep(PAUSE_S)

    def _next(self, chance: random.Random) -> SoakRequest:
        kinds = (self._one, self._many, self._v2, self._grpc_infer, _wrong, _grpc_wrong)
        (make,) = chance.choices(kinds, (5, 2, 2, 2, 1, 1))
        return make(chance)

    def _one(self, chance: random.Random) -> SoakRequest:
        return _predict("one", [self._depth(chance)])

    def _many(self, chance: random.Random) -> SoakRequest:
        return _predict("many", [self._depth(chance) for _ in range(chance.randint(2, MANY))])

    def _depth(self, chance: random.Random) -> int:
        return chance.choice(HARD if chance.random() < self._hard_share() else EASY)

    def _v2(self, chance: random.Random) -> SoakRequest:
        count = chance.randint(1, MANY)
        tensor = {"name": "inputs", "shape": [count, 1], "datatype": "INT64", "data": [0] * count}
        body = {"inputs": [tensor], "outputs": [{"name": "exit_block"}]}

        def right(answer: bytes) -> bool:
            (output,) = json.loads(answer)["outputs"]
            return output["shape"] == [count] and all(0 <= block < BLOCKS for block in output["data"])

        return SoakRequest("v2", _http(f"/v2/models/{NAME}/infer", body), right=right)

    def _grpc_infer(self, chance: random.Random) -> SoakRequest:
        count = chance.randint(1, MANY)

        def right(answer: bytes) -> bool:
            reply = message("ModelInferResponse").FromString(answer)
            return list(reply.outputs[0].shape) == [count] and len(reply.raw_output_contents[0]) == 8 * count

        return SoakRequest("grpc", _infer(NAME, count), right=right)


def _predict(kind: str, depths: list[int]) -> SoakRequest:
    def right(answer: bytes) -> bool:
        result = [output["exit_block"] for output in json.loads(answer)["outputs"]]
        return len(result) == len(depths) and all(block >= depth for block, depth in zip(result, depths, strict=True))

    return SoakRequest(kind, _http("/predict", {"inputs": [{"exit_block": depth} for depth in depths]}), right=right)


def _wrong(chance: random.Random) -> SoakRequest:
    expected, path, body = chance.choice(
        [
            (422, "/predict", {"inputs": [{"exit_block": 99}]}),
            (422, "/predict", {"inputs": [{"exit_block": 0}] * 300}),
            (400, "/predict", {"input": 1}),
            (400, f"/v2/models/{NAME}/infer", {"inputs": 5}),
            (404, "/v2/models/other/infer", {"inputs": []}),
            (404, "/nowhere", {}),
        ]
    )
    return SoakRequest("wrong", _http(path, body), expected, lambda answer: list(json.loads(answer)) == ["error"])


def _grpc_wrong(chance: random.Random) -> SoakRequest:
    if chance.random() < 0.5:
        return SoakRequest("grpc wrong", _infer("other", 1), 404)
    return SoakRequest("grpc wrong", b"\xff\x01\x02", 400)


def _http(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Deadline-Ms: {DEADLINE_MS:g}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _infer(model: str, count: int) -> bytes:
    tensor = {"name": "inputs", "datatype": "INT64", "shape": (count, 1), "contents": {"int64_contents": [0] * count}}
    request = message("ModelInferRequest")(model_name=model, inputs=[tensor], outputs=[{"name": "exit_block"}])
    sent: bytes = request.SerializeToString()
    return sent


class _Http:
    """One connection, which is opened again after it broke."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self._connection: HttpConnection | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.transport is None:
            try:
                _, self._connection = await loop.create_connection(HttpConnection, *self._place)
            except OSError:
                return BROKEN, b""
        answered: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._connection.ask(request, lambda status, body: answered.set_result((status, body)))
        return await answered

    def close(self) -> None:
        if self._connection and self._connection.transport:
            self._connection.transport.close()


_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.INTERNAL: 500,
}


async def _call(channel: grpc.aio.Channel, sent: bytes) -> tuple[int, bytes]:
    """Call over gRPC, with HTTP's status. A refusal is UNAVAILABLE like a broken connection, but has our reason."""
    try:
        return 200, await channel.unary_unary(f"/{SERVICE}/ModelInfer")(sent, timeout=DEADLINE_MS / 1e3)
    except grpc.aio.AioRpcError as error:
        reply_text = error.details() or ""
        refused = error.code() == grpc.StatusCode.UNAVAILABLE and reply_text.startswith("refused")
        return 503 if refused else _STATUSES.get(error.code(), BROKEN), reply_text.encode()
