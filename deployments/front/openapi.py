"""An API with an OpenAPI document of its paths, their statuses and bodies to try, and with CORS for allowed pages."""

from collections.abc import Collection, Iterable, Mapping
from math import ceil
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.headers import (
    DEADLINE_HEADER,
    FULL,
    LONGEST_MS,
    NO_KEY,
    OPEN_PATHS,
    host_refusal,
    is_shown,
    page_refusal,
    path_below,
)
from isobatch.deployments.front.schemas import ErrorBody
from isobatch.deployments.tracing import PARENT

PROBLEMS = {
    400: "The body has the wrong form.",
    401: "The key is missing or wrong.",
    403: "A web page of another server sent this request, or it is for a host that is not this server.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large, compressed or decompressed.",
    415: "The compression of the body is not supported.",
    422: "The inputs do not fit the network.",
    500: "The network, or this server, failed.",
    503: "The deadline cannot be met with the waiting requests, a part of the network has no replica, or the server "
    "stops; try again later.",
    504: "The deadline passed before the answer was known.",
}
# The possible statuses of a request with inputs.
READING = (400, 401, 403, 408, 413, 415, 422, 500, 503, 504)
_AN_INPUT = (
    "One input (a text, or an image as nested lists), or a list of inputs. "
    "If the network labels words, a text may be a list of its words."
)
# Characters of an example that people can read.
_LONGEST_EXAMPLE = 2000
_CORS_METHODS = ("GET", "POST")
# The request headers that allowed pages of other servers may set.
_CORS_REQUEST_HEADERS = ("Authorization", "Content-Type", "X-API-Key", DEADLINE_HEADER, FULL.decode(), PARENT)
# The response headers that such pages may read.
_CORS_RESPONSE_HEADERS = ("Retry-After", PARENT)
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until a retry is useful.", "schema": {"type": "integer"}}}


def problems(
    *statuses: int, error: Any = ErrorBody, about: Mapping[int, str] = PROBLEMS
) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for these statuses; each body is an `error` in JSON."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        responses[status] = {"model": error, "description": about[status]}
        if status == 503:
            responses[status]["headers"] = _RETRY_AFTER
    return responses


def documented(model: Any, *statuses: int, **problem: Any) -> dict[str, Any]:
    """The arguments of a route's decorator for this response and these errors (see `problems`)."""
    responses: dict[int | str, dict[str, Any]] = {200: {"model": model, "description": "OK"}}
    return {"response_model": None, "responses": responses | problems(*statuses, **problem)}


def refusal_headers(refused: RefusedError) -> dict[str, str]:
    """The headers of a refusal: when to try again, and how to send the key."""
    headers = {"Retry-After": str(ceil(refused.retry_after_s))} if refused.retry_after_s else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if refused.status == 401 else {})


def in_json(body: Any) -> Response:
    """A JSON response. FastAPI would copy the body value by value, which is slow for paths that are polled.

    >>> in_json({"exits": {0: 3}, "p99": float("nan")}).body
    b'{"exits":{"0":3},"p99":null}'
    """
    return Response(msgspec.json.encode(body, enc_hook=float), media_type="application/json")  # float: numpy's


def examples(**by_name: Any) -> dict[str, Any]:
    """OpenAPI examples of request bodies, by their titles."""
    return {name.replace("_", " "): {"value": body} for name, body in by_name.items()}


def schema_of(part: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema with each `$ref` replaced by its definition, since OpenAPI resolves them differently."""
    schema = part.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[node["$ref"].rpartition("/")[2]])
            return {name: inlined(value) for name, value in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    inlined_schema: dict[str, Any] = inlined(schema)
    return inlined_schema


def fits(example: Any | None) -> bool:
    """Whether people can read an example: a photograph is too long."""
    return example is not None and len(str(example)) <= _LONGEST_EXAMPLE


def predict_body(example: Any | None) -> dict[str, Any]:
    """The body of POST /predict; `example`: an input for the served network, if one is known."""
    schema = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "inputs": {"description": _AN_INPUT},
            "scores": {"description": "The labels to list with their probabilities: all, winner, or a number of them."},
            "top_k": {"type": "integer", "minimum": 1, "description": "The same as a number in `scores`."},
        },
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
            "description": "Milliseconds until the answer is useless to the client; default: the server's SLO.",
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
        {
            "name": "X-Priority",
            "in": "header",
            "required": False,
            "description": "Where the server's queues go by priority: inputs with a higher one are computed first.",
            "schema": {"type": "integer", "minimum": -99, "maximum": 99},
            "example": 1,
        },
    ]
}


class AllowedPages:
    """Answers browsers' preflight requests for allowed pages of other servers, and adds CORS headers to responses.

    Requests from other pages pass through unchanged: the application refuses them with a sentence.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app, self._origins = app, frozenset(origin.encode() for origin in origins)
        self._app_with_cors = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=_CORS_METHODS,
            allow_headers=_CORS_REQUEST_HEADERS,
            expose_headers=_CORS_RESPONSE_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["type"] == "http" and any(
            name == b"origin" and value in self._origins for name, value in scope["headers"]
        )
        await (self._app_with_cors if allowed else self._app)(scope, receive, send)


class DocumentedApi(FastAPI):
    """FastAPI without pages that load scripts from other servers, and without statuses that never occur."""

    key: bytes | None = None
    pages: tuple[str, ...] = ()  # the origins of other servers whose pages may send requests
    hosts: tuple[str, ...] = ()  # names of this server that are not local
    open_paths: Collection[str] = OPEN_PATHS  # that are answered without the key
    _with_cors: AllowedPages | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(docs_url=None, redoc_url=None, **options)

    def allow(self, pages: tuple[str, ...]) -> None:
        self.pages, self._with_cors = pages, AllowedPages(self._handle, pages) if pages else None

    def refusal(self, scope: Scope) -> RefusedError | None:
        """The refusal of a request without the key, or, where no key is needed, for another host or from its page."""
        headers, path = scope["headers"], path_below(scope)
        if self.key:
            return None if path in self.open_paths or is_shown(self.key, headers) else RefusedError(401, NO_KEY)
        reason = None if path in OPEN_PATHS else host_refusal(headers, self.hosts)
        if not reason and scope["method"] == "POST":
            reason = page_refusal(headers, self.pages)
        return RefusedError(403, reason) if reason else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._with_cors or self._handle)(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = _corrected(super().openapi(), needs_key=bool(self.key))
        return self.openapi_schema


def _corrected(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    """Without the 422 that FastAPI adds to every path with parameters, and with the key where it is needed."""
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        schema = operation["responses"].get("422", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("$ref", "").endswith("HTTPValidationError"):
            del operation["responses"]["422"]
    components = document.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    if needs_key:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document
