"""What OpenAPI says of a server's paths: which statuses each may have, and bodies that can be tried."""

from collections.abc import Collection, Mapping
from math import ceil
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from deployments.front.answers import RefusedError
from deployments.front.cors import AllowedPages
from deployments.front.headers import (
    DEADLINE_HEADER,
    LONGEST_MS,
    NO_KEY,
    OPEN_PATHS,
    is_shown,
    page_refusal,
    path_below,
)
from deployments.front.schemas import ErrorBody

PROBLEMS = {
    400: "The body is not what was asked for.",
    401: "A key is asked for, and was not shown.",
    403: "A web page of another server asked for this.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large, as it comes or decompressed.",
    415: "The body is compressed in a way that is not known.",
    422: "The inputs do not fit the network.",
    500: "The network, or this server, failed.",
    503: "The deadline cannot be met with what is waiting, a part of the network has no replica, or the server stops; "
    "try again later.",
    504: "The deadline passed before the answer was known.",
}
READING = (400, 401, 403, 408, 413, 415, 422, 500, 503, 504)  # what may become of a request with inputs
_AN_INPUT = (
    "One input (a text, or an image as nested lists), or a list. "
    "Where words are answered, a text may be given as a list of its words."
)
_LONGEST_EXAMPLE = 2000  # characters
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until it may go better.", "schema": {"type": "integer"}}}


def problems(
    *statuses: int, error: type[BaseModel] = ErrorBody, about: Mapping[int, str] = PROBLEMS
) -> dict[int | str, dict[str, Any]]:
    """These statuses, as FastAPI takes them; each with an `error` in JSON."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        responses[status] = {"model": error, "description": about[status]}
        if status == 503:
            responses[status]["headers"] = _RETRY_AFTER
    return responses


def told(model: type[BaseModel], *statuses: int, **problem: Any) -> dict[str, Any]:
    """What a route's decorator is given: this answer, or one of these problems (see `problems`)."""
    responses: dict[int | str, dict[str, Any]] = {200: {"model": model, "description": "OK"}}
    return {"response_model": None, "responses": responses | problems(*statuses, **problem)}


def refusal_headers(refused: RefusedError) -> dict[str, str]:
    """The headers of a refusal: when to try again, and how to show the key."""
    headers = {"Retry-After": str(ceil(refused.retry_after_s))} if refused.retry_after_s else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if refused.status == 401 else {})


def in_json(body: Any) -> Response:
    """What is asked every second, as bytes at once: FastAPI would first copy it, value by value.

    >>> in_json({"exits": {0: 3}, "p99": float("nan")}).body
    b'{"exits":{"0":3},"p99":null}'
    """
    return Response(msgspec.json.encode(body, enc_hook=float), media_type="application/json")  # float: numpy's


def examples(**by_name: Any) -> dict[str, Any]:
    """Bodies of requests that this server answers, by a name for people."""
    return {name.replace("_", " "): {"value": body} for name, body in by_name.items()}


def schema_of(part: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema with each `$ref` replaced by what it names, since OpenAPI looks for these elsewhere."""
    schema = part.model_json_schema()
    aside = schema.pop("$defs", {})

    def whole(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return whole(aside[node["$ref"].rpartition("/")[2]])
            return {name: whole(value) for name, value in node.items()}
        return [whole(each) for each in node] if isinstance(node, list) else node

    found: dict[str, Any] = whole(schema)
    return found


def fits(example: Any | None) -> bool:
    """Whether an example is one for people: a photograph is not."""
    return example is not None and len(str(example)) <= _LONGEST_EXAMPLE


def predict_body(example: Any | None) -> dict[str, Any]:
    """What POST /predict takes; `example`: an input of the network that is served, if one is known."""
    schema = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {"inputs": {"description": _AN_INPUT}},
    }
    content: dict[str, Any] = {"schema": schema}
    if fits(example):
        content["examples"] = examples(one_input={"inputs": example}, several={"inputs": [example, example]})
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


WITH_INPUTS: dict[str, Any] = {
    "parameters": [
        {
            "name": "-".join(part.capitalize() for part in DEADLINE_HEADER.split("-")),
            "in": "header",
            "required": False,
            "description": "Milliseconds until the answer is of no use to the client; without: as the server has it.",
            "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_MS},
            "example": 60_000,
        },
        {
            "name": "X-Full",
            "in": "header",
            "required": False,
            "description": "1: no input may leave at a ramp.",
            "schema": {"type": "string", "enum": ["0", "1"]},
            "example": "1",
        },
    ]
}


class DocumentedApi(FastAPI):
    """FastAPI without pages that load scripts from elsewhere, and without statuses that it only believes in."""

    key: bytes | None = None
    pages: tuple[str, ...] = ()  # of other servers, that may ask
    open_paths: Collection[str] = OPEN_PATHS  # that are answered without the key
    _entrance: AllowedPages | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(docs_url=None, redoc_url=None, **options)

    def allow(self, pages: tuple[str, ...]) -> None:
        self.pages, self._entrance = pages, AllowedPages(self._inside, pages) if pages else None

    def refusal(self, scope: Scope) -> RefusedError | None:
        """The refusal of a request without the key, or, where no key is needed, of a web page of another server."""
        if self.key:
            may_pass = path_below(scope) in self.open_paths or is_shown(self.key, scope["headers"])
            return None if may_pass else RefusedError(401, NO_KEY)
        reason = page_refusal(scope["headers"], self.pages) if scope["method"] == "POST" else None
        return RefusedError(403, reason) if reason else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entrance or self._inside)(scope, receive, send)

    async def _inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = _mended(super().openapi(), asks_key=bool(self.key))
        return self.openapi_schema


def _mended(document: dict[str, Any], asks_key: bool) -> dict[str, Any]:
    """Without the 422 that FastAPI adds wherever a path has parameters, and with the key, where one is asked for."""
    for operation in (each for path in document["paths"].values() for each in path.values()):
        schema = operation["responses"].get("422", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("$ref", "").endswith("HTTPValidationError"):
            del operation["responses"]["422"]
    parts = document.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        parts.get("schemas", {}).pop(unused, None)
    if asks_key:
        parts["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document
