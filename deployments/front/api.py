"""The HTTP application of a front, for every network: the guard, errors, health, counts, and the page of its paths."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isobatch.deployments.config import ServedConfig
from isobatch.deployments.front import shortcut
from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.bodies import ARRIVING
from isobatch.deployments.front.headers import NO_KEY, OPEN_PATHS, has_key, host_refusal, page_refusal, path_below
from isobatch.deployments.front.openapi import BY_GUARD, corrected, documented, in_json, refusal_headers
from isobatch.deployments.front.page import explain, files
from isobatch.deployments.front.proxy import Burden, ProxyLimit, WatchedProxies, servers_at
from isobatch.deployments.front.schemas import Alive, Ready, StatsBody
from isobatch.deployments.ray_facts import node_address
from isobatch.deployments.ray_settings import haproxy_socket

log = logging.getLogger(__name__)

try:
    VERSION = version("isobatch")
except PackageNotFoundError:  # a checkout that was copied to a node, and not installed there
    VERSION = "unknown"
_VERSION_HEADER = b"x-isobatch-version", VERSION.encode()
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"), "allow_headers": ("*",), "expose_headers": ("*",),
    "allow_private_network": True,  # browsers ask for it where this server's address is not public
}  # fmt: skip


class GuardedNetwork(Protocol):
    """The network behind a front, as HTTP, gRPC and their limits know it."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ServedConfig: ...

    @property
    def key(self) -> bytes | None:
        """The key that requests must show, if there is one."""

    async def missing(self) -> list[str]:
        """The parts of the network that have no replica now."""

    async def stats(self) -> dict[str, Any]:
        """The content of /stats."""

    def burden(self) -> Burden:
        """The load of this front, for the limits of the proxies before it."""

    @property
    def proxies(self) -> WatchedProxies: ...


class Api(FastAPI):
    """FastAPI behind the guard of all our interfaces. Every exception becomes a response with one sentence in JSON.

    A subclass says what is different in its interface.
    """

    stats: type[BaseModel] = StatsBody  # the schema of /stats
    hint = "POST /predict answers"  # for a request of an unknown path
    documented: Callable[..., dict[str, Any]] = staticmethod(documented)
    error: Callable[[RefusedError], Any] = staticmethod(lambda refused: {"error": refused.sentence})  # in JSON

    key: bytes | None = None
    pages: tuple[str, ...] = ()  # the origins of other servers whose pages may send requests
    hosts: tuple[str, ...] = ()  # names of this server that are not local
    open_paths: Collection[str] = OPEN_PATHS  # that are answered without the key
    costly_paths: Collection[str] = ()  # of GET, which pages of other servers may not request, as they may not POST
    direct: Mapping[str, ASGIApp] = {}  # what answers POST without FastAPI, which would be slower, by path
    _with_cors: ASGIApp | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(docs_url=None, redoc_url=None, **options)  # those pages load scripts from other servers
        self.add_exception_handler(RefusedError, lambda _, refused: self.refused(refused))
        self.add_exception_handler(Exception, lambda _, error: self.failed(error))
        explain(self)

    def allow(self, pages: tuple[str, ...]) -> None:
        """Let browsers send requests from these pages of other servers."""
        self.pages = pages
        self._with_cors = CORSMiddleware(self._handle, allow_origins=pages, **_CORS) if pages else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._with_cors and dict(scope.get("headers", ())).get(b"origin", b"").decode("latin-1") in self.pages:
            await self._with_cors(scope, receive, send)
        else:
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await super().__call__(scope, receive, send)
        reply = _Reply(send)
        try:
            if refused := self.refusal(scope):
                raise refused
            await self._answer(scope, receive, reply)
        except RefusedError as refused:
            await reply.instead(self.refused(refused), scope, receive)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await reply.instead(self.failed(error), scope, receive)

    def refusal(self, scope: Scope) -> RefusedError | None:
        """The refusal of a request without the key; without a key, of one for another host or from another's page."""
        headers, path = scope["headers"], path_below(scope)
        if self.key:
            return None if path in self.open_paths or has_key(self.key, headers) else RefusedError(401, NO_KEY)
        reason = None if path in OPEN_PATHS else host_refusal(headers, self.hosts)
        if not reason and (scope["method"] == "POST" or path in self.costly_paths):
            reason = page_refusal(headers, self.pages)
        return RefusedError(403, reason) if reason else None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and (answers := self.direct.get(path_below(scope))):
            await answers(scope, receive, send)
        else:
            scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await super().__call__(scope, receive, send)

    def refused(self, refused: RefusedError) -> Response:
        write = refused.write or self.error
        return JSONResponse(write(refused), refused.status, refusal_headers(refused))

    def failed(self, error: Exception) -> Response:
        return self.refused(RefusedError(500, f"this server failed: {type(error).__name__}; its log says where"))

    def no_such_path(self, request: Request, error: HTTPException) -> Response:
        name = f"{request.method} {shown(request.url.path)}"
        refused = RefusedError(error.status_code, f"{name}: {error.detail}; {self.hint}, /docs explains")
        return JSONResponse(self.error(refused), refused.status, error.headers)

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = corrected(super().openapi(), needs_key=bool(self.key))
        return self.openapi_schema


AnyApi = TypeVar("AnyApi", bound=Api)


class _Reply:
    """Sends one response with the version, and notes whether it has begun. (uvicorn sends HEAD no body.)"""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), _VERSION_HEADER]}
        await self._send(message)

    async def instead(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Send this response, unless another has begun. That one then ends too early, which clients notice."""
        if not self._begun:
            await response(scope, receive, self)


def api_of(
    served: GuardedNetwork, about: str, life: Callable[[], AbstractAsyncContextManager[None]], kind: type[AnyApi]
) -> AnyApi:
    """The FastAPI application of a served network, without the paths that compute. `life` is its lifespan."""

    api = kind(title="isobatch", description=f"{about}: {served.name}", lifespan=lambda _: life())
    api.key, api.open_paths, api.hosts = served.key, OPEN_PATHS | files().keys(), served.config.allowed_hosts
    api.allow(served.config.allowed_origins)
    api.add_exception_handler(HTTPException, lambda request, error: api.no_such_path(request, error))

    @api.get("/healthz", **api.documented(Alive))
    async def healthz() -> dict[str, str]:
        """The server is alive."""
        return {"status": "ok"}

    @api.get("/health", **api.documented(Ready, 503))  # as clients of vLLM, SGLang and TEI have it
    @api.get("/readyz", **api.documented(Ready, 503))
    async def readyz() -> dict[str, str]:
        """The network is loaded, and every part of it has a replica."""
        if missing := await served.missing():
            raise RefusedError(503, f"no replica of {', '.join(missing)} is running", retry_after_s=1)
        return {"status": "ready", "model": served.name}

    @api.get("/stats", **api.documented(api.stats, *BY_GUARD, 500))
    async def stats() -> Response:
        """The counts of all fronts together, since the start."""
        return in_json({"version": VERSION} | await served.stats())

    return api


def limit_http(served: GuardedNetwork, slo_ms: float | None = None) -> None:
    """Let Serve's HAProxy, if there is one, refuse requests beyond a limit that follows the load of this front."""
    if socket := haproxy_socket():
        node = node_address()
        limit = ProxyLimit(socket, served.burden, lambda: servers_at(socket, shortcut.port, node), slo_ms)
        ARRIVING.places = lambda: limit.value
        limit.start()
        served.proxies.watch(limit)
