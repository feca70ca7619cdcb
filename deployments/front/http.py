"""The front's HTTP interface: its paths, its limits, and its errors."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from deployments.front.answers import RefusedError, brief, shown
from deployments.front.bodies import body_of
from deployments.front.headers import DEADLINE_HEADER, OPEN_PATHS, deadline_s, path_below
from deployments.front.open_inference.rest import routes
from deployments.front.open_inference.rpc import serving
from deployments.front.openapi import (
    READING,
    WITH_INPUTS,
    DocumentedApi,
    documented,
    in_json,
    predict_body,
    refusal_headers,
)
from deployments.front.page import explain, files, show
from deployments.front.predict import Predict
from deployments.front.schemas import PREDICTIONS, Alive, Ready, StatsBody
from deployments.front.service import Service

log = logging.getLogger(__name__)


class Api(DocumentedApi):
    """FastAPI describes all paths, and answers all but POST /predict, which `Predict` answers faster.

    Every exception becomes a response with one sentence in JSON.
    """

    predict: Predict

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await super()._handle(scope, receive, send)
        reply = _Reply(send, scope["method"] == "HEAD")
        try:
            await self._answer(scope, receive, reply)
        except RefusedError as refused:
            await reply.instead(_refusal(refused), scope, receive)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await reply.instead(_failed(error), scope, receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_below(scope)
        if refused := self.refusal(scope):
            raise refused
        if path == "/predict" and scope["method"] == "POST":
            await self.predict(scope, receive, send)
        elif scope["method"] == "HEAD":
            await super()._handle({**scope, "method": "GET"}, receive, send)
        else:
            await super()._handle(scope, receive, send)


class _Reply:
    """Sends one response (to HEAD without its body), and notes whether it has begun."""

    def __init__(self, send: Send, head_only: bool) -> None:
        self._send, self._head_only = send, head_only
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        if self._head_only and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self._send(message)

    async def instead(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Send this response, unless another has begun. That one then ends too early, which clients notice."""
        if not self._begun:
            await response(scope, receive, self)


def create_api(service: Service) -> Api:
    """The ASGI application of a service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        async with serving(service):
            yield
        await service.close()

    api = Api(title="isobatch", description=f"Early-exit inference: {service.name}", lifespan=lifespan)
    api.key, api.open_paths = service.key, OPEN_PATHS | files().keys()
    api.allow(service.config.allowed_origins)
    api.add_exception_handler(RefusedError, _refused)
    api.add_exception_handler(HTTPException, _no_such_path)
    api.add_exception_handler(Exception, lambda _, error: _failed(error))
    api.predict = Predict(service)

    request_format = WITH_INPUTS | predict_body(service.example.value)

    @api.post("/predict", **documented(PREDICTIONS[service.task.name], *READING), openapi_extra=request_format)
    async def predict() -> NoReturn:
        """Answer one input or a list of them, in order."""
        raise AssertionError("This is a bug: `Api` should have handed the request to `Predict`.")

    async def body(request: Request) -> bytes:
        return await body_of(dict(request.scope["headers"]), request.receive, service.config.max_body_bytes)

    api.include_router(routes(service, body, _deadline_s))
    show(api, service)
    explain(api)

    @api.get("/healthz", **documented(Alive))
    async def healthz() -> dict[str, str]:
        """The server is alive."""
        return {"status": "ok"}

    @api.get("/readyz", **documented(Ready, 503))
    async def readyz() -> dict[str, str]:
        """The network is loaded, and every part of it has a replica."""
        if missing := await service.missing():
            raise RefusedError(503, f"no replica of {', '.join(missing)} is running", retry_after_s=1)
        return {"status": "ready", "model": service.name}

    @api.get("/stats", **documented(StatsBody, 401, 500))
    async def stats() -> Response:
        """The counts of all fronts together, since the start."""
        return in_json(await service.stats())

    return api


def _deadline_s(request: Request) -> float | None:
    return deadline_s(request.headers.get(DEADLINE_HEADER))


def _refused(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, RefusedError)
    return _refusal(refused)


def _refusal(refused: RefusedError) -> Response:
    return JSONResponse({"error": refused.sentence}, status_code=refused.status, headers=refusal_headers(refused))


def _failed(error: Exception) -> Response:
    return _refusal(RefusedError(500, f"this server failed: {type(error).__name__}; its log says where"))


def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    name = f"{request.method} {shown(request.url.path)}"
    sentence = brief(f"{name}: {error.detail}; POST /predict answers, /docs explains")
    return JSONResponse({"error": sentence}, status_code=error.status_code, headers=error.headers)
