"""The HTTP side: paths, limits, and the shape of answers and errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments.front.answers import RefusedError, Step
from deployments.front.deadlines import HEADER, deadline_s
from deployments.front.keys import OPEN, UNKNOWN, is_shown
from deployments.front.open_inference.rest import routes
from deployments.front.open_inference.rpc import serving
from deployments.front.predict import Predict, body_of
from deployments.front.service import Service


class Output(BaseModel):
    """One input's label, and what happened to it on the way."""

    label: int = Field(description="The class that was chosen, from 0.")
    name: str = Field(description="What the checkpoint calls that class.")
    score: float = Field(description="Its probability.")
    exit_block: int = Field(description="The block after which the input left, from 0.")
    queued_ms: float = Field(description="Time spent waiting for batches to form.")
    computed_ms: float = Field(description="Time in launches, until it left.")
    splits: list[Step] = Field(description="The same for each launch it took part in.")


class Predictions(BaseModel):
    model: str
    outputs: list[Output] = Field(description="In the order of the inputs.")
    virtual: bool = Field(False, description="Nothing was computed: devices only took the time that they would.")


class Problem(BaseModel):
    error: str = Field(description="One sentence that names the value.")


_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["inputs"],
                "properties": {
                    "inputs": {"description": "One input (a text, or an image as nested lists), or a list."}
                },
            }
        }
    },
}
_PROBLEMS = {
    400: "The body is not what was asked for.",
    413: "The body is too large.",
    422: "The inputs do not fit the network.",
    503: "The deadline cannot be met with what is waiting; try again later.",
    504: "The deadline passed before the answer was known.",
}


_UNKNOWN = JSONResponse(
    {"error": UNKNOWN},
    status_code=401,
    headers={"WWW-Authenticate": "Bearer"},
)


class Api(FastAPI):
    """FastAPI, which describes and checks; but what is asked for most goes by the shortest way."""

    predict: Predict
    key: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            self.key
            and scope["type"] == "http"
            and _path(scope) not in OPEN
            and not is_shown(self.key, scope["headers"])
        ):
            return await _UNKNOWN(scope, receive, send)
        if scope["type"] != "http" or scope["method"] != "POST" or _path(scope) != "/predict":
            return await super().__call__(scope, receive, send)
        try:
            return await self.predict(scope, receive, send)
        except RefusedError as refused:
            return await _refusal(refused)(scope, receive, send)


def _path(scope: Scope) -> str:
    """Below the route prefix of the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def create_api(service: Service) -> Api:
    """The application that answers for `service`."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        async with serving(service):
            yield
        await service.close()

    api = Api(title="isobatch", description=f"Early-exit inference: {service.name}", lifespan=life)
    api.key = service.key
    api.add_exception_handler(RefusedError, _refused)
    api.add_exception_handler(HTTPException, _no_such_path)
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()
    }

    api.predict = Predict(service)

    @api.post("/predict", response_model=Predictions, responses=responses, openapi_extra={"requestBody": _BODY})
    async def predict() -> NoReturn:
        """Answer one input or a list of them, in order."""
        raise AssertionError("This is a bug: the request should have gone the shortest way.")

    async def body(request: Request) -> bytes:
        return await body_of(dict(request.scope["headers"]), request.receive, service.config.max_body_bytes)

    api.include_router(routes(service, body, _deadline_s))

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    @api.get("/readyz")
    async def readyz() -> dict[str, str]:
        """The network is loaded, and every part of it has a replica."""
        if missing := await service.missing():
            raise RefusedError(503, f"no replica of {', '.join(missing)} is running", retry_after_s=1)
        return {"status": "ready", "model": service.name}

    @api.get("/stats")
    async def stats() -> dict[str, object]:
        """Counts since the start, of all fronts together."""
        return await service.stats()

    return api


def _deadline_s(request: Request) -> float | None:
    return deadline_s(request.headers.get(HEADER))


def _refused(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, RefusedError)
    return _refusal(refused)


def _refusal(refused: RefusedError) -> Response:
    headers = {"Retry-After": str(refused.retry_after_s)} if refused.retry_after_s else None
    return JSONResponse({"error": refused.sentence}, status_code=refused.status, headers=headers)


def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {request.url.path}: {error.detail}; POST /predict answers, /docs explains"
    return JSONResponse({"error": sentence}, status_code=error.status_code, headers=error.headers)
