"""How cases are sent over real sockets, and what may come of them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from isobatch.deployments.front.open_inference.messages import SERVICE, message
from tests.fuzz.attack import COUNTS, refused_share, within_s
from tests.fuzz.cases import PREDICT, Headers, as_json

HOST = "127.0.0.1"
ATTACKERS = ("127.0.0.2", "127.0.0.3")
Reply = tuple[int, dict[bytes, bytes], bytes]  # status, headers in small letters, body

STATUSES = {200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 503, 504}
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
ENDED = 0  # instead of a status: the connection was reset, so that whatever had been said is lost
EVERY_S = 0.02  # between requests of a client that means well
SILENT_S = 0.05  # whoever has said nothing for so long has nothing to say


def judged(reply: Reply) -> str:
    """The status; no answer is a 5xx but 503 and 504, and every refusal is one sentence in JSON.

    Only HAProxy's own page is not, which it sends where headers are not HTTP: no front has such a page.
    """
    status, headers, content = reply
    if status == ENDED:
        return "ended"
    assert status in STATUSES, (status, content[:500])
    if status != 200:
        assert len(content) <= 1024, content[:2000]
        if status == 400 and content.startswith(b"<html>"):
            return "400 of HAProxy"
        assert list(json.loads(content)) == ["error"]
    elif b"inference-header-content-length" not in headers:
        json.loads(content, parse_constant=pytest.fail)
    return str(status)


def judged_raw(came: bytes) -> str:
    status = came.split(b" ", 2)[1].decode() if came.startswith(b"HTTP/") else "nothing"
    assert status == "nothing" or int(status) < 500 or int(status) in (503, 504), came[:500]
    return status


def attacker(sent: bytes) -> str:
    """The address from which this is sent: the same each time."""
    return ATTACKERS[len(sent) % len(ATTACKERS)]


async def raw(port: int, sent: bytes, host: str = HOST) -> bytes:
    """Whatever comes back until the other end has nothing to say for a moment, or hangs up."""
    reader, writer = await asyncio.open_connection(host, port, local_addr=(attacker(sent), 0))
    try:
        writer.write(sent)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(SILENT_S):
                return await reader.read(2**20)
        return b""
    finally:
        writer.close()


async def post(port: int, path: str, headers: Headers, body: bytes, source: str = HOST) -> Reply:
    """A request over a connection of its own, and its answer."""
    settings = {"content-length": str(len(body)), "host": "x", "connection": "close"} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in settings.items()).encode("utf-8", "surrogateescape")
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(source, 0))
    try:
        with suppress(OSError):  # what is refused at once is not read to its end
            writer.write(f"POST {path} HTTP/1.1\r\n".encode() + lines + b"\r\n" + body)
            await writer.drain()
        try:
            came = await _one_reply(reader)
        except ConnectionResetError:  # HAProxy has refused the headers, and does not read the body
            return ENDED, {}, b""
    finally:
        writer.close()
    head, _, content = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), (headers, body[:200], came[:200])
    fields = (line.partition(b": ") for line in head.split(b"\r\n")[1:])
    return int(head.split()[1]), {name.lower(): value for name, _, value in fields}, content


async def without_socket(api: Any, path: str, headers: Headers, body: bytes) -> Reply:
    """As uvicorn would call the application."""
    encoded = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": encoded, "root_path": "", "scheme": "http", "server": (HOST, 80)}
    calls: list[Any] = []
    sent = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        calls.append(message)

    await api(scope, receive, send)
    content = b"".join(each.get("body", b"") for each in calls[1:])
    return calls[0]["status"], dict(calls[0]["headers"]), content


async def _one_reply(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return head + (await reader.readexactly(int(length)) if length else await reader.read())


class Grpc:
    """Bytes to the methods of the protocol, whatever they are."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def unary(self, method: str, sent: bytes) -> str:
        """The status."""
        try:
            await self._channel.unary_unary(f"/{SERVICE}/{method}")(sent)
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
            assert code in CODES, (code, details)
            assert len(details) <= 1024
            return str(code)
        return "OK"

    async def stream(self, sent: list[bytes]) -> str:
        """Each message is answered, whatever came before it; the last one was right."""
        replies = await self._replies(sent)
        assert len(replies) == len(sent)
        assert all(len(reply.error_message) <= 1024 for reply in replies)
        assert replies[-1].infer_response.outputs, replies[-1].error_message
        return "answered"

    async def text_stream(self, sent: list[bytes]) -> str:
        """As `stream`, where an answer comes in pieces, and answers in any order."""
        replies = await self._replies(sent)
        last = [reply for reply in replies if reply.infer_response.parameters]
        ended = [reply for reply in last if reply.infer_response.parameters[0].value.bool_param]
        assert len(ended) + len([reply for reply in replies if reply.error_message]) == len(sent)
        assert ended, "the last one was right"
        return "answered"

    async def _replies(self, sent: list[bytes]) -> list[Any]:
        call = self._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", response_deserializer=message("ModelStreamInferResponse").FromString
        )
        return [reply async for reply in call(iter(sent))]


class Honest:
    """What became of the requests of a client that means well; a busy machine may refuse some."""

    def __init__(self) -> None:
        self.asked = self.wrong = 0
        self.worst_s = 0.0
        self.refusals: list[str] = []

    async def ask_for_ever(self, ask: Callable[[bytes], Awaitable[Reply]]) -> None:
        while True:
            began_s = time.perf_counter()
            status, _, body = await ask(as_json(PREDICT))
            self._heard(status, body, time.perf_counter() - began_s)
            await asyncio.sleep(EVERY_S)

    def _heard(self, status: int, body: bytes, took_s: float) -> None:
        self.asked += 1
        self.worst_s = max(self.worst_s, took_s)
        if status in (503, 504):
            self.refusals.append(json.loads(body)["error"])
        else:
            self.wrong += status != 200 or [each["label"] for each in json.loads(body)["outputs"]] != [7, 3]


def judged_honest(where: str, honest: Honest) -> None:
    refused = len(honest.refusals)
    COUNTS[where, "right"] = honest.asked - honest.wrong - refused
    COUNTS[where, "wrong"], COUNTS[where, "refused"] = honest.wrong, refused
    COUNTS[where, "worst_ms"] = round(1e3 * honest.worst_s)
    assert honest.asked
    assert not honest.wrong
    assert refused < refused_share() * honest.asked, (refused, honest.asked, honest.refusals[0])
    assert honest.worst_s < within_s()
