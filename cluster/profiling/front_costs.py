"""Times what a decoder's front does for each token, with tokens that come at once: what its processor sustains."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from isobatch.deployments.decoding.anatomy import DecoderShape
from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import load_tokenizer
from isobatch.deployments.decoding.front import DecoderFront
from isobatch.deployments.decoding.openai_api import create_decoder_api
from isobatch.deployments.decoding.scheduler import NewTokens
from isobatch.deployments.decoding.sequences import Finish, TextRequest
from isobatch.deployments.decoding.texts import TextTokens

TEXTS, TOKENS = 32, 64  # streamed side by side, and tokens of each
PATH = "/v1/completions"


class _NoSeries:
    """Takes metrics, and exports none."""

    def more(self, name: str, more: float, **labels: str) -> None: ...

    def value(self, name: str, value: float) -> None: ...


def front_s_per_token(folder: Path, shape: DecoderShape) -> float:
    """Seconds of a front's processor for a token of a stream, from its arrival to the bytes for the client. The socket
    and the proxy before it are not counted."""
    most = shape.room(1, shape.context(None))
    return asyncio.run(_measured_s(folder, shape, min(TOKENS, most)))


async def _measured_s(folder: Path, shape: DecoderShape, tokens: int) -> float:
    async def write(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        for place in range(request.max_tokens):
            await asyncio.sleep(0)
            finish = Finish.LENGTH if place + 1 == request.max_tokens else None
            yield NewTokens(0, ((7 + 31 * place) % shape.vocabulary,), (0,), finish)

    async def state() -> dict[str, Any]:
        return {}

    series: Any = _NoSeries()
    texts = TextTokens(load_tokenizer(folder), shape.context(None))
    meter = ClientMeter(series, time.perf_counter, 1.0, 1.0)
    front = DecoderFront(DecoderConfig(model=str(folder)), "timed", shape, texts, frozenset(), write, meter, state)
    api = create_decoder_api(front)
    body = json.dumps({"prompt": [0], "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    took_s = []
    for _ in range(3):  # the first one warms up
        begun_s = time.thread_time()
        await asyncio.gather(*(_stream(api, body) for _ in range(TEXTS)))
        took_s.append(time.thread_time() - begun_s)
    return min(took_s) / (TEXTS * tokens)


async def _stream(api: Any, body: bytes) -> None:
    """Have one text streamed, as the server before the application does."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": PATH,
        "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if message := next(messages, None):
            return message
        await asyncio.Event().wait()  # the client listens until the end
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("status", 200) != 200:
            raise RuntimeError(f"the front answered {message['status']}")

    await api(scope, receive, send)
