"""The HTTP application of a front, for every network: the guard, errors, health, counts, and the page of its paths."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.headers import OPEN_PATHS, path_below
from isobatch.deployments.front.openapi import DocumentedApi, documented, in_json, refusal_headers
from isobatch.deployments.front.page import explain, files
from isobatch.deployments.front.schemas import Alive, Ready
from isobatch.deployments.front.served import GuardedNetwork

log = logging.getLogger(__name__)

try:
    VERSION = version("isobatch")
except PackageNotFoundError:  # a checkout that was copied to a node, and not installed there
    VERSION = "unknown"
_VERSION_HEADER = b"x-isobatch-version", VERSION.encode()


def _plain(refused: RefusedError) -> dict[str, Any]:
    return {"error": refused.sentence}


@dataclass(frozen=True)
class Dialect:
    """What the paths of one kind of network differ in."""

    stats: type[BaseModel]  # the schema of /stats
    hint: str  # for a request of an unknown path: the path that answers
    documented: Callable[..., dict[str, Any]] = documented
    error: Callable[[RefusedError], Any] = _plain  # the JSON of an error


class Api(DocumentedApi):
    """FastAPI describes all paths, and answers all but those in `direct`, which are answered faster.

    Every exception becomes a response with one sentence in JSON.
    """

    dialect: Dialect
    direct: Mapping[str, ASGIApp] = {}  # what answers POST, by path

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await super()._handle(scope, receive, send)
        reply = _Reply(send, scope["method"] == "HEAD")
        try:
            await self._answer(scope, receive, reply)
        except RefusedError as refused:
            await reply.instead(self.refused(refused), scope, receive)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await reply.instead(self.failed(error), scope, receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refused := self.refusal(scope):
            raise refused
        if scope["method"] == "POST" and (answers := self.direct.get(path_below(scope))):
            await answers(scope, receive, send)
        elif scope["method"] == "HEAD":
            await super()._handle({**scope, "method": "GET"}, receive, send)
        else:
            await super()._handle(scope, receive, send)

    def refused(self, refused: RefusedError) -> Response:
        write = refused.write or self.dialect.error
        return JSONResponse(write(refused), refused.status, refusal_headers(refused))

    def failed(self, error: Exception) -> Response:
        return self.refused(RefusedError(500, f"this server failed: {type(error).__name__}; its log says where"))

    def no_such_path(self, request: Request, error: HTTPException) -> Response:
        name = f"{request.method} {shown(request.url.path)}"
        refused = RefusedError(error.status_code, f"{name}: {error.detail}; {self.dialect.hint}, /docs explains")
        return JSONResponse(self.dialect.error(refused), refused.status, error.headers)


AnyApi = TypeVar("AnyApi", bound=Api)


class _Reply:
    """Sends one response with the version (to HEAD without its body), and notes whether it has begun."""

    def __init__(self, send: Send, head_only: bool) -> None:
        self._send, self._head_only = send, head_only
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), _VERSION_HEADER]}
        elif self._head_only and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self._send(message)

    async def instead(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Send this response, unless another has begun. That one then ends too early, which clients notice."""
        if not self._begun:
            await response(scope, receive, self)


def api_of(
    served: GuardedNetwork,
    about: str,
    dialect: Dialect,
    life: Callable[[], AbstractAsyncContextManager[None]],
    kind: type[AnyApi],
) -> AnyApi:
    """The application of a served network, without the paths that compute. `life` lasts as long as it does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with life():
            yield

    api = kind(title="isobatch", description=f"{about}: {served.name}", lifespan=lifespan)
    api.dialect, api.key, api.open_paths = dialect, served.key, OPEN_PATHS | files().keys()
    api.hosts = served.config.allowed_hosts
    api.allow(served.config.allowed_origins)
    api.add_exception_handler(RefusedError, lambda _, refused: api.refused(refused))
    api.add_exception_handler(HTTPException, lambda request, error: api.no_such_path(request, error))
    api.add_exception_handler(Exception, lambda _, error: api.failed(error))
    explain(api)

    @api.get("/healthz", **dialect.documented(Alive))
    async def healthz() -> dict[str, str]:
        """The server is alive."""
        return {"status": "ok"}

    @api.get("/readyz", **dialect.documented(Ready, 503))
    async def readyz() -> dict[str, str]:
        """The network is loaded, and every part of it has a replica."""
        if missing := await served.missing():
            raise RefusedError(503, f"no replica of {', '.join(missing)} is running", retry_after_s=1)
        return {"status": "ready", "model": served.name}

    @api.get("/stats", **dialect.documented(dialect.stats, 401, 500))
    async def stats() -> Response:
        """The counts of all fronts together, since the start."""
        return in_json({"version": VERSION} | await served.stats())

    return api
