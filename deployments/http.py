"""The HTTP side: paths, limits, and the shape of answers and errors."""

import json
from dataclasses import asdict
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from deployments.answers import RefusedError
from deployments.service import Service


class Output(BaseModel):
    """One input's label, and what happened to it on the way."""

    label: int = Field(description="The class that was chosen, from 0.")
    name: str = Field(description="What the checkpoint calls that class.")
    score: float = Field(description="Its probability.")
    exit_block: int = Field(description="The block after which the input left, from 0.")
    queued_ms: float = Field(description="Time until its batch started.")
    computed_ms: float = Field(description="Time from there until it left.")


class Predictions(BaseModel):
    model: str
    outputs: list[Output] = Field(description="In the order of the inputs.")


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
    503: "Too many inputs are waiting; try again later.",
}


def create_api(service: Service) -> FastAPI:
    """The application that answers for `service`."""
    api = FastAPI(title="isobatch", description=f"Early-exit inference: {service.name}")
    api.add_exception_handler(RefusedError, _refusal)
    api.add_exception_handler(HTTPException, _no_such_path)
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()
    }

    @api.post("/predict", response_model=Predictions, responses=responses, openapi_extra={"requestBody": _BODY})
    async def predict(request: Request) -> Response:
        """Answer one input or a list of them, in order."""
        answers = await service.predict(_inputs(await _body(request, service.config.max_body_bytes)))
        return JSONResponse({"model": service.name, "outputs": [asdict(answer) for answer in answers]})

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    @api.get("/readyz")
    async def readyz() -> dict[str, str]:
        """The network is loaded and answers."""
        return {"status": "ready", "model": service.name}

    @api.get("/stats")
    async def stats() -> dict[str, object]:
        """Counts since the start."""
        return service.stats()

    return api


async def _body(request: Request, max_bytes: int) -> bytes:
    """The whole body, or 413 as soon as it is known to be too large."""
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > max_bytes:
        raise RefusedError(413, f"the body has {told} bytes: {max_bytes} are allowed")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise RefusedError(413, f"the body has more than {max_bytes} bytes, which is what is allowed")
    return bytes(body)


def _inputs(body: bytes) -> object:
    """
    >>> _inputs(b'{"inputs": "a text"}')
    'a text'
    """
    try:
        content = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from error
    if not isinstance(content, dict) or "inputs" not in content:
        raise RefusedError(400, 'the body must be {"inputs": ...}: one input or a list of them')
    if unknown := sorted(content.keys() - {"inputs"}):
        raise RefusedError(400, f"{unknown[0]!r} is not known: the body has one field, 'inputs'")
    return content["inputs"]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON knows")


def _refusal(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, RefusedError)
    headers = {"Retry-After": str(refused.retry_after_s)} if refused.retry_after_s else None
    return JSONResponse({"error": refused.sentence}, status_code=refused.status, headers=headers)


def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {request.url.path}: {error.detail}; POST /predict answers, /docs explains"
    return JSONResponse({"error": sentence}, status_code=error.status_code, headers=error.headers)
