"""POST /predict bypasses Serve; other requests do not; a request whose client disconnects is cancelled."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from isobatch.deployments.front import shortcut
from isobatch.deployments.front.headers import path_below
from isobatch.deployments.front.shortcut import Shortcut


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("isobatch.deployments.serve_process.is_replica", False)
    yield
    shortcut._front = None


class Client:
    """Sends a body in pieces, and may hang up."""

    def __init__(self, *pieces: bytes) -> None:
        self.sent: list[Any] = []
        self._pieces = list(pieces)
        self.hangs_up = asyncio.Event()

    async def receive(self) -> Any:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.hangs_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def serve(scope: Any, receive: Any, send: Any) -> None:
    await send("Serve")


async def serve_below_a(scope: Any, receive: Any, send: Any) -> None:
    scope["root_path"] = "/a"  # as Serve does before it answers
    await send("Serve")


async def front(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    await send(body + message["body"])


def ask(client: Client, method: str = "POST", path: str = "/predict", kind: str = "http") -> Any:
    return Shortcut(serve)({"type": kind, "method": method, "path": path}, client.receive, client.send)


async def test_only_the_most_frequent_request_bypasses_serve() -> None:
    client = Client(b"a", b"b")
    await ask(client)
    assert client.sent == ["Serve"], "no front is here yet"
    shortcut.apply(front, {"/predict"})
    for other in ({"method": "GET"}, {"path": "/stats"}, {"path": "/other/predict"}, {"kind": "websocket"}):
        await ask(client, **other)
    assert client.sent == ["Serve"] * 5
    await ask(client)
    assert client.sent[5:] == [b"ab"]


async def test_the_route_prefix_is_learned_from_what_serve_answers() -> None:
    client, paths = Client(), []

    async def front_below(scope: Any, receive: Any, send: Any) -> None:
        paths.append(path_below(scope))

    shortcut.apply(front_below, {"/predict"})
    below = Shortcut(serve_below_a)
    for path in ("/-/healthz", "/a/predict", "/predict", "/a/predict"):
        scope = {"type": "http", "method": "POST", "path": path}
        await below(scope, client.receive, client.send)
    assert paths == ["/predict"] * 2
    assert client.sent == ["Serve"] * 2, "the check, and a path that is not below the prefix"


def test_a_request_whose_client_disconnects_is_cancelled_without_a_trace() -> None:
    ended: list[str] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("abandoned")
            raise

    async def scene() -> None:
        shortcut.apply(slow, {"/predict"})
        client = Client(b"a")
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0.01)
        client.hangs_up.set()
        await asyncio.wait_for(asking, 30.0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scene())
    assert ended == ["abandoned"]


async def test_a_replica_answers_nothing_but_serves_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.serve_process.is_replica", True)

    client = Client(b"a")
    await ask(client, "GET", "/-/healthz")
    assert client.sent == ["Serve"]
    await ask(client)
    assert client.sent[1]["status"] == 404
    assert b"this is the port of a replica" in client.sent[2]["body"]
