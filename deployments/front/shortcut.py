"""Answers POST /predict past Serve's own handling of a request, which adds more than half to its processor time
(docs/overload.md).

Serve lets a callback put middlewares around a replica's HTTP server (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, set by
`isobatch serve`). This one answers the most frequent request itself; without the variable only the cost changes.
Others do what Serve then skips: the dispatcher limits and counts requests, uvicorn waits for those in flight when it
stops, and this module notices a client that goes away.
"""

import asyncio
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/predict"  # where the application has no route prefix of its own

port: int | None = None  # where HTTP reaches this process, as the proxy's first health check shows
_front: ASGIApp | None = None  # the front of this process, once it exists


def middlewares() -> list[Middleware]:
    """The middlewares, for which Serve calls this in every replica that HTTP reaches."""
    return [Middleware(Shortcut)]


def apply(front: ASGIApp) -> None:
    global _front
    _front = front


class Shortcut:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        global port
        if port is None and scope.get("server"):
            port = scope["server"][1]
        if _front and scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST":
            await _Attended(receive).run(_front, scope, send)
        else:
            await self._app(scope, receive, send)


class _Attended:
    """A request that is given up when its client goes away."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[Any] | None = None

    async def run(self, app: ASGIApp, scope: Scope, send: Send) -> None:
        self._task = asyncio.current_task()
        try:
            await app(scope, self.receive, send)
        except asyncio.CancelledError:
            if not self._gone():
                raise
        finally:
            if self._watch:
                self._watch.remove_done_callback(self._give_up)
                self._watch.cancel()

    async def receive(self) -> Any:
        """The next message of the body. After the last one, another message can only mean that the client has gone."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body") and not self._watch:
            self._watch = asyncio.ensure_future(self._receive())
            self._watch.add_done_callback(self._give_up)
        return message

    def _give_up(self, _: object) -> None:
        if self._task:
            self._task.cancel()

    def _gone(self) -> bool:
        return self._watch is not None and self._watch.done() and not self._watch.cancelled()
