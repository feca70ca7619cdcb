"""Answers POST /predict, and the paths of other servers' interfaces, without Serve's handling of a request.

That handling would add more than half to the processor time of a request.

Serve lets a callback put middlewares around a replica's HTTP server (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, set by
`isobatch serve`). This middleware answers the most frequent requests itself; without the variable, only costs change.
Other parts do the work that Serve then skips: the dispatcher limits and counts requests, uvicorn waits for running
requests when it stops, and this module cancels a request whose client disconnects.

Replicas of a network have an HTTP server too, which Serve starts for every application. There this middleware refuses
all requests.
"""

import asyncio
from collections.abc import Collection
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from isobatch.deployments import serve_process

_OF_SERVE = ("/-/healthz", "/-/routes")  # Serve's own questions

port: int | None = None  # the HTTP port of this process, learned from the proxy's first health check
_front: ASGIApp | None = None  # the front of this process, once it exists
_prefix = ""  # the route prefix of the application, learned like the port
_paths: Collection[str] = ()  # that the front answers, with the prefix


def middlewares() -> list[Middleware]:
    """The callback that Serve calls in every replica with an HTTP server."""
    return [Middleware(Shortcut)]


def apply(front: ASGIApp, paths: Collection[str]) -> None:
    """Let the front of this process answer POST to these paths, below the application's route prefix."""
    global _front, _prefix, _paths
    _front, _prefix, _paths = front, "", frozenset(paths)


def _learn_prefix(prefix: str) -> None:
    global _prefix, _paths
    if prefix != _prefix:
        _paths = frozenset(prefix + path.removeprefix(_prefix) for path in _paths)
        _prefix = prefix


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    sentence = "this is the port of a replica, which answers its fronts only: use the port of HTTP"
    await JSONResponse({"error": sentence}, 404)(scope, receive, send)


class Shortcut:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        global port
        if port is None and scope.get("server"):
            port = scope["server"][1]
        if _front and scope["type"] == "http" and scope["path"] in _paths and scope["method"] == "POST":
            scope["root_path"] = _prefix
            await _CancellableRequest(receive).run(_front, scope, send)
        elif serve_process.is_replica and scope["type"] == "http" and scope["path"] not in _OF_SERVE:
            await _refused(scope, receive, send)
        else:
            await self._app(scope, receive, send)
            if scope["type"] == "http":
                _learn_prefix(scope.get("root_path", ""))  # Serve writes it there


class _CancellableRequest:
    """A request that is cancelled when its client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[Any] | None = None

    async def run(self, app: ASGIApp, scope: Scope, send: Send) -> None:
        self._task = asyncio.current_task()
        try:
            await app(scope, self.receive, send)
        except asyncio.CancelledError:
            if not (self._watch and self._watch.done() and not self._watch.cancelled()):  # its client is still there
                raise
        finally:
            if self._watch:
                self._watch.remove_done_callback(self._cancel)
                self._watch.cancel()

    async def receive(self) -> Any:
        """The next message of the body. After the last one, any message means that the client has disconnected."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body") and not self._watch:
            self._watch = asyncio.ensure_future(self._receive())
            self._watch.add_done_callback(self._cancel)
        return message

    def _cancel(self, _: object) -> None:
        if self._task:
            self._task.cancel()
